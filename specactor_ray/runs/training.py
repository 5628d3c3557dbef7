"""A training run: its folder, its checkpoint to continue from, and the settings that must fit that checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specactor_ray.config import Config
from specactor_ray.config.load import save_config
from specactor_ray.config.schema import AUTO, RunConfig, TargetConfig
from specactor_ray.config.training_schema import Schedule, TrainerBackend
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import expanded, make_folder, parse_json, read_foreign, remove_if_empty
from specactor_ray.models.loading import load_model_config
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, open_checkpoint
from specactor_ray.runs.folder import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunLease,
    lease_new,
    lease_unfinished,
    run_dir_errors,
    saved_config,
    status_of,
)
from specactor_ray.runs.records import METRICS_FILE, drop_repeated

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_TASKS, _RANK = "number of tasks", "trainer.lora.rank"
_POSITION = (
    "sampling.seed",
    "data.path",
    "data.mixture",
    "data.map",
    "data.split",
    "data.options",
    "data.limit",
    "data.shuffle",
    "trainer.prompts_per_step",
    "evaluation.share",
)
"""Keys for which another value makes the saved position one in other tasks or in another order."""
_HASHED = ("data.options", "data.mixture", "environment.options", "evaluation.options")
"""Keys that may hold a token, which must not be in a checkpoint: it has their checksums."""
_SECTIONS = ("data", "sampling", "trainer", "algorithm", "reward", "environment", "evaluation")


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
    def is_saved(self) -> bool:
        """Whether its state can be restored: it is a checkpoint of this run, or the very beginning."""
        return self.state.step == 0 or (self.checkpoint is not None and self.checkpoint.parent == self.store.folder)

    def close(self) -> None:
        """Release the run for other processes. Idempotent."""
        for lease in self.leases:
            lease.release()


def keep_dtype(config: Config) -> None:
    """In place of `target.dtype: auto` set the data type of the run that `resume` continues, and the name of that run.
    Raises as `open_run`."""
    if config.target.dtype != AUTO or config.resume != "auto":
        return
    if (found := _lease_unfinished(config.run)) is not None:
        folder, lease = found
        lease.release()
        if (folder / CONFIG_FILE).exists():
            config.run.name, config.target.dtype = folder.name, saved_config(folder).target.dtype


def open_run(config: Config, tasks: int | None = None) -> TrainingRun:
    """Create the run's folder, or find the one to continue in, by `resume`. Sets `run.name`. No other process can open
    the run until it is closed, or its process ends.

    Raises:
        ConfigError: The checkpoint is of another model, or its settings do not fit.
        InputError: The folder holds another run or is in use by one, cannot be written to, or the named checkpoint is
            missing or damaged.
    """
    now, section = TrainState(model=model_facts(config.target), settings=settings_of(config, tasks)), config.checkpoint
    with run_dir_errors(Path(config.run.dir)), contextlib.ExitStack() as undo:
        found = _lease_unfinished(config.run) if config.resume == "auto" else None
        folder, lease = found or lease_new(config)
        undo.callback(remove_if_empty, folder, folder.parent)
        undo.callback(lease.release)
        config.run.name, leases = folder.name, [lease]
        where = expanded(section.dir) if section.dir else folder / CHECKPOINTS
        if section.dir:
            undo.callback(remove_if_empty, *make_folder(where, "checkpoint.dir"))
            leases.append(RunLease(where, "checkpoint.dir"))
            undo.callback(leases[-1].release)
        store = CheckpointStore(where, section.keep_last, section.keep_best)
        state, checkpoint = (_continue if found else _begin)(config, folder, store, now)
        undo.pop_all()
    return TrainingRun(folder, store, state, checkpoint, tuple(leases))


def _lease_unfinished(run: RunConfig) -> tuple[Path, RunLease] | None:
    """The run to continue, and its lease; a named run continues after its end, too."""
    if run.name is None:
        return lease_unfinished(run, METRICS_FILE, lambda folder: status_of(folder) != "complete")
    return lease_unfinished(run, METRICS_FILE, lambda folder: folder.is_dir() and any(folder.iterdir()))


def _begin(config: Config, folder: Path, store: CheckpointStore, now: TrainState) -> tuple[TrainState, Path | None]:
    """State and checkpoint of a new run."""
    checkpoint: Path | None = None
    state = now
    if config.resume not in ("auto", "never"):
        checkpoint, saved = open_checkpoint(expanded(config.resume))
        state = replace(_continued(checkpoint, saved, now), evaluated=-1, evaluation=None)
    if config.checkpoint.dir and store.all():
        raise InputError(
            f"checkpoint.dir: {store.folder} holds checkpoints of another run, which a new one would take for its own. "
            "Fix: name another folder, or go on with that run by resume=auto and its run.name"
        )
    save_config(config, folder / CONFIG_FILE)
    return state, checkpoint


def _continue(config: Config, folder: Path, store: CheckpointStore, now: TrainState) -> tuple[TrainState, Path | None]:
    """State and checkpoint of an existing run; its results after the checkpoint are removed."""
    newest = store.newest_sound()
    if newest is None:
        _refuse_to_erase(folder, store)
        checkpoint, state = None, now
    else:
        checkpoint, state = newest[0], _continued(*newest, now)
    store.remove_after(state.step)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    save_config(config, folder / f"config-from-step-{state.step:06d}.yaml")
    drop_repeated(folder, state.step, state.evaluated)
    return state, checkpoint


def _refuse_to_erase(folder: Path, store: CheckpointStore) -> None:
    """Raise InputError if a run without a sound checkpoint had some: from step 0 on it would erase its own results."""
    usual = [folder / CHECKPOINTS] if (folder / CHECKPOINTS).is_dir() else []
    others = sorted({*usual, *_named_folders(folder)} - {store.folder})
    if found := store.all():
        problem = f"none of the {len(found)} checkpoints in {store.folder} is sound"
    elif _has_saved(folder) or any(CheckpointStore(other, 1, False).all() for other in others):
        problem = f"{store.folder} has none of the checkpoints of this run"
    else:
        return
    fix = "restore one" + f", or name the right folder (it was {' or '.join(map(str, others))})" * bool(others)
    problem = f"{problem}, and to go on from step 0 would erase the results in {folder}"
    raise InputError(f"checkpoint.dir: {problem}. Fix: {fix}, or begin a new run by resume=never and another run.name")


def _named_folders(folder: Path) -> Iterator[Path]:
    """Each `checkpoint.dir` with which a run began or went on."""
    for file in folder.glob("config*.yaml"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
            yield expanded(yaml.safe_load(read_foreign(file))["checkpoint"]["dir"])


def _has_saved(folder: Path) -> bool:
    """Whether a run's summary has checkpoints; if it has no summary, whether a step of it has written one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return bool(parse_json(read_foreign(folder / SUMMARY_FILE))["checkpoints"])
    with contextlib.suppress(OSError):
        return b'"checkpoint": [' in (folder / METRICS_FILE).read_bytes()  # its begin and end in the timeline
    return False


def _continued(checkpoint: Path, saved: TrainState, now: TrainState) -> TrainState:
    """The saved state, for a run with the present settings. ConfigError: it is of another model, or its settings do not
    fit."""
    for name, value in now.model.items():
        if saved.model.get(name) != value:
            problem = f"{checkpoint} is of another model: its {name} is {saved.model.get(name)}, here it is {value}."
            raise ConfigError("target.model", problem, "name the model that the run began with, or use resume=never.")
    compare_settings(checkpoint, saved.settings, now.settings)
    return replace(saved, settings=now.settings)


def model_facts(target: TargetConfig) -> dict[str, Any]:
    """Identity of a model, independent of its folder."""
    text = load_model_config(target.model, trust_remote_code=target.trust_remote_code).get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: getattr(text, name, None) for name in names}


def settings_of(config: Config, tasks: int | None = None) -> dict[str, Any]:
    """Settings of the sections that determine a run's results, by key; values as in JSON."""
    sections = ((section, asdict(getattr(config, section))) for section in _SECTIONS)
    settings = {f"{section}.{name}": value for section, values in sections for name, value in values.items()}
    if config.trainer.backend is not TrainerBackend.deepspeed:
        del settings["trainer.zero_stage"]
    lora = settings.pop("trainer.lora")
    settings |= {f"trainer.lora.{name}": value for name, value in lora.items() if lora["rank"] or name == "rank"}
    if config.trainer.schedule is Schedule.constant:
        del settings["trainer.steps"]
    for key, path in (("data.path", config.data.path), ("evaluation.path", config.evaluation.path)):
        if path is not None and ":" not in path:
            settings[key] = os.path.normpath(path)
    for key in _HASHED:
        settings[key] = zlib.crc32(json.dumps(settings[key], sort_keys=True, default=str).encode())
    if tasks is not None:
        settings[_TASKS] = tasks
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def compare_settings(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue, with a ConfigError, if the data's position or the files of the checkpoint would not fit; warn
    by name of all other changes. Keys that are missing in `before`, its settings, are not compared."""
    before = {_RANK: None, **before}  # those of earlier versions
    changed = {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}
    was_on = before.get("evaluation.path") or before.get("evaluation.share")
    evaluation = [key for key in changed if key.startswith("evaluation.") and key != "evaluation.every"]
    for why, keys in (
        ("its position in the data would mean other tasks", (*_POSITION, _TASKS)),
        ("its evaluations would not be comparable", evaluation if was_on else ()),
        ("the optimizer's state does not fit", ("trainer.backend", "trainer.ranks", "trainer.zero_stage")),
        ("the adapter does not fit", (_RANK, "trainer.lora.alpha", "trainer.lora.targets")),
        ("only ppo has a value head", ["algorithm.name"] * ("ppo" in changed.get("algorithm.name", ()))),
    ):
        for key in keys:
            if key in changed:
                _refuse(checkpoint, key, *changed[key], why)
    for key, (old, new) in changed.items():
        logger.warning("%s is %s now; up to %s it was %s", key, _shown(new), checkpoint.name, _shown(old))


def _refuse(checkpoint: Path, key: str, old: Any, new: Any, why: str) -> None:
    values = "" if key in _HASHED else f" ({_shown(new)} here, {_shown(old)} there)"
    fix = "restore the data" if key in (_TASKS, *_HASHED) else f"use {key}={_shown(old)}"
    problem = f"differs from what {checkpoint} was made with{values}: {why}."
    begin = f"begin a new run from its weights (resume=never target.model={checkpoint / 'weights'})"
    raise ConfigError("data.path" if key == _TASKS else key, problem, f"{fix}, or {begin}.")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
