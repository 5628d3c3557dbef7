"""Where each draft method runs: inside the verifiers, or as draft actors. Derived from other keys."""

from __future__ import annotations

from specactor_ray.config.schema import Config, DrafterConfig, ModeName


def inline_drafters(config: Config) -> list[DrafterConfig]:
    """The sections of the methods that every verifier drafts by itself, in the order of the configuration."""
    return [one for one in config.drafters if one.replicas] if config.mode is ModeName.coupled else []


def draft_actors(config: Config) -> dict[str, int]:
    """Method → draft actors to begin with."""
    return {one.method: one.replicas for one in config.drafters} if config.mode is ModeName.decoupled else {}
