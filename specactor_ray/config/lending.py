"""Where each draft method runs: inside the verifiers, as draft actors, on the seat of a verifier that has no requests
left. Derived from other keys."""

from __future__ import annotations

from specactor_ray.config.schema import Config, DrafterConfig, ModeName


def inline_drafters(config: Config) -> list[DrafterConfig]:
    """The sections of the methods that every verifier drafts by itself, in the order of the configuration."""
    return [one for one in config.drafters if one.replicas] if config.mode is ModeName.coupled else []


def draft_actors(config: Config) -> dict[str, int]:
    """Method → draft actors to begin with."""
    return {one.method: one.replicas for one in config.drafters} if config.mode is ModeName.decoupled else {}


def lendable_methods(config: Config) -> tuple[str, ...]:
    """Methods, in the order of the configuration, whose draft actors a verifier's cores and GPU can hold.

    Empty where nothing is ever lent: in other modes than `decoupled`, with one verifier only, or with
    `speculation.lend: false`.
    """
    target = config.target
    if config.mode is not ModeName.decoupled or target.replicas < 2 or config.speculation.lend is False:
        return ()
    gpus = target.gpus if target.tensor_parallel == 1 else 0  # Ray gives out parts of one GPU, not of several
    return tuple(
        drafter.method for drafter in config.drafters if drafter.cores <= target.cores and drafter.gpus <= gpus
    )
