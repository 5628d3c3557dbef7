"""Checks made before any actor starts: is there a model, and do the drafters speak its vocabulary?"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from specactor_ray.config.lending import lendable_methods
from specactor_ray.config.schema import Config, ModeName, reads_features
from specactor_ray.errors import ConfigError, ModelLoadError
from specactor_ray.modeling.loading import load_model_config, load_tokenizer

logger = logging.getLogger(__name__)


def export_what_drafters_read(config: Config) -> Config:
    """The configuration with `target.hidden_layers` set to what its EAGLE head reads; unchanged without one.

    Raises:
        ConfigError: `target.hidden_layers` is set to something else.
        ModelLoadError: The head cannot be found, or was made for another target.
    """
    heads = [(i, d.model) for i, d in enumerate(config.drafters) if reads_features(d) and d.model]
    if not heads or config.mode is ModeName.plain:
        return config
    from specactor_ray.modeling.eagle_checkpoint import read_head_config

    index, head = heads[0]
    trust = config.target.trust_remote_code
    try:
        layers = list(read_head_config(head, config.target.model, trust_remote_code=trust).exported_layers)
    except ModelLoadError as error:
        raise ModelLoadError(f"drafters.{index}.model: {error}") from error
    _check_card(head, f"drafters.{index}.model", config)
    if config.target.hidden_layers not in ([], layers):
        problem = f"{config.target.hidden_layers} is set, but the EAGLE head {head} reads {layers}."
        raise ConfigError("target.hidden_layers", problem, "leave it out.")
    resolved = copy.deepcopy(config)
    resolved.target.hidden_layers = layers
    return resolved


def _check_card(head: str, key: str, config: Config) -> None:
    """Hold what a trained head's `drafter.json` says about its target against the target."""
    from specactor_ray.drafter_training.card import identify, read_card

    card = read_card(Path(head).expanduser())
    if card is None:
        return
    made_for, target = card["target"], identify(config.target.model, config.target.trust_remote_code)
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if made_for[name] != getattr(target, name):
            problem = (
                f"the head was trained for {made_for['name']} with {name}={made_for[name]}; the target "
                f"{target.name} has {name}={getattr(target, name)}."
            )
            raise ConfigError(key, problem, "train one for this target: specactor drafter train --method eagle")
    if made_for["config_hash"] != target.config_hash:
        logger.warning(
            "%s: the head was trained for %s, whose configuration is not that of the target %s. If the weights differ, "
            "too, it will seldom be right.",
            key,
            made_for["name"],
            target.name,
        )


def warn_without_drafters(config: Config) -> None:
    """Say so when a mode with drafts starts with none, and none can come by lending.

    Not an error: draft actors may be added while the run goes on (`specactor scale`), and a verifier does without.
    """
    if config.mode is ModeName.plain or any(drafter.replicas for drafter in config.drafters):
        return
    if not lendable_methods(config):
        until = f" until `specactor scale {config.drafters[0].method}=1`"
        logger.warning(
            "drafters.*.replicas are all 0: the run decodes without drafts%s. Fix: "
            "drafters.0.replicas=1, or mode=plain if that is what you want.",
            until if config.mode is ModeName.decoupled else "",
        )


def check_drafters_fit_target(config: Config) -> Any:
    """Refuse drafters whose vocabulary differs from the target's.

    Returns:
        The target's tokenizer, or None where the model directory has none (prompts are token ids then).

    Raises:
        ConfigError: A drafter's vocabulary has another size; both sizes are named.
        ModelLoadError: A model cannot be found.
    """
    target = load_model_config(config.target.model, trust_remote_code=config.target.trust_remote_code)
    if config.mode is not ModeName.plain:
        for index, drafter in enumerate(config.drafters):
            if drafter.model is None or reads_features(drafter):  # a head is checked on its own
                continue
            draft = load_model_config(drafter.model, trust_remote_code=drafter.trust_remote_code)
            if draft.vocab_size != target.vocab_size:
                raise ConfigError(
                    f"drafters.{index}.model",
                    f"{drafter.model} has a vocabulary of {draft.vocab_size} tokens, "
                    f"the target {config.target.model} one of {target.vocab_size}.",
                    "use a draft model that was trained with the target's tokenizer",
                )
    try:
        return load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    except ModelLoadError as error:
        logger.warning("%s Prompts must be lists of token ids.", error)
        return None
