"""Children of a process are found while it lives, known for themselves after it was killed, and ended; processes of Ray
end with their raylet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from specactor_ray.cluster.backend import ProcessFacts, end_family, family, is_alive
from specactor_ray.core.leftovers import start_ticks

PARENT = """
import subprocess, sys
depth = int(sys.argv[2])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], str(depth - 1)], start_new_session=True)
else:
    print("up", flush=True)
sys.stdin.read()
"""


def facts_of(pid: int, earlier: int = 0) -> ProcessFacts:
    return ProcessFacts(pid, (start_ticks(pid) or 0) - earlier, "node")


def test_children_outlive_a_killed_parent_and_are_known() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, PARENT, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    children: list[psutil.Process] = []
    try:
        assert parent.stdout.readline() == "up\n"
        first, *children = family(facts_of(parent.pid))
        assert first.pid == parent.pid
        assert len(children) == 2 and all(is_alive(child) for child in children)
        assert psutil.Process(children[1].pid).ppid() == children[0].pid
        assert children[0].pid in [child.pid for child in family(facts_of(os.getpid()))]
        parent.kill()
        parent.wait()
        assert not is_alive(first) and family(facts_of(parent.pid)) == []
        assert all(is_alive(child) for child in children)
        assert family(facts_of(children[0].pid))
        assert family(facts_of(children[0].pid, earlier=1)) == []
        assert end_family(children) and not any(is_alive(child) for child in children)
    finally:
        for child in [child for child in children if is_alive(child)]:
            child.kill()
        parent.kill()
        parent.communicate()


ACTOR = """
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
        command = [sys.executable, "-c", ACTOR]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as actor:
            assert actor.stdout is not None and actor.stdout.readline() == "watches\n"
            assert actor.poll() is None
            os.kill(raylet.pid, signal.SIGKILL)  # this process does not reap it before the end
            assert actor.wait(timeout=120) == 1
