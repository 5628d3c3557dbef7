"""Draft methods by name; each is imported only when it is asked for."""

from __future__ import annotations

from specactor_ray.config.named import require_proposer
from specactor_ray.config.schema import DRAFT_METHODS, DrafterConfig, TargetConfig
from specactor_ray.drafters.base import RowProposer
from specactor_ray.errors import ConfigError


def build_proposer(config: DrafterConfig, target: TargetConfig, device: str) -> RowProposer:
    """Make the configured proposer for this target on `device` (`cpu` or `cuda`).

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
    if config.method == "eagle":
        return _build_eagle(config, target, device)
    if ":" in config.method:
        return _build_custom(config)
    raise ConfigError("drafters.method", f"unknown method {config.method!r}; known: {', '.join(DRAFT_METHODS)}.")


def _build_custom(config: DrafterConfig) -> RowProposer:
    """A user's own proposer, `package.module:Class`, made with its configuration section."""
    proposer: RowProposer = require_proposer(config.method, "drafters.N.method")(config)
    return proposer


def _build_suffix(config: DrafterConfig) -> RowProposer:
    from specactor_ray.drafters import suffix

    return suffix.SuffixProposer(
        config.min_match,
        config.max_match,
        suffix.DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens,
        config.max_batch,
        config.length_factor,
        config.min_probability,
        shared_noise=config.shared_noise,
    )


def _build_draft_model(config: DrafterConfig, device: str) -> RowProposer:
    from specactor_ray.drafters.draft_model import DraftModelProposer
    from specactor_ray.modeling.loading import load_model
    from specactor_ray.modeling.ragged_model import RaggedModel

    if config.model is None:
        raise ConfigError("drafters.model", "the method draft_model needs a model.", "name a model directory or id")
    model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
    ragged = RaggedModel(model, int(config.kv_cache_gb * 2**30))
    return DraftModelProposer(ragged, config.max_batch, config.shared_noise)


def _build_eagle(config: DrafterConfig, target: TargetConfig, device: str) -> RowProposer:
    from specactor_ray.drafters.eagle import EagleProposer
    from specactor_ray.modeling.eagle_checkpoint import load_head
    from specactor_ray.modeling.eagle_runner import EagleRunner

    if config.model is None:
        raise ConfigError("drafters.model", "the method eagle needs a head.", "name its directory")
    trust = target.trust_remote_code
    head = load_head(config.model, target.model, dtype=config.dtype, device=device, trust_remote_code=trust)
    return EagleProposer(EagleRunner(head, int(config.kv_cache_gb * 2**30)), config.max_batch, config.shared_noise)
