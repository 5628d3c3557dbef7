"""Checkpoints that are complete or not there, checked when they are read, with the older ones kept as a fallback."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specactor_ray.errors import InputError
from specactor_ray.modeling.cache import flush_entry

logger = logging.getLogger(__name__)

_PREFIX, _PARTIAL = "step-", ".partial-"
_STATE, _MANIFEST = "state.json", "manifest.json"
_CHUNK = 1 << 22


@dataclass(slots=True)
class TrainState:
    """Where a training run is, between two steps. With the weights and the optimizer's state, all that a run is."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Tasks taken from the data."""
    skipped_tasks: int = 0
    """Tasks passed over because they do not fit the model."""
    bad_steps: int = 0
    """Steps that taught nothing, in a row, up to now: not finite, or every reward failed."""
    reward: float | None = None
    """Mean reward of the last step."""
    model: dict[str, Any] = field(default_factory=dict)
    """What tells the target model from others; see `model_facts`."""
    seed: int = 0
    """`sampling.seed`."""


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        folder: Made when the first one is saved.
        keep_last: Newest ones to keep.
        keep_best: Keep the one with the best reward too.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best

    def save(self, state: TrainState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `write` fills the folder it is given. Older ones are removed only afterwards.

        Raises:
            OSError: It could not be written (a full disk, say); nothing of it is left, the older ones are untouched.
        """
        name = f"{_PREFIX}{state.step:06d}"
        final, partial = self.folder / name, self.folder / f"{_PARTIAL}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            write(partial)
            (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
            _write_manifest(partial)
            if final.exists():  # of a run that was continued from before it
                shutil.rmtree(final)
            os.rename(partial, final)
            flush_entry(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_old(final)
        return final

    def all(self) -> list[Path]:
        """Checkpoints there are, oldest first, sound or not."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.startswith(_PREFIX) and path.is_dir())

    def newest_sound(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint whose files are all there and unchanged; corrupt ones are named in the log."""
        for path in reversed(self.all()):
            problem = find_damage(path)
            if problem is None:
                return path, read_state(path)
            logger.warning("checkpoint %s is damaged (%s); the one before it is used", path, problem)
        return None

    def remove_after(self, step: int) -> None:
        """Remove checkpoints later than this step, and what killed runs left half-written."""
        for path in self.all():
            if int(path.name.removeprefix(_PREFIX)) > step:
                shutil.rmtree(path)
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self, newest: Path) -> None:
        paths = self.all()
        keep = {newest, *paths[-self._keep_last :]}
        if self._keep_best:
            rewards = {path: read_state(path).reward for path in paths}
            scored = [path for path in paths if rewards[path] is not None]
            keep |= {max(scored, key=lambda path: rewards[path] or 0.0)} if scored else set()
        for path in paths:
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(path: Path) -> tuple[Path, TrainState]:
    """A checkpoint that the user named.

    Raises:
        InputError: It is not there, or damaged.
    """
    problem = find_damage(path)
    if problem is not None:
        raise InputError(f"resume: {path} cannot be used: {problem}; name another, or use resume=auto")
    return path, read_state(path)


def read_state(path: Path) -> TrainState:
    """The state saved in a checkpoint."""
    saved = json.loads((path / _STATE).read_text(encoding="utf-8"))
    known = {entry.name for entry in fields(TrainState)}
    return TrainState(**{name: value for name, value in saved.items() if name in known})


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None when each is there with the size and checksum it was saved with."""
    try:
        manifest: Mapping[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "its manifest is missing or not readable"
    for name, (size, checksum) in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _checksum(file) != checksum:
            return f"{name} has changed"
    return None


def _write_manifest(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = {}
    for file in files:
        flush_entry(file)
        manifest[str(file.relative_to(folder))] = (file.stat().st_size, _checksum(file))
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    flush_entry(folder / _MANIFEST)
    flush_entry(folder)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
