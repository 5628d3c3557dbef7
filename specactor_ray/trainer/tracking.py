"""Trackers of a training run besides its files: TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specactor_ray.config import Config
from specactor_ray.core.errors import in_words
from specactor_ray.runs.training import TrainingRun

logger = logging.getLogger(__name__)

Tracker = Callable[[int, Mapping[str, float], Sequence[Mapping[str, str]]], None]
"""Takes the number of a step, figures by name, and a table of a few outputs: rows of the same columns."""


def open_trackers(config: Config, run: TrainingRun, parts: contextlib.ExitStack) -> list[Tracker]:
    """The trackers of the configuration, as far as they are installed; `parts` closes them."""
    found = (_tensorboard(config, run, parts), _wandb(config, parts))
    return [tracker for tracker in found if tracker is not None]


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception as error:  # noqa: BLE001 - a tracker may raise anything
        logger.error("a tracker was not closed: %s", in_words(error))


def _tensorboard(config: Config, run: TrainingRun, parts: contextlib.ExitStack) -> Tracker | None:
    if not config.tracking.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("tensorboard is not installed; metrics go to the terminal and metrics.jsonl only")
        return None
    first = run.state.step + 1  # hides later records of an earlier attempt
    writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first)
    parts.callback(_close, writer.close)

    def write(step: int, figures: Mapping[str, float], outputs: Sequence[Mapping[str, str]]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        if outputs:
            rows = [outputs[0].keys(), ["---"] * len(outputs[0]), *(one.values() for one in outputs)]
            cells = ((cell.replace("|", "\\|").replace("\n", "<br>") for cell in row) for row in rows)
            lines = (f"| {' | '.join(row)} |" for row in cells)
            writer.add_text("completions", "\n".join(lines), step)
        writer.flush()

    return write


def _wandb(config: Config, parts: contextlib.ExitStack) -> Tracker | None:
    project, name = config.tracking.wandb_project, config.run.name
    if not project:
        return None
    import wandb  # type: ignore[import-not-found]

    run = wandb.init(project=project, name=name, id=name, resume="allow")
    parts.callback(_close, run.finish)

    def write(step: int, figures: Mapping[str, float], outputs: Sequence[Mapping[str, str]]) -> None:
        rows = [list(one.values()) for one in outputs]
        table = {"completions": wandb.Table(columns=list(outputs[0]), data=rows)} if outputs else {}
        run.log({**figures, **table}, step=step)

    return write
