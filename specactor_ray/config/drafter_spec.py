"""The record of a draft method: its section of the configuration with all derived values."""

from __future__ import annotations

from dataclasses import dataclass

from specactor_ray.config import methods
from specactor_ray.config.drafting import is_hosted
from specactor_ray.config.methods import NO_TRAITS, Traits
from specactor_ray.config.schema import MAX_BRANCHES, VERIFIERS_PER_GROUP, Config, DrafterConfig, ModeName
from specactor_ray.config.validate import reject_keys_against_traits

WINDOW = 8
"""Draft window if `speculation.window` is `auto` and there are no branches."""
_BRANCHING_WINDOW = 16
"""The same with branches."""


@dataclass
class DrafterSpec(DrafterConfig):
    """A draft method, as used by actors, links and seats."""

    window: int = WINDOW
    """Draft window: that of the section, else the common one, else that of `auto`."""
    max_batch: int = 16
    """Most requests drafted for at once: that of the section, else all that its verifiers run at once."""
    branches: int = 0
    """Most branches of a request; 0 if its proposers cannot branch, or nothing is verified while they draft."""
    traits: Traits = NO_TRAITS
    """Properties of its proposers."""


def drafter_specs(config: Config) -> dict[str, DrafterSpec]:
    """Method → its record, in the order of the configuration; empty in mode `plain`.

    Raises:
        ConfigError: A user's class cannot be imported or contradicts its section; the message has the key.
    """
    if config.mode is ModeName.plain:
        return {}
    speculation, batch = config.speculation, config.target.max_batch
    group = min(config.target.replicas, speculation.verifiers_per_group or VERIFIERS_PER_GROUP)
    specs = {}
    for number, one in enumerate(config.drafters):
        key = f"drafters.{number}"
        limits = (batch, 0) if is_hosted(one, config.mode, key) else (batch * group, speculation.branches)
        specs[one.method] = drafter_spec(key, one, speculation.window, *limits)
    return specs


def unused_branches(config: Config) -> str:
    """A warning if `speculation.branches` is set and no drafter branches, else empty. Raises as `drafter_specs`."""
    specs = drafter_specs(config).values()
    if not config.speculation.branches or not specs or any(spec.branches for spec in specs):
        return ""
    why = "hosted drafters" if config.mode is ModeName.coupled else "these draft methods"
    return f"speculation.branches={config.speculation.branches} has no effect: {why} draft one chain"


def drafter_spec(
    key: str, drafter: DrafterConfig, window: int | None, max_batch: int, branches: int | None = 0
) -> DrafterSpec:
    """The record of a section at `key`. `window` and `max_batch` are used if it sets none, `branches` if its proposers
    can branch; None stands for `auto`. Raises as `drafter_specs`."""
    traits = methods.traits(drafter.method, f"{key}.method")
    reject_keys_against_traits(drafter, key, traits)
    if not traits.branches:
        branches = 0
    elif branches is None:
        branches = MAX_BRANCHES
    window = drafter.window or window or (_BRANCHING_WINDOW if branches else WINDOW)
    derived = {"window": window, "branches": branches, "max_batch": drafter.max_batch or max_batch}
    return DrafterSpec(**{**vars(drafter), **derived, "traits": traits})
