"""Of two processes only one uses a folder; what a dead one held is free."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError
from specactor_ray.runs import folder as runs
from specactor_ray.runs.folder import RunInUseError, RunLease, lease_unfinished


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = RunLease(tmp_path / "run")
    with pytest.raises(RunInUseError, match=rf"run\.name: .*{os.getpid()} .*/run .*Fix"):
        RunLease(tmp_path / "run")
    first.release()
    first.release()
    assert list((tmp_path / "run").iterdir()) == []
    RunLease(tmp_path / "run").release()


def test_a_killed_process_leaves_its_lease(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from specactor_ray.runs.folder import RunLease
lease = RunLease(Path({str(tmp_path)!r}))
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGSTOP)  # standing still is not being dead
            with pytest.raises(RunInUseError, match=f"{process.pid}"):
                RunLease(tmp_path)
        finally:
            process.kill()
    RunLease(tmp_path).release()


@pytest.mark.parametrize(("number", "is_used"), [(errno.ENOLCK, True), (errno.EROFS, False)])
def test_a_file_system_without_locks_is_used_with_a_warning(
    number: int, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lock: FileLock) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(FileLock, "acquire", fail)
    if is_used:
        RunLease(tmp_path).release()
        assert "this file system has no locks" in caplog.text
    else:
        with pytest.raises(OSError, match="no"):
            RunLease(tmp_path)


def run_folder(base: Path, name: str) -> Path:
    (base / name).mkdir()
    (base / name / "partial").write_text("")
    return base / name


def test_runs_that_end_are_removed_or_cannot_be_locked_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("removed", "ends", "foreign", "mine")
    folders = {name: run_folder(tmp_path, name) for name in names}
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "partial").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(runs, "_newest_first", lambda base, file: [base / name / file for name in names])

    class Lease(RunLease):
        def __init__(self, folder: Path) -> None:
            if folder == folders["foreign"]:
                raise PermissionError(errno.EACCES, "Permission denied", str(folder / "run.lock"))
            if folder == folders["ends"]:
                (folder / "partial").unlink()
            if folder == folders["removed"]:
                (folder / "partial").unlink()
                folder.rmdir()
            super().__init__(folder)

    monkeypatch.setattr(runs, "RunLease", Lease)
    config = from_mapping({"run": {"dir": str(tmp_path)}})
    found = lease_unfinished(config.run, "partial", lambda folder: True)
    assert found is not None and found[0] == folders["mine"]
    found[1].release()
    assert not folders["removed"].exists()
    assert all(f"leaves out {name}: " in caplog.text for name in ("removed", "ends", "foreign"))


def test_the_newest_run_comes_first_and_what_vanishes_is_none(tmp_path: Path) -> None:
    import os

    for age, name in enumerate(("b", "a", "c")):
        os.utime(run_folder(tmp_path, name) / "partial", (age, age))
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "partial").symlink_to(tmp_path / "nowhere")
    assert [path.parent.name for path in runs._newest_first(tmp_path, "partial")] == ["c", "a", "b"]
    assert runs._newest_first(tmp_path / "nowhere", "partial") == []
    with pytest.raises(InputError, match=r"^run\.dir: x.*name too long"):
        runs._newest_first(Path("x" * 400), "partial")


def test_a_named_run_that_cannot_be_locked_is_refused_by_its_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "mine")
    (folder / "run.lock").mkdir()  # no file can be opened there
    config = from_mapping({"run": {"dir": str(tmp_path), "name": "mine"}})
    with pytest.raises(InputError, match=r"run\.dir: .*mine"):
        lease_unfinished(config.run, "partial", lambda folder: True)
