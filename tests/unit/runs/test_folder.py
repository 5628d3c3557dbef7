"""Of two processes only one uses a folder; what a dead one held is free."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from specactor_ray.runs.folder import RunInUseError, RunLease


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
            with pytest.raises(RunInUseError, match=rf"process {process.pid} on"):
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
