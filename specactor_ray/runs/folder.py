"""Folder of a training run, and the checkpoint from which it continues."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config
from specactor_ray.config.load import load_config, save_config
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import parse_json, read_foreign, remove_if_empty, write_text
from specactor_ray.models.loading import load_model_config
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, open_checkpoint
from specactor_ray.runs.lease import RunInUseError, RunLease
from specactor_ray.runs.output import CONFIG_FILE, SUMMARY_FILE, claim_run_folder
from specactor_ray.runs.settings import compare_settings, settings_of

logger = logging.getLogger(__name__)

CHECKPOINTS, METRICS_FILE = "checkpoints", "metrics.jsonl"
_MOST_METRICS_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that is ready to start or continue."""

    folder: Path
    store: CheckpointStore
    state: TrainState
    checkpoint: Path | None
    """Checkpoint to continue from; None starts from `target.model`."""
    leases: tuple[RunLease, ...]
    """Leases of the folders that only this run writes to."""

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS_FILE

    @property
    def summary_file(self) -> Path:
        return self.folder / SUMMARY_FILE

    @property
    def is_saved(self) -> bool:
        """Whether its state can be restored: it is a checkpoint of this run, or the very beginning."""
        return self.state.step == 0 or (self.checkpoint is not None and self.checkpoint.parent == self.store.folder)

    def check_lease(self) -> None:
        """Raise SpecActorError if another process has taken over the run: nothing may be written any more."""
        for lease in self.leases:
            lease.check()

    @property
    def lost(self) -> bool:
        """Whether another process has taken over the run."""
        return any(lease.lost for lease in self.leases)

    def close(self) -> None:
        """Release the run for other processes. Idempotent."""
        for lease in self.leases:
            lease.release()


def open_run(config: Config, tasks: int | None = None, clock: Clock = SYSTEM, keep_dtype: bool = False) -> TrainingRun:
    """Create the run's folder, or find the one to continue in, by `resume`. Sets `run.name`. No other process can open
    the run until it is closed, or its process ends.

    Args:
        keep_dtype: `target.dtype` was `auto`: a continued run keeps its own data type, which is set here.

    Raises:
        ConfigError: The checkpoint is of another model, or its settings do not fit.
        InputError: The folder holds another run or is in use by one, cannot be written to, or the named checkpoint is
            missing or damaged.
    """
    state = TrainState(model=model_facts(config.target), settings=settings_of(config, tasks))
    base = Path(config.run.dir).expanduser()
    try:
        found = _lease_unfinished(config, base, clock) if config.resume == "auto" else None
        if found is None:
            config.run.name = config.run.name or new_run_name()
            folder = base / config.run.name
            lease = RunLease(folder, clock=clock)
        else:
            folder, lease = found
            config.run.name = folder.name
            if keep_dtype:
                with contextlib.suppress(ConfigError):
                    config.target.dtype = load_config(folder / CONFIG_FILE).target.dtype
        with contextlib.ExitStack() as undo:
            undo.callback(remove_if_empty, folder, folder.parent)
            undo.callback(lease.release)
            leases, section = [lease], config.checkpoint
            where = Path(section.dir).expanduser() if section.dir else folder / CHECKPOINTS
            if section.dir:
                leases.append(RunLease(where, "checkpoint.dir", clock))
                undo.callback(leases[-1].release)
            store = CheckpointStore(where, section.keep_last, section.keep_best)
            state, checkpoint = (_begin if found is None else _continue)(config, folder, store, state)
            undo.pop_all()
        return TrainingRun(folder, store, state, checkpoint, tuple(leases))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"run.dir: {error.filename or base} cannot be used ({reason}); name another folder") from None


def _begin(config: Config, folder: Path, store: CheckpointStore, now: TrainState) -> tuple[TrainState, Path | None]:
    """State and checkpoint of a new run."""
    checkpoint: Path | None = None
    state = now
    if config.resume not in ("auto", "never"):
        checkpoint, saved = open_checkpoint(Path(config.resume).expanduser())
        state = _continued(checkpoint, saved, now)
    if config.checkpoint.dir and store.all():
        raise InputError(
            f"checkpoint.dir: {store.folder} holds checkpoints of another run, which a new one would take for its own. "
            "Fix: name another folder, or go on with that run by resume=auto and its run.name"
        )
    claim_run_folder(config)
    return state, checkpoint


def model_facts(target: TargetConfig) -> dict[str, Any]:
    """Identity of a model, independent of its folder."""
    config = load_model_config(target.model, trust_remote_code=target.trust_remote_code)
    text = config.get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: getattr(text, name, None) for name in names}


def _continue(config: Config, folder: Path, store: CheckpointStore, now: TrainState) -> tuple[TrainState, Path | None]:
    """State and checkpoint of an existing run; its results after the checkpoint are removed."""
    newest = store.newest_sound()
    checkpoint, state = (None, now) if newest is None else (newest[0], _continued(*newest, now))
    store.remove_after(state.step)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    save_config(config, folder / f"config-from-step-{state.step:06d}.yaml")
    _keep_metrics_until(folder / METRICS_FILE, state.step)
    return state, checkpoint


def _continued(checkpoint: Path, saved: TrainState, now: TrainState) -> TrainState:
    """The saved state, for a run with the present settings.

    Raises:
        ConfigError: It is of another model, or its settings do not fit.
    """
    for name, value in now.model.items():
        if saved.model.get(name) != value:
            problem = f"{checkpoint} is of another model: its {name} is {saved.model.get(name)}, here it is {value}."
            raise ConfigError("target.model", problem, "name the model that the run began with, or use resume=never.")
    compare_settings(checkpoint, saved.settings, now.settings)
    return replace(saved, settings=now.settings)


def _lease_unfinished(config: Config, base: Path, clock: Clock) -> tuple[Path, RunLease] | None:
    """The run to continue, and its lease: the named one, else the latest in `run.dir` that did not end by itself and
    that no process trains.

    Raises:
        RunInUseError: The named run is in use.
    """
    if config.run.name is not None:
        folder = base / config.run.name
        used = folder.is_dir() and any(folder.iterdir())
        return (folder, RunLease(folder, clock=clock)) if used else None
    folders = [path.parent for path in base.glob(f"*/{METRICS_FILE}")] if base.is_dir() else []
    unfinished = [folder for folder in folders if _status(folder) != "complete"]
    for folder in sorted(unfinished, key=lambda folder: (folder / METRICS_FILE).stat().st_mtime, reverse=True):
        try:
            return folder, RunLease(folder, clock=clock)
        except RunInUseError as error:
            logger.warning("resume=auto leaves out %s: %s", folder.name, error)
    return None


def _status(folder: Path) -> str:
    try:
        return str(parse_json(read_foreign(folder / SUMMARY_FILE)).get("status"))
    except (OSError, ValueError, AttributeError):
        return "unknown"


def _keep_metrics_until(file: Path, step: int) -> None:
    """Drop the records of steps that will be repeated, and an incomplete last line."""
    if not file.exists():
        return
    kept = []
    for line in read_foreign(file, _MOST_METRICS_BYTES).splitlines():
        try:
            if parse_json(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line + "\n")
    write_text(file, "".join(kept), shared=True)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All records of a run, in the order of their steps. Raises InputError if one cannot be read."""
    try:
        return [parse_json(line) for line in read_foreign(file, _MOST_METRICS_BYTES).splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as metrics: {error}") from None
