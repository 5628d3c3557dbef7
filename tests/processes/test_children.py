"""Children of a process are found while it lives, and known for themselves after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from specactor_ray.cluster.children import Child, descendants

PARENT = """
import subprocess, sys
depth = int(sys.argv[2])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], str(depth - 1)], start_new_session=True)
else:
    print("up", flush=True)
sys.stdin.read()
"""


def test_children_outlive_a_killed_parent_and_are_known() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, PARENT, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    children: tuple[Child, ...] = ()
    try:
        assert parent.stdout.readline() == "up\n"
        children = descendants(parent.pid)
        assert len(children) == 2 and all(child.is_alive() for child in children)
        assert psutil.Process(children[1].pid).ppid() == children[0].pid
        assert children[0].pid in [child.pid for child in descendants(os.getpid())]
        parent.kill()
        parent.wait()
        assert descendants(parent.pid) == ()
        assert all(child.is_alive() for child in children)
        assert not Child(children[0].pid, children[0].start_ticks - 1).is_alive()
    finally:
        for child in children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
        parent.kill()
        parent.communicate()
    psutil.wait_procs([psutil.Process(child.pid) for child in children if child.is_alive()], timeout=240)
    assert not any(child.is_alive() for child in children)
