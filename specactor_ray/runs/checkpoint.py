"""Checkpoints that are complete or absent, verified when they are read, with older ones kept as a fallback."""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import flush_entry, parse_json, read_foreign, to_json

logger = logging.getLogger(__name__)

_PREFIX, _PARTIAL = "step-", ".partial-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")
_STATE, _MANIFEST = "state.json", "manifest.json"
_WEIGHTS = "weights/"
_CHUNK = 1 << 22
_SHARE_OF_A_STEP = 0.2


@dataclass(slots=True)
class TrainState:
    """State of a training run between two steps, besides the weights and the optimizer's state."""

    step: int = 0
    """Number of steps done."""
    position: int = 0
    """Number of tasks taken from the data."""
    skipped_tasks: int = 0
    """Number of tasks skipped because their prompt is too long or cannot be encoded."""
    bad_steps: int = 0
    """Number of latest consecutive steps without training effect: not finite, or no sample to use."""
    reward: float | None = None
    """Mean reward over the last steps; see `mean_reward`."""
    evaluated: int = -1
    """Step of the run's last evaluation; -1 before the first."""
    evaluation: float | None = None
    """Mean reward of the evaluation of these weights, if there was one."""
    model: dict[str, Any] = field(default_factory=dict)
    """Identity of the target model; see `model_facts`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run, by key; see `settings_of`."""


class CheckpointStore:
    """The newest checkpoints of one run, in a folder that is created with the first one."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best

    def save(self, state: TrainState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `write` fills the folder that it receives. Older ones are removed only afterwards.
        OSError: it could not be written (a full disk); nothing of it is left, the older ones are untouched."""
        name = f"{_PREFIX}{state.step:06d}"
        final, partial = self.folder / name, self.folder / f"{_PARTIAL}{name}"
        replaced = self.folder / f"{_PARTIAL}replaced-{name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            _write_text(partial / _STATE, asdict(state))
            _write_manifest(partial)
            if final.exists():  # of a run that was continued from an earlier step
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(final, replaced)
            os.rename(partial, final)
            flush_entry(self.folder)
        except BaseException:
            if replaced.exists() and not final.exists():
                os.rename(replaced, final)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        self._remove_old(final)
        return final

    def all(self) -> list[Path]:
        """Existing checkpoints, oldest first, sound or not."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
        return sorted(found, key=_step)

    def sound(self) -> list[Path]:
        """Existing checkpoints without damage, oldest first, judged by names and sizes: checksums take as long as a
        save."""
        return [path for path in self.all() if find_damage(path, sums=False) is None]

    def best(self) -> Path | None:
        """The best one that is sound, by `best_of`, else the newest; None if there is none."""
        sound = self.sound()
        return best_of(sound) or (sound[-1] if sound else None)

    def is_best(self, evaluation: float | None) -> bool:
        """Whether the best checkpoint is kept, and none has an evaluation as good as this one."""
        best = self.best()
        before = None if best is None else read_state(best).evaluation
        return self._keep_best and evaluation is not None and (before is None or evaluation > before)

    def newest_sound(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint with complete and unchanged files; corrupt ones are logged by name."""
        for path in reversed(self.all()):
            problem = find_damage(path)
            if problem is None:
                return path, read_state(path)
            logger.warning("checkpoint %s is damaged (%s); the one before it is used", path, problem)
        return None

    def remove_after(self, step: int) -> None:
        """Remove checkpoints later than this step, and incomplete ones of killed runs."""
        for path in self.all():
            if _step(path) > step:
                shutil.rmtree(path)
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self, newest: Path) -> None:
        """Remove surplus checkpoints; damaged ones do not count as kept."""
        try:
            older = [path for path in self.all() if path != newest]
            sound = [path for path in self.sound() if path != newest] + [newest]
            keep = {*sound[-self._keep_last :], best_of(sound) if self._keep_best else None}
        except OSError as error:  # the new one is saved nevertheless
            logger.warning("old checkpoints in %s stay: %s", self.folder, error)
            return
        for path in older:
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """The one with the best evaluation, the oldest of several; if none was evaluated, that with the best training
    reward; None if none has one. Raises InputError for one that is not sound."""
    states = {path: read_state(path) for path in checkpoints}
    evaluations = {path: state.evaluation for path, state in states.items() if state.evaluation is not None}
    scores = evaluations or {path: state.reward for path, state in states.items() if state.reward is not None}
    return max(scores, key=scores.__getitem__, default=None)


def open_checkpoint(path: Path) -> tuple[Path, TrainState]:
    """Open a checkpoint that the user named. Raises InputError if it is missing or damaged."""
    problem = find_damage(path)
    if problem is not None:
        raise InputError(f"resume: {path} cannot be used: {problem}; name another, or use resume=auto")
    return path, read_state(path)


def mean_reward(before: float | None, reward: float | None, steps: int) -> float | None:
    """Mean reward over all steps for the first few, then an exponential mean (the last five count most), from the mean
    `before` a step and its reward, None if nothing was scored. `steps` includes it."""
    if before is None or reward is None:
        return before if reward is None else reward
    return before + max(1.0 / max(steps, 1), _SHARE_OF_A_STEP) * (reward - before)


def read_state(path: Path) -> TrainState:
    """State saved in a checkpoint. Raises InputError if it is missing or invalid."""
    try:
        saved = parse_json(read_foreign(path / _STATE))
        known = {entry.name for entry in fields(TrainState)}
        return TrainState(**{name: value for name, value in saved.items() if name in known})
    except (OSError, ValueError, AttributeError, TypeError):
        raise InputError(f"{path / _STATE} is missing or not readable") from None


def find_damage(path: Path, *, sums: bool = True) -> str | None:
    """Description of a checkpoint's damage; None if all files that it was saved with exist and are unchanged, with
    `sums` by their checksums, too."""
    try:
        manifest = parse_json(read_foreign(path / _MANIFEST))
        entries = [(name, int(size), int(checksum)) for name, (size, checksum) in manifest.items()]
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return "its manifest is missing or not readable"
    for name, size, checksum in entries:
        if problem := _file_problem(path, name, size, checksum if sums else None):
            return problem
    if _STATE not in manifest or not any(name.startswith(_WEIGHTS) for name in manifest):
        return "it is not whole: state or weights are missing from its manifest"
    try:
        read_state(path)
    except InputError as error:
        return str(error)
    return None


def _file_problem(folder: Path, name: str, size: int, checksum: int | None) -> str | None:
    file = folder / name
    try:
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if checksum is not None and _checksum(file) != checksum:
            return f"{name} has changed"
    except (OSError, ValueError, RuntimeError) as error:  # unreadable; a name with a zero byte; a loop of links
        return f"{name} cannot be read ({error})"
    return None


def _write_manifest(folder: Path) -> None:
    """List all files with sizes and checksums, set their modes by the umask, and flush them to the disk. OSError: the
    folder has no weights."""
    entries = sorted(folder.rglob("*"))
    manifest = {}
    for file in (entry for entry in entries if entry.is_file()):
        flush_entry(file)
        manifest[file.relative_to(folder).as_posix()] = (file.stat().st_size, _checksum(file))
    if not any(name.startswith(_WEIGHTS) for name in manifest):
        raise OSError(f"{folder} holds no weights; checkpoint.dir must be a folder that all nodes share")
    _write_text(folder / _MANIFEST, manifest)
    for name in manifest:
        shutil.copymode(folder / _MANIFEST, folder / name)  # safetensors ignores the umask
    for entry in (*(entry for entry in entries if entry.is_dir()), folder / _MANIFEST, folder):
        flush_entry(entry)


def _write_text(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(to_json(data, indent=1) + "\n", encoding="utf-8")


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
