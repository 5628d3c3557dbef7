"""Placement of each draft method: inside the verifiers, or as draft actors. Derived from other keys."""

from __future__ import annotations

from specactor_ray.config.methods import traits
from specactor_ray.config.schema import Config, DrafterConfig, ModeName


def is_hosted(drafter: DrafterConfig, mode: ModeName, key: str = "drafters.N") -> bool:
    """Whether the method of this section, at `key`, drafts inside the verifiers; else it has draft actors. `auto` is
    read as `decoupled`.

    Raises:
        ConfigError: A user's own method cannot be imported.
    """
    if mode is ModeName.coupled or drafter.hosted is not None:
        return mode is ModeName.coupled or bool(drafter.hosted)
    return traits(drafter.method, f"{key}.method").looks_up


def inline_drafters(config: Config) -> list[DrafterConfig]:
    """Sections of the methods that draft inside every verifier, in the order of the configuration."""
    if config.mode is ModeName.plain:
        return []
    return [one for one in config.drafters if one.replicas and is_hosted(one, config.mode)]


def acting_drafters(config: Config) -> list[DrafterConfig]:
    """Sections of the methods with draft actors, including those with none now."""
    return [] if config.mode is ModeName.plain else [one for one in config.drafters if not is_hosted(one, config.mode)]


def draft_actors(config: Config) -> dict[str, int]:
    """Method → number of draft actors at the start."""
    return {one.method: one.replicas for one in acting_drafters(config)}
