"""Kernels are compiled before the first request: compiling in a running step takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from specactor_ray.simulation.comparison import simulate_variant
from specactor_ray.spec import _kernels
from specactor_ray.verify.drafting import warm_up

def compiled():
    return {name: len(one.signatures) for name, one in vars(_kernels).items() if isinstance(one, Dispatcher)}

warm_up()
before = compiled()
assert all(before.values()), before
items = ["workload.requests=4", "workload.median_tokens=20", "workload.max_tokens=40"]
for variant in %r:
    simulate_variant(Path("conf/simulation/qwen32b_5xh100.yaml"), items, variant)
assert compiled() == before, compiled()
"""


@pytest.mark.slow
def test_no_kernel_is_compiled_in_a_step() -> None:
    program = PROGRAM % (["coupled", "decoupled"],)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
