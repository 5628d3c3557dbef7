"""Files that are complete or as they were."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specactor_ray.core.files import replacing, write_json, write_text


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


def test_a_new_file_overwrites_none(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "mine", new=True)
    with pytest.raises(FileExistsError):
        write_text(path, "other", new=True)
    assert path.read_text() == "mine" and names(tmp_path) == ["report.json"]


def test_a_file_is_for_its_owner_unless_it_is_shared(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "own", "")
        write_text(tmp_path / "shared", "", shared=True, new=True)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "shared")] == [0o600, 0o644]
