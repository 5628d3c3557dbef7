"""Processes of Ray end with their raylet, also where no process reaps it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

PROGRAM = """
import os, time
from specactor_ray.cluster import backend
backend._RAYLET_CHECK_S = 0.05
backend.end_with_raylet()
print("watches", flush=True)
time.sleep(600)
"""


def test_a_raylet_that_is_not_reaped_ends_its_actors() -> None:
    with subprocess.Popen(["sleep", "600"]) as raylet:
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid)}
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as actor:
            assert actor.stdout is not None and actor.stdout.readline() == "watches\n"
            assert actor.poll() is None
            os.kill(raylet.pid, signal.SIGKILL)  # this process does not reap it before the end
            assert actor.wait(timeout=120) == 1
