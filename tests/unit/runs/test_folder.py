"""Of two processes only one trains in a folder; what a dead one held is free."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from specactor_ray.core.clock import SystemClock, Thread
from specactor_ray.core.errors import SpecActorError
from specactor_ray.runs.folder import LOCK_FILE, RunInUseError, RunLease


class _NoThread:
    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


class StillClock(SystemClock):
    """Time passes only while somebody sleeps; what happens meanwhile can be given. Starts no heartbeat."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.slept, self._meanwhile = 0.0, meanwhile

    def now(self) -> float:  # type: ignore[override]
        return self.slept

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.slept += seconds
        self._meanwhile()

    def spawn(self, target: Callable[[], None], name: str) -> Thread:
        return _NoThread()


def of_another_host(folder: Path, beat: int, token: str = "other") -> None:
    """What a process on a host that our locks do not reach has written."""
    facts = {"host": "far-away", "pid": 4711, "boot": "another kernel", "token": token, "beat": beat}
    (folder / LOCK_FILE).write_text(json.dumps(facts))


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = RunLease(tmp_path / "run")
    with pytest.raises(RunInUseError, match=r"run.name: process \d+ on .+ uses .*/run now. Fix"):
        RunLease(tmp_path / "run")
    first.release()
    first.release()
    assert list((tmp_path / "run").iterdir()) == []
    RunLease(tmp_path / "run").release()


def test_a_killed_process_leaves_its_lease(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from specactor_ray.runs.folder import RunLease
lease = RunLease(Path({str(tmp_path)!r}))
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            with pytest.raises(RunInUseError, match=rf"process {process.pid} on"):
                RunLease(tmp_path)
            process.send_signal(signal.SIGSTOP)  # standing still is not being dead
            with pytest.raises(RunInUseError):
                RunLease(tmp_path)
        finally:
            process.kill()
    clock = StillClock()
    RunLease(tmp_path, clock=clock).release()
    assert clock.slept == 0.0, "its lock says at once that it is dead"


def test_a_beat_of_another_host_guards_where_locks_do_not_reach(tmp_path: Path) -> None:
    of_another_host(tmp_path, 7)
    clock = StillClock()
    clock = StillClock(lambda: of_another_host(tmp_path, 8) if clock.slept >= 12.0 else None)
    with pytest.raises(RunInUseError, match="process 4711 on far-away"):
        RunLease(tmp_path, clock=clock)
    assert clock.slept < 30.0 and json.loads((tmp_path / LOCK_FILE).read_text())["beat"] == 8


def test_a_lease_of_another_host_expires_by_standing_still(tmp_path: Path) -> None:
    of_another_host(tmp_path, 7)
    clock = StillClock()
    lease = RunLease(tmp_path, clock=clock)
    assert clock.slept >= 30.0
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] != "far-away"
    lease.release()


def test_of_two_that_take_over_at_once_the_first_gives_way(tmp_path: Path) -> None:
    of_another_host(tmp_path, 7)
    clock = StillClock()
    clock = StillClock(lambda: of_another_host(tmp_path, 1, "third") if clock.slept > 30.0 else None)
    with pytest.raises(RunInUseError):
        RunLease(tmp_path, clock=clock)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == "third"


def test_who_was_taken_over_notices_and_leaves_the_others_lock(tmp_path: Path) -> None:
    lease = RunLease(tmp_path, clock=StillClock())
    lease.beat()
    lease.check()
    of_another_host(tmp_path, 1)
    lease.beat()
    assert lease.lost
    with pytest.raises(SpecActorError, match="process 4711 on far-away has taken over"):
        lease.check()
    lease.release()
    assert (tmp_path / LOCK_FILE).exists()


def test_a_live_holder_beats(tmp_path: Path) -> None:
    beaten = threading.Event()

    class Quick(SystemClock):
        def event(self) -> threading.Event:
            class Flag(threading.Event):
                def wait(self, timeout: float | None = None) -> bool:
                    if beat_of(tmp_path) >= 3:
                        beaten.set()
                    return super().wait(0.001)

            return Flag()

    lease = RunLease(tmp_path, clock=Quick())
    assert beaten.wait(60.0)
    lease.release()


def beat_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / LOCK_FILE).read_text())["beat"])
    except (OSError, ValueError):
        return 0
