"""Files that are complete or as they were."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.config.load import from_mapping, save_config
from specactor_ray.core.files import append_json, replacing, write_json, write_text
from specactor_ray.runs.trajectories import TrajectoryWriter


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"n": 1})

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        write_half()
    assert path.read_text() == '{\n  "n": 1\n}\n'
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_mode_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "one", "")
        write_text(tmp_path / "two", "", new=True)
        with pytest.raises(FileExistsError):
            write_text(tmp_path / "two", "other", new=True)
        save_config(from_mapping({}), tmp_path / "config.yaml")
        TrajectoryWriter(tmp_path).write({})
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("one", "two", "config.yaml", "trajectories.jsonl.partial"), mode
    )


SCRIPT = """
import resource, signal, sys
from pathlib import Path
from specactor_ray.core.files import append_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
append_json(path, {"step": 1, "text": "x" * 60})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
before = path.read_bytes()
try:
    append_json(path, {"step": 2}, {"step": 3, "text": "y" * 60})  # the first one would have room
except OSError as error:
    assert "the disk is full" in str(error) and path.read_bytes() == before
    sys.exit(3)
"""


def test_lines_are_appended_all_or_none(tmp_path: Path) -> None:
    """A real limit on the size of files, in a separate process."""
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    append_json(path, {"step": 2, "text": "é\ud800"}, {"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    append_json(tmp_path / "rows", {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": "NaN"})
    text = (tmp_path / "rows").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.5, None, {"c": None}], "d": "NaN"}
