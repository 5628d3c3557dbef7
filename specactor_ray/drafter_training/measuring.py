"""A drafter's acceptance table: recorded rollouts, replayed at each temperature and with each kind of noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.config.schema import DrafterConfig
from specactor_ray.config.validate import DRAFTER_CHECKS
from specactor_ray.drafter_training.card import read_card
from specactor_ray.drafter_training.corpus import Record
from specactor_ray.drafter_training.evaluation import replay
from specactor_ray.drafters.registry import build_proposer
from specactor_ray.errors import ConfigError, InputError
from specactor_ray.observability.phase_progress import PhaseProgress, show_tokens

NOISY_METHODS = ("draft_model",)
"""Methods that sample, so that it matters whose noise they use."""
_REPLAY_BATCH = 16


def drafter_of(folder: Path) -> DrafterConfig:
    """The drafter in a folder: of the method that its `drafter.json` names; any other model is a `draft_model`.

    Raises:
        InputError: There is no such folder, or its `drafter.json` cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"--drafter: there is no folder {folder}. Fix: name the folder that `drafter train` wrote")
    card = read_card(folder)
    return DrafterConfig(method="draft_model" if card is None else card["method"], model=str(folder))


def method_alone(method: str) -> DrafterConfig:
    """A method that needs no trained model.

    Raises:
        InputError: It is unknown, or needs a model.
    """
    config = DrafterConfig(method=method)
    try:
        for check in DRAFTER_CHECKS:
            check(config, "--method")
    except ConfigError as error:
        raise InputError(f"--method: {method!r} cannot be measured alone: {error.problem} {error.fix}") from None
    return config


def measure(
    drafter: DrafterConfig, parts: Mapping[str, Sequence[Record]], window: int, device: str, console: Console
) -> list[dict[str, Any]]:
    """Replay every part through the drafter: with the target's noise and with its own where that makes a difference."""
    rows = []
    for part, records in parts.items():
        temperature = records[0].sampling.temperature
        noisy = temperature > 0.0 and drafter.method in NOISY_METHODS
        for shared in (True, False) if noisy else (True,):
            proposer = build_proposer(replace(drafter, shared_noise=shared), device)
            noise = ("shared" if shared else "own") if noisy else "-"
            total = sum(len(record.output_token_ids) for record in records)
            title = f"replay, T={temperature:g}" + (f", {noise} noise" if noisy else "")
            with PhaseProgress(console, title, total) as progress:
                counts = replay(proposer, records, window, _REPLAY_BATCH, show_tokens(progress))
            rows.append({"part": part, "temperature": temperature, "noise": noise, **counts.facts()})
    return rows
