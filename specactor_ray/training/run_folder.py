"""Where a training run lives, and from which checkpoint it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specactor_ray.config import Config
from specactor_ray.config.load import save_config
from specactor_ray.config.schema import TargetConfig
from specactor_ray.errors import ConfigError, InputError
from specactor_ray.modeling.loading import load_model_config
from specactor_ray.rollout.output import SUMMARY_FILE, claim_run_folder
from specactor_ray.training.checkpoint import CheckpointStore, TrainState, open_checkpoint

CHECKPOINTS, METRICS_FILE = "checkpoints", "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that is ready to start or to go on."""

    folder: Path
    store: CheckpointStore
    state: TrainState
    checkpoint: Path | None
    """To go on from; None starts from `target.model`."""

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS_FILE


def open_run(config: Config) -> TrainingRun:
    """Make the run's folder, or find the one to go on in, as `resume` says. Fills in `run.name`.

    Raises:
        ConfigError: The checkpoint is of another model.
        InputError: The folder holds another run, or the checkpoint that was named is not there or damaged.
    """
    facts = model_facts(config.target)
    fresh = TrainState(model=facts, seed=config.sampling.seed)
    if config.resume == "auto":
        found = _find_unfinished(config)
        if found is not None:
            return _continue(config, found, facts)
    checkpoint: Path | None = None
    if config.resume not in ("auto", "never"):
        checkpoint, fresh = open_checkpoint(Path(config.resume).expanduser())
        _refuse_other_model(checkpoint, fresh, facts)
    folder = claim_run_folder(config)
    return TrainingRun(folder, _store(config, folder), fresh, checkpoint)


def model_facts(target: TargetConfig) -> dict[str, Any]:
    """What tells one model from another, whatever folder it lies in."""
    config = load_model_config(target.model, trust_remote_code=target.trust_remote_code)
    text = config.get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: getattr(text, name, None) for name in names}


def _continue(config: Config, folder: Path, facts: dict[str, Any]) -> TrainingRun:
    config.run.name = folder.name
    store = _store(config, folder)
    newest = store.newest_sound()
    if newest is None:
        state, checkpoint = TrainState(model=facts, seed=config.sampling.seed), None
    else:
        checkpoint, state = newest
        _refuse_other_model(checkpoint, state, facts)
    store.remove_after(state.step)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    save_config(config, folder / f"config-from-step-{state.step:06d}.yaml")
    _keep_metrics_until(folder / METRICS_FILE, state.step)
    return TrainingRun(folder, store, state, checkpoint)


def _find_unfinished(config: Config) -> Path | None:
    """The run to go on with: the one that is named, else the latest in `run.dir` that did not end by itself."""
    base = Path(config.run.dir).expanduser()
    if config.run.name is not None:
        folder = base / config.run.name
        return folder if folder.is_dir() and any(folder.iterdir()) else None
    folders = [path.parent for path in base.glob(f"*/{METRICS_FILE}")] if base.is_dir() else []
    unfinished = [folder for folder in folders if _status(folder) != "complete"]
    return max(unfinished, key=lambda folder: (folder / METRICS_FILE).stat().st_mtime, default=None)


def _status(folder: Path) -> str:
    try:
        return str(json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError):
        return "unknown"


def _store(config: Config, folder: Path) -> CheckpointStore:
    section = config.checkpoint
    where = Path(section.dir).expanduser() if section.dir else folder / CHECKPOINTS
    return CheckpointStore(where, section.keep_last, section.keep_best)


def _refuse_other_model(checkpoint: Path, state: TrainState, facts: dict[str, Any]) -> None:
    different = [name for name, value in facts.items() if state.model.get(name) != value]
    if different:
        name = different[0]
        problem = f"{checkpoint} is of another model: its {name} is {state.model.get(name)}, here it is {facts[name]}."
        raise ConfigError("target.model", problem, "name the model that the run began with, or use resume=never.")


def _keep_metrics_until(file: Path, step: int) -> None:
    """Drop the records of steps that will be done again, and a last line that was cut off."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] > step:
            break
        kept.append(line + "\n")
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(file)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All records of a run, in the order of their steps.

    Raises:
        InputError: The file is missing or a line of it is not a record.
    """
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as metrics: {error}") from None
