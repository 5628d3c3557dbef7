"""Checkpoints: complete or not there, damage is seen, and older ones stand until a newer one does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.runs.checkpoint import (
    CheckpointStore,
    TrainState,
    find_damage,
    mean_reward,
    open_checkpoint,
)


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.bin").write_text(text)

    return write


def save(store: CheckpointStore, step: int, reward: float = 0.0) -> Path:
    return store.save(TrainState(step=step, position=3 * step, reward=reward), writer(f"weights of {step}"))


def test_the_newest_and_the_best_sound_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, True)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.2), (5, 0.4)):
        path = save(store, step, reward)
    assert store.newest_sound() == (path, TrainState(step=5, position=15, reward=0.4))
    assert (path / "weights" / "model.bin").read_text() == "weights of 5"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]
    (path / "weights" / "model.bin").unlink()
    save(store, 6)
    assert [path.name for path in store.all()] == ["step-000002", "step-000004", "step-000006"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


ROTTEN = ("{", "[]", '{"a": [1]}', fifo)


@pytest.mark.parametrize(
    ("file", "content"),
    [("weights/model.bin", "weights"), ("weights/model.bin", "weights of 3"), ("weights/model.bin", None)]
    + [(file, content) for file in ("state.json", "manifest.json") for content in ROTTEN],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_is_never_in_the_way(
    file: str, content: str | Callable[[Path], None] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, 1, True)
    sound, broken = save(store, 1, 0.9), save(CheckpointStore(tmp_path, 5, True), 2)
    (broken / file).unlink()
    if callable(content):
        content(broken / file)
    elif content is not None:
        (broken / file).write_text(content)
    assert find_damage(broken) is not None
    found = store.newest_sound()
    assert found is not None and found[0] == sound
    assert "step-000002 is damaged" in caplog.text
    with pytest.raises(InputError, match="step-000002 cannot be used"):
        open_checkpoint(broken)
    save(store, 3)
    assert {"step-000001", "step-000003"} <= {path.name for path in store.all()}, "the best one is kept"


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


def test_a_checkpoint_without_weights_is_none(tmp_path: Path) -> None:
    """As when the ranks wrote into a folder of the same name on another node."""
    store = CheckpointStore(tmp_path, 1, False)
    sound = save(store, 1)
    with pytest.raises(OSError, match=r"no weights; checkpoint\.dir must be a folder that all nodes share"):
        store.save(TrainState(step=2), lambda folder: None)
    assert store.all() == [sound]
    manifest = json.loads((sound / "manifest.json").read_text())
    (sound / "manifest.json").write_text(json.dumps({"state.json": manifest["state.json"]}))
    problem = find_damage(sound)
    assert problem is not None and "weights" in problem


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        writer("w")(folder)
        (folder / "weights" / "model.bin").chmod(0o600)  # as safetensors leaves them

    (tmp_path / "other").touch()
    path = CheckpointStore(tmp_path, 2, True).save(TrainState(step=1), write)
    assert {one.stat().st_mode for one in path.rglob("*") if one.is_file()} == {(tmp_path / "other").stat().st_mode}


def test_a_folder_with_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, False)
    for other in ("step-final", ".partial-step-000009"):
        (tmp_path / other).mkdir()
    path = save(store, 1_000_000)
    assert save(store, 999_999).name == "step-999999"
    assert path in store.all() and [p.name for p in store.all()][-1] == "step-1000000"
    store.remove_after(999_999)
    assert [p.name for p in store.all()] == ["step-999999"]
    assert {p.name for p in tmp_path.iterdir()} == {"step-999999", "step-final"}


def test_one_lucky_step_does_not_make_the_best_checkpoint() -> None:
    def best(rewards: list[float]) -> int:
        mean, means = None, []
        for step, reward in enumerate(rewards, 1):
            mean = mean_reward(mean, reward, step)
            means.append(mean)
        return max(range(len(means)), key=lambda index: means[index] or 0.0)

    assert best([0.1, 0.1, 0.1, 0.1, 0.9, 0.1, 0.5, 0.6, 0.6, 0.6, 0.6]) == 10
    assert mean_reward(mean_reward(0.25, None, 2), 0.75, 2) == 0.5 and mean_reward(None, None, 1) is None
