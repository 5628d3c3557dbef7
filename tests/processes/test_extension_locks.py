"""Locks of builds of C++ extensions: those of killed builds go, those of builds that run stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.learner.engines import extension_locks
from specactor_ray.learner.engines.extension_locks import remove_abandoned_locks

BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("building", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["op", "py311_cpu/op"])
def lock(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    folder.mkdir(parents=True)
    return folder / "lock"


def test_the_lock_of_a_killed_build_is_removed_and_no_other(lock: Path, tmp_path: Path) -> None:
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    assert remove_abandoned_locks(tmp_path) == [] and lock.exists()
    builder.kill()
    builder.communicate()
    assert lock.exists(), "which is why the next build would wait for ever"
    assert remove_abandoned_locks(tmp_path) == [lock] and not lock.exists()
    assert remove_abandoned_locks(tmp_path) == []


def test_a_lock_taken_anew_meanwhile_stays(lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()

    def another_rank_builds(seconds: float) -> None:
        del seconds
        lock.unlink()
        lock.write_text("")

    monkeypatch.setattr(extension_locks.time, "sleep", another_rank_builds)
    assert remove_abandoned_locks(tmp_path) == [] and lock.exists()


@pytest.mark.parametrize(("kind", "local"), [("ext4", True), ("nfs4", False), ("fuse.ceph", False)])
def test_locks_that_another_machine_may_hold_are_left_alone(kind: str, local: bool, lock: Path, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/home {tmp_path.resolve()} {kind} rw 0 0\n")
    assert extension_locks._is_local(lock, mounts) is local
    assert not extension_locks._is_local(lock, tmp_path / "none")
