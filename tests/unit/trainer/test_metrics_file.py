"""A full disk costs no record and leaves no half line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from specactor_ray.trainer.record import MetricsFile

SCRIPT = """
import resource, signal, sys
from pathlib import Path
from specactor_ray.trainer.record import MetricsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = MetricsFile(Path(sys.argv[1]))
assert file.append({"step": 1, "text": "x" * 60})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
before = file.path.read_bytes()
for step in (2, 3):  # the first 20 bytes of the line would have room
    assert not file.append({"step": step, "text": "y" * 60})
    assert file.path.read_bytes() == before
assert (file.failures, [record["step"] for record in file.pending]) == (2, [2, 3])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert file.append({"step": 4}) and not file.pending
"""


def test_records_wait_for_room_and_no_half_line_is_left(tmp_path: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_what_was_written_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    file = MetricsFile(path)
    assert file.flush() and file.append({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
