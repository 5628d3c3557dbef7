"""Draft methods by name; each is imported only when it is asked for."""

from __future__ import annotations

import importlib

from specactor_ray.config.schema import DrafterConfig
from specactor_ray.drafters.base import Proposer
from specactor_ray.errors import ConfigError

METHODS = ("ngram", "suffix", "draft_model")


def build_proposer(config: DrafterConfig, device: str) -> Proposer:
    """Make the configured proposer on `device` (`cpu` or `cuda`).

    Raises:
        ConfigError: The method is unknown or lacks its model.
        ModelLoadError: Its model cannot be loaded or served.
    """
    if config.method == "ngram":
        from specactor_ray.drafters import ngram

        kept = ngram.DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        return ngram.NgramProposer(config.min_match, config.max_match, kept, config.max_batch)
    if config.method == "suffix":
        return _build_suffix(config)
    if config.method == "draft_model":
        return _build_draft_model(config, device)
    if ":" in config.method:
        return _build_custom(config)
    raise ConfigError("drafters.method", f"unknown method {config.method!r}; known: {', '.join(METHODS)}.")


def _build_custom(config: DrafterConfig) -> Proposer:
    """A user's own proposer, `package.module:Class`, made with its configuration section."""
    module_name, _, class_name = config.method.partition(":")
    try:
        proposer_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("drafters.method", f"{config.method} cannot be imported ({error}).") from error
    proposer: Proposer = proposer_class(config)
    return proposer


def _build_suffix(config: DrafterConfig) -> Proposer:
    from specactor_ray.drafters import suffix

    return suffix.SuffixProposer(
        config.min_match,
        config.max_match,
        suffix.DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens,
        config.max_batch,
        config.length_factor,
        config.min_probability,
    )


def _build_draft_model(config: DrafterConfig, device: str) -> Proposer:
    from specactor_ray.drafters.draft_model import DraftModelProposer
    from specactor_ray.modeling.loading import load_model
    from specactor_ray.modeling.ragged_model import RaggedModel

    if config.model is None:
        raise ConfigError("drafters.model", "the method draft_model needs a model.", "name a model directory or id")
    model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
    return DraftModelProposer(RaggedModel(model, int(config.kv_cache_gb * 2**30)), config.max_batch)
