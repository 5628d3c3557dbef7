"""Checkpoints: complete or not there, damage is seen, and older ones stand until a newer one does."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specactor_ray.errors import InputError
from specactor_ray.training.checkpoint import CheckpointStore, TrainState, find_damage, open_checkpoint


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.bin").write_text(text)

    return write


def save(store: CheckpointStore, step: int, reward: float = 0.0) -> Path:
    return store.save(TrainState(step=step, position=3 * step, reward=reward), writer(f"weights of {step}"))


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", 2, False)
    path = save(store, 5, 0.25)
    assert store.newest_sound() == (path, TrainState(step=5, position=15, reward=0.25))
    assert (path / "weights" / "model.bin").read_text() == "weights of 5"
    assert not list((tmp_path / "c").glob(".*"))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, True)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.2), (5, 0.4)):
        save(store, step, reward)
    assert [path.name for path in store.all()] == ["step-000002", "step-000004", "step-000005"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, 3, False)
    sound, broken = save(store, 1), save(store, 2)
    file = broken / "weights" / "model.bin"
    if damage == "cut":
        file.write_text("weights")
    elif damage == "flip":
        file.write_text("weights of 3")
    elif damage == "remove":
        file.unlink()
    else:
        (broken / "manifest.json").write_text("{")
    found = store.newest_sound()
    assert found is not None and found[0] == sound
    assert "step-000002 is damaged" in caplog.text
    with pytest.raises(InputError, match="step-000002 cannot be used"):
        open_checkpoint(broken)


def test_a_failed_save_leaves_the_older_one_and_no_trace(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, False)
    sound = save(store, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        store.save(TrainState(step=2), fail)
    assert [path.name for path in tmp_path.iterdir()] == [sound.name]
    assert find_damage(sound) is None


def test_a_full_disk_leaves_the_older_one(tmp_path: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    script = f"""
import sys
from pathlib import Path
from specactor_ray.training.checkpoint import CheckpointStore, TrainState
store = CheckpointStore(Path({str(tmp_path)!r}), 1, False)
def write(size):
    return lambda folder: (folder / "model.bin").write_bytes(b"x" * size)
store.save(TrainState(step=1), write(1000))
try:
    store.save(TrainState(step=2), write(100_000))
except OSError:
    sys.exit(7)
"""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run([sys.executable, "-c", script], preexec_fn=limit)
    assert done.returncode == 7
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert find_damage(tmp_path / "step-000001") is None


def test_going_on_from_an_earlier_step_removes_the_later_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 5, False)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / ".partial-step-000009").mkdir()
    store.remove_after(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
