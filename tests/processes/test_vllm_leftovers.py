"""What a verifier that was killed leaves of its ranks is removed by the next one. Without vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specactor_ray.core.leftovers import SHARED_MEMORY
from specactor_ray.target import vllm_settings

ROOT = Path(__file__).parents[2]

VERIFIER = """
import subprocess, sys, torch
from multiprocessing import shared_memory
from specactor_ray.target import vllm_settings
segment = lambda: shared_memory.SharedMemory(create=True, size=4096)
foreign = segment()
others = vllm_settings.shared_memory()
assert others == {foreign.name}
own = segment()
RANK = '''
import sys
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
print(segment.name, flush=True)
sys.stdin.read()
'''
rank = subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
of_rank = rank.stdout.readline().strip()
record = vllm_settings.record_shared_memory(others)
with vllm_settings.folder_of({"a": torch.ones(3)}) as folder:
    print(foreign.name, own.name, of_rank, record, folder, flush=True)
    sys.stdin.read()
"""


def test_shared_memory_and_weights_of_a_killed_verifier_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(vllm_settings.tempfile, "tempdir", None)
    process = subprocess.Popen(
        [sys.executable, "-c", VERIFIER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    foreign, *rest = process.stdout.readline().split()
    own, of_rank, record, weights = (SHARED_MEMORY / rest[0], SHARED_MEMORY / rest[1], Path(rest[2]), Path(rest[3]))
    try:
        vllm_settings.remove_what_killed_ones_left()
        assert all(path.exists() for path in (own, of_rank, record, weights / "model.safetensors"))
        os.killpg(process.pid, signal.SIGKILL)  # and so Python's own tidier with it
        process.communicate()
        assert own.exists() and of_rank.exists()
        vllm_settings.remove_what_killed_ones_left()
        assert not any(path.exists() for path in (own, of_rank, record, weights))
        assert (SHARED_MEMORY / foreign).exists()
    finally:
        for path in (SHARED_MEMORY / foreign, own, of_rank):
            path.unlink(missing_ok=True)


def test_weights_are_gone_when_they_were_read() -> None:
    with vllm_settings.folder_of({"a": torch.ones(3)}) as folder:
        assert {path.name for path in Path(folder).iterdir()} == {"model.safetensors", "owner"}
    assert not Path(folder).exists()
