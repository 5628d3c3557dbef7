"""Metrics for other programs: TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from specactor_ray.config import Config
from specactor_ray.core.errors import ConfigError

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives one record per step."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_trackers(config: Config, folder: Path, first_step: int) -> list[Tracker]:
    """The configured trackers.

    Args:
        first_step: Number of steps done so far; later records of an earlier attempt are hidden.

    Raises:
        ConfigError: Weights & Biases is configured but not installed.
    """
    trackers: list[Tracker] = []
    if config.tracking.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            logger.info("tensorboard is not installed; metrics go to the terminal and metrics.jsonl only")
        else:
            trackers.append(_TensorBoard(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)))
    if config.tracking.wandb_project:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            fix = "pip install wandb, or leave tracking.wandb_project out."
            raise ConfigError("tracking.wandb_project", "wandb is not installed.", fix) from None
        name = config.run.name
        trackers.append(_Wandb(wandb.init(project=config.tracking.wandb_project, name=name, id=name, resume="allow")))
    return trackers


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record with the names of their sections, such as `("train/reward_mean", 0.5)`."""
    for section in ("train", "gap", "speed", "seconds"):
        for name, value in record[section].items():
            if isinstance(value, int | float):
                yield f"{section}/{name}", float(value)
    for method, (drafted, accepted) in record["speed"].get("by_method", {}).items():
        if drafted:
            yield f"speed/acceptance_rate/{method}", accepted / drafted
