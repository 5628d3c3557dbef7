"""What killed processes leave is removed by later ones; what living ones use is not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.core import leftovers

MAKE = """
import sys
from pathlib import Path
from specactor_ray.core.leftovers import make_owned_folder
folder = make_owned_folder("specactor-", sys.argv[1])
(folder / "sub").mkdir()
(folder / "sub" / "file").write_text("x")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    yield process
    process.kill()
    process.communicate()


def test_the_folder_of_a_killed_process_is_removed_and_no_other(owner: subprocess.Popen, tmp_path: Path) -> None:
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    mine = leftovers.make_owned_folder("specactor-", tmp_path)
    (tmp_path / "specactor-unowned").mkdir()
    elsewhere = tmp_path / "specactor-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("another-boot/pid:[1] 1 1")
    leftovers.remove_abandoned("specactor-", tmp_path)
    assert (folder / "sub" / "file").exists()
    assert set(leftovers.living_folders("specactor-", tmp_path)) == {folder, mine}
    owner.kill()
    owner.wait()
    leftovers.remove_abandoned("specactor-", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["specactor-unowned", "specactor-elsewhere", mine.name]
    )


def test_a_later_process_of_the_same_pid_is_another_owner(tmp_path: Path) -> None:
    folder = leftovers.make_owned_folder("specactor-", tmp_path)
    where, pid, ticks = (folder / "owner").read_text().split(" ")
    assert int(pid) == os.getpid()
    (folder / "owner").write_text(f"{where} {pid} {int(ticks) - 1}")
    leftovers.remove_abandoned("specactor-", tmp_path)
    assert not folder.exists()


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "owner").write_text(f"{leftovers._where()} 1 1")
    (kept / "file").write_text("x")
    (tmp_path / "specactor-link").symlink_to(kept)
    leftovers.remove_abandoned("specactor-", tmp_path)
    assert (kept / "file").exists()
