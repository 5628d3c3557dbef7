"""A drafter's acceptance table: recorded rollouts, replayed at each temperature and with each kind of noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specactor_ray.config.methods import drafter_spec, reads_head, traits
from specactor_ray.config.rules import validate_drafter
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.progress import PhaseProgress, show_tokens
from specactor_ray.distill.card import read_card
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.evaluation import replay
from specactor_ray.distill.rollouts import Corpus
from specactor_ray.draft.registry import build_proposer
from specactor_ray.models.checkpoint_files import describes_head

if TYPE_CHECKING:
    from specactor_ray.draft.eagle.head import EagleHeadConfig

_REPLAY_BATCH = 16


def drafter_of(folder: Path) -> DrafterConfig:
    """The drafter in a folder, of the method in its `drafter.json`; without one an EAGLE head or a `draft_model`, by
    its `config.json`.

    Raises:
        InputError: The folder does not exist, or its `drafter.json` cannot be read.
        ModelLoadError: It has neither file, or its `config.json` cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"--drafter: there is no folder {folder}. Fix: name the folder that `drafter train` wrote")
    card = read_card(folder)
    if card is not None:
        return DrafterConfig(method=card["method"], model=str(folder))
    return DrafterConfig(method="eagle" if describes_head(folder) else "draft_model", model=str(folder))


def method_alone(method: str) -> DrafterConfig:
    """A method without a trained model. Raises InputError if it is unknown, or needs one."""
    config = DrafterConfig(method=method)
    try:
        validate_drafter(config, "--method")
    except ConfigError as error:
        raise InputError(f"--method: {method!r} cannot be measured alone: {error.problem} {error.fix}") from None
    traits(method, "--method")  # a user's class is imported, or refused
    return config


def head_config(drafter: DrafterConfig, target: str) -> EagleHeadConfig | None:
    """Configuration of the head, with the states that it reads of the target; None for methods that need no states.

    Raises:
        ModelLoadError: There is no head, or it was made for another target.
    """
    if not reads_head(drafter.method) or drafter.model is None:
        return None
    from specactor_ray.draft.eagle.checkpoint import read_head_config

    return read_head_config(drafter.model, target, trust_remote_code=drafter.trust_remote_code)


def measure(
    drafter: DrafterConfig,
    target: TargetConfig,
    corpus: Corpus,
    window: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Replay every held-out part through the drafter: with the target's noise, and with its own if that makes a
    difference.

    Args:
        corpus: Corpus whose recorded states begin with those that the drafter reads.
    """
    rows, head = [], head_config(drafter, target.model)
    section = drafter_spec("drafter", replace(drafter, dtype="float32", max_batch=_REPLAY_BATCH), window, _REPLAY_BATCH)
    device = corpus.limits.device
    for part, records in corpus.held_out().items():
        temperature = records[0].sampling.temperature
        noisy = temperature > 0.0 and traits(drafter.method).draws_noise
        for shared in (True, False) if noisy else (True,):
            proposer = build_proposer(replace(section, shared_noise=shared), target, device)
            noise = ("shared" if shared else "own") if noisy else "-"
            total = sum(len(record.output_token_ids) for record in records)
            title = f"replay, T={temperature:g}" + (f", {noise} noise" if noisy else "")
            with PhaseProgress(console, title, total) as progress:
                features = None if head is None else _features_of(corpus, part, head.feature_size)
                counts = replay(proposer, records, window, _REPLAY_BATCH, show_tokens(progress), features)
            rows.append({"part": part, "temperature": temperature, "noise": noise, **counts.facts()})
    return rows


def _features_of(corpus: Corpus, part: str, width: int) -> Callable[[CorpusRecord], Any]:
    """The first `width` numbers of the recorded states of a record."""
    store = corpus.stores[part]
    return lambda record: store.states(record.index)[:, :width].float().numpy()
