"""Builds proposers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specactor_ray.config.methods import BUILT_IN, class_of
from specactor_ray.core.errors import ConfigError, SpecActorError, clipped, clipped_text
from specactor_ray.draft.proposer import Proposer

if TYPE_CHECKING:
    from specactor_ray.config.methods import DrafterSpec
    from specactor_ray.config.schema import TargetConfig


def build_proposer(config: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
    """Build the configured proposer for this target on `device` (`cpu` or `cuda`).

    Raises:
        ConfigError: There is no such method, or a user's own class cannot be made.
        ModelLoadError: Its model cannot be loaded or served.
    """
    key, method = "drafters.N.method", clipped_text(config.method)
    proposer_class: type[Proposer] = class_of(config.method, key)
    try:
        proposer = proposer_class.from_config(config, target, device)
        if not isinstance(proposer, Proposer):
            raise TypeError(f"from_config returned {clipped(proposer)}")
    except Exception as error:
        if isinstance(error, SpecActorError) or config.method in BUILT_IN:
            raise
        problem = f"{method} cannot be made: {type(error).__name__}: {clipped(error)}."
        raise ConfigError(key, problem, "mend its from_config, or its constructor.") from error
    missing = [name for name in proposer.required if not hasattr(proposer, name)]
    if missing:
        fix = "set method and vocab_size in the class, and call super().__init__() in its constructor."
        raise ConfigError(key, f"{method} is made without {', '.join(missing)}.", fix)
    return proposer
