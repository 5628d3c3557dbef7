"""A process that is bound to cores, with all its threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BIND = """
import os, sys, threading, time
{before}
stop = threading.Event()
thread = threading.Thread(target=stop.wait, daemon=True); thread.start()
from specactor_ray.actors.process import configure_process
core = max(os.sched_getaffinity(0))
configure_process("x", [core], "WARNING")
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
affinities = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
stop.set()
assert all(a == {{core}} for a in affinities), affinities
assert torch.get_num_threads() == 1, torch.get_num_threads()
assert os.environ["GOMP_SPINCOUNT"] == {spins!r}, os.environ["GOMP_SPINCOUNT"]
"""


@pytest.mark.parametrize(
    ("before", "chosen"),
    [("", {}), ("import torch; torch.set_num_threads(2)", {"GOMP_SPINCOUNT": "7"})],
    ids=["torch later", "torch loaded"],
)
def test_binding_reaches_every_thread_and_torch(before: str, chosen: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment.pop("GOMP_SPINCOUNT", None)
    script = BIND.format(before=before, spins=chosen.get("GOMP_SPINCOUNT", "3000"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env={**environment, **chosen}
    )
    assert done.returncode == 0, done.stderr
