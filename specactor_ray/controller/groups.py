"""Assignment of draft actors to verifiers. Pure.

Verifiers of neighbouring seats form a group, and a draft actor serves whole groups, so that the messages between
verifiers and draft actors grow with the verifiers instead of with their square.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

from specactor_ray.config.schema import VERIFIERS_PER_GROUP

I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P", bound=Hashable)
Service = frozenset[tuple[str, int]]
"""Pairs of a draft actor and a group that it serves."""


def group_of(seat: int, replicas: int, most: int = 0) -> int:
    """The group of the verifier on this seat, from 0. Groups are of about equal size, `most` (0: 8) at most."""
    groups = math.ceil(replicas / (most or VERIFIERS_PER_GROUP))
    return seat // math.ceil(replicas / groups)


def assign_drafters(drafters: Iterable[str], groups: Collection[int], before: Service = frozenset()) -> Service:
    """Assign the draft actors of one method to groups.

    Each draft actor serves one group; with more groups than draft actors, one draft actor serves each group. They are
    spread evenly with as few changes as possible. Every group is served as long as there is a draft actor.

    Args:
        drafters, groups: Ready draft actors, and groups with verifiers.
        before: The last result.
    """
    drafters, groups = sorted(drafters), sorted(groups)
    if len(drafters) >= len(groups):
        return frozenset(_spread(drafters, groups, dict(sorted(before))).items())
    served = _spread(groups, drafters, {group: drafter for drafter, group in sorted(before)})
    return frozenset((drafter, group) for group, drafter in served.items())


def _spread(items: Collection[I], places: Collection[P], before: Mapping[I, P]) -> dict[I, P]:
    """Item → place, evenly: its former place, unless that would have two items more than another."""
    if not places:
        return {}
    at = {item: before[item] for item in items if before.get(item) in places}
    load = Counter(dict.fromkeys(places, 0))
    load.update(at.values())
    for item in items:
        if item not in at:
            at[item] = min(load, key=load.__getitem__)
            load[at[item]] += 1
    while True:
        fullest, emptiest = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        if load[fullest] - load[emptiest] < 2:
            return at
        at[next(item for item in at if at[item] == fullest)] = emptiest
        load[fullest] -= 1
        load[emptiest] += 1
