"""Which verifiers sleep, and what runs on their seats meanwhile. Pure: no Ray, no clock, no memory of its own.

At the tail of a rollout a few long requests are left and most verifiers have none. Their seats are worth more with
draft actors on them, of methods that are missing first (SpecActor, arXiv 2511.16193, Algorithm 3). A verifier and a
draft actor on its seat are never awake at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specactor_ray.controller.decide import backoff_s, spare
from specactor_ray.controller.state import (
    VERIFIER,
    Action,
    DesiredState,
    Lend,
    ObservedActor,
    ObservedState,
    Offer,
    Phase,
    Policy,
    Sleep,
    Wake,
)


def decide_lending(
    offer: Offer,
    observed: ObservedState,
    desired: DesiredState,
    methods: Sequence[str],
    start_s: Mapping[str, float],
    now: float,
    policy: Policy,
) -> list[Action]:
    """The next actions for verifiers that are offered, asleep or wanted back.

    Args:
        offer: What the rollout can do without; its `remaining_s` counts from `now`.
        observed: The actors there are. Those that `decide` removes in the same step must be left out.
        desired: Draft methods that have a seat of their own are not missing.
        methods: What can be lent for, best first.
        start_s: Method → seconds that its last draft actor took to start, where one has.
        now: The clock of the failures on record.
        policy: Limits.

    Returns:
        First what ends: draft actors whose host is wanted back or gone, and verifiers that can wake because nobody is
        on their seat any more. Then what begins: verifiers that go to sleep, draft actors on the seats of those asleep.
    """
    verifiers = {actor.actor_id: actor for actor in observed.actors if actor.key == VERIFIER}
    guests = [actor for actor in observed.actors if actor.host]
    hosts = {actor.host for actor in guests}
    actions: list[Action] = []
    for guest in guests:
        host = verifiers.get(guest.host)
        lent = host is not None and host.phase is Phase.ASLEEP and host.actor_id in offer.verifiers
        if not lent and guest.phase is not Phase.DRAINING:
            actions.append(spare(guest))
    for actor_id, verifier in verifiers.items():
        unwanted = verifier.phase is Phase.ASLEEP and actor_id not in offer.verifiers
        if unwanted and verifier.seat_free and actor_id not in hosts:
            actions.append(Wake(actor_id))
    spares = [verifiers[name] for name in offer.verifiers if name in verifiers and name not in hosts]
    return actions + _lend(spares, offer, observed, desired, methods, start_s, now, policy)


def _lend(
    spares: Sequence[ObservedActor],
    offer: Offer,
    observed: ObservedState,
    desired: DesiredState,
    methods: Sequence[str],
    start_s: Mapping[str, float],
    now: float,
    policy: Policy,
) -> list[Action]:
    staying = [actor for actor in observed.actors if actor.phase not in (Phase.DRAINING, Phase.DEAD)]
    present = Counter(actor.key for actor in staying)
    drafters = {method: max(present[method], desired.wanted(method)) for method in methods}
    worthy = [
        method
        for method in methods
        if pays(offer.remaining_s, expected_start_s(method, start_s, policy), policy)
        and _may_start(method, observed, now, policy)
    ]
    actions: list[Action] = []
    # Those that sleep already come first: nothing has to be given up for them any more.
    for verifier in sorted(spares, key=lambda actor: actor.phase is not Phase.ASLEEP):
        method = next_method(worthy, drafters, offer.requests)
        if method is None:
            break
        if verifier.phase is Phase.READY:
            actions.append(Sleep(verifier.actor_id))
        elif verifier.phase is Phase.ASLEEP:
            if verifier.seat_free:
                actions.append(Lend(verifier.actor_id, method))
        else:
            continue
        drafters[method] += 1
    return actions


def next_method(methods: Sequence[str], drafters: Mapping[str, int], requests: int) -> str | None:
    """The method that gains most from one more draft actor.

    Args:
        methods: Best first.
        drafters: Method → draft actors it has or will have.
        requests: Running requests. Each has one draft actor of a method, so more than that would be idle.

    Returns:
        The best method without any, else the best with fewer draft actors than requests; None where there is none.
    """
    missing = [method for method in methods if drafters[method] == 0]
    crowded = [method for method in methods if drafters[method] < requests]
    return next(iter(missing or crowded), None) if requests else None


def pays(remaining_s: float, start_s: float, policy: Policy) -> bool:
    """Whether a draft actor that takes `start_s` seconds to start is of use for long enough before all is over."""
    return remaining_s >= policy.lend_worth * start_s


def expected_start_s(method: str, start_s: Mapping[str, float], policy: Policy) -> float:
    """Seconds until a draft actor of this method works: its own last figure, else the slowest of the others."""
    return start_s.get(method, max(start_s.values(), default=policy.assumed_start_s))


def ladder_order(methods: Sequence[str], counters: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The methods, best first.

    Args:
        methods: In the order of the configuration.
        counters: Of the verifiers. `ladder` in them (`Policy.standings`) gives predicted tokens per second of a method,
            per range of output positions at which it was tried. The best figure of any verifier and range counts.

    Returns:
        Those with a figure first, the highest before the others; then the rest, in their order.
    """
    best: dict[str, float] = {}
    for one in counters:
        for standing in one.get("ladder") or ():
            method = standing["method"]
            best[method] = max(best.get(method, 0.0), float(standing["tgs"]))
    return tuple(sorted(methods, key=lambda method: -best.get(method, float("-inf"))))


def _may_start(method: str, observed: ObservedState, now: float, policy: Policy) -> bool:
    record = observed.failures.get(method)
    if record is None:
        return True
    hopeless = record.given_up or record.never_started >= policy.max_start_failures
    return not hopeless and now - record.last_at >= backoff_s(record, policy)
