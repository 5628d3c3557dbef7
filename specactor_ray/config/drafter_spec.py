"""The record of a draft method: its section of the configuration with everything derived."""

from __future__ import annotations

from dataclasses import dataclass

from specactor_ray.config.schema import VERIFIERS_PER_GROUP, Config, DrafterConfig, ModeName
from specactor_ray.config.validate import reject_keys_against_traits
from specactor_ray.draft import registry
from specactor_ray.draft.proposer import Proposer, Traits


@dataclass
class DrafterSpec(DrafterConfig):
    """A draft method as actors, links and seats hold it."""

    window: int = 8
    """Draft window: its own, else the common one."""
    max_batch: int = 16
    """Most requests it drafts for at once: its own, else all that the verifiers it serves run at once."""
    branches: int = 0
    """Most branches of a request; 0 where its proposers cannot branch."""
    traits: Traits = Proposer.traits
    """What its proposers are."""


def drafter_specs(config: Config) -> dict[str, DrafterSpec]:
    """Method → its record, in the order of the configuration; none in mode `plain`.

    Raises:
        ConfigError: The class of a user's own method cannot be imported or contradicts its section; the key is named.
    """
    if config.mode is ModeName.plain:
        return {}
    window, batch = config.speculation.window, config.target.max_batch
    if config.mode is not ModeName.coupled:
        batch *= min(config.target.replicas, config.speculation.verifiers_per_group or VERIFIERS_PER_GROUP)
    return {one.method: drafter_spec(f"drafters.{n}", one, window, batch) for n, one in enumerate(config.drafters)}


def drafter_spec(key: str, drafter: DrafterConfig, window: int, max_batch: int) -> DrafterSpec:
    """The record of a section at `key`; `window` and `max_batch`: where it has none. Raises as `drafter_specs`."""
    traits = registry.traits(drafter.method, f"{key}.method")
    reject_keys_against_traits(drafter, key, traits)
    derived = {"window": drafter.window or window, "max_batch": drafter.max_batch or max_batch, "traits": traits}
    return DrafterSpec(**{**vars(drafter), **derived})
