"""Which drafters live in the verifiers' processes; derived from other keys, and what is wrong about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specactor_ray.config.online import OnlineWhere
from specactor_ray.errors import ConfigError

if TYPE_CHECKING:
    from specactor_ray.config.schema import Config, DrafterConfig


def is_inline(config: Config, drafter: DrafterConfig) -> bool:
    """Whether each verifier drafts by this method itself, instead of asking draft actors.

    Only in mode `coupled`, where drafting and verifying take turns anyway. A method that is not ours could hang and
    would take the verifier with it, and one that learns online is taught as a draft actor: those stay actors.
    """
    if config.mode.value != "coupled" or not drafter.replicas:
        return False
    if drafter.inline is not None:
        return drafter.inline
    return ":" not in drafter.method and drafter.online.where is OnlineWhere.off


def inline_drafters(config: Config) -> list[DrafterConfig]:
    """The sections of those methods, in the order of the configuration."""
    return [drafter for drafter in config.drafters if is_inline(config, drafter)]


def draft_actors(config: Config) -> dict[str, int]:
    """Method → draft actors to begin with, of those methods that have any."""
    if config.mode.value == "plain":
        return {}
    return {drafter.method: drafter.replicas for drafter in config.drafters if not is_inline(config, drafter)}


def reject_inline_outside_coupled(config: Config) -> None:
    """In other modes a verifier does not wait until a drafter is done, and should not draft meanwhile."""
    for index, drafter in enumerate(config.drafters):
        if drafter.inline and config.mode.value == "decoupled":
            problem = "true, but in mode decoupled drafters have cores of their own."
            raise ConfigError(f"drafters.{index}.inline", problem, "leave it out, or use mode=coupled.")


def reject_inline_with_online(drafter: DrafterConfig, key: str) -> None:
    if drafter.inline and drafter.online.where is not OnlineWhere.off:
        problem = "true, but a method that learns online needs draft actors."
        raise ConfigError(f"{key}.inline", problem, f"leave it out, or use {key}.online.where=off.")
