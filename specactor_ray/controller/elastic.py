"""Best number of draft actors of a method, by reports of verifiers and draft actors: docs/design/controller.md."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.methods import acting_drafters, drafter_specs
from specactor_ray.config.schema import Config
from specactor_ray.controller.members import Member
from specactor_ray.plan.plan import best_ahead
from specactor_ray.plan.step_cost import range_number
from specactor_ray.plan.tgs import geometric
from specactor_ray.verify.acceptance import DEFAULT_PRIOR

logger = logging.getLogger(__name__)

_NEARLY = 0.99
"""Share of the best number's worth from which other numbers of draft actors count as equal; the smallest is taken."""
_BETTER = 1.05
"""Ratio of another number's worth to that of the present one from which the number changes."""
_SUPPLIED = 0.95
"""Share of requests with a usable tail above which more draft actors gain nothing."""
_SUSPENDED = 0.5
"""Share of steps without drafts above which drafts do not pay, whatever the prediction."""
_FEWER = 0.7
"""Ratio to the number of requests at which drafts did not pay; at fewer requests draft actors are tried again."""
_LOOKS = 4
"""Least number of looks until a change, unless health checks are rarer. A look takes 0.1 s."""
_FEW = 8
"""Number of draft actors up to which each number is tried; above it powers of two and the neighbours of the present
number."""


class LearnedCost:
    """Seconds of a step by its positions: the last report of each range, constant beyond the ranges. Without a report
    steps take no time, so the unknown is tried."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        self._knots = (np.zeros(1), np.zeros(1))

    def take(self, points: Iterable[tuple[float, float]]) -> None:
        """Add positions and seconds."""
        self._points.update({range_number(max(round(tokens), 1)): (tokens, seconds) for tokens, seconds in points})
        if self._points:
            tokens, seconds = np.array(sorted(self._points.values())).T
            self._knots = tokens, np.maximum.accumulate(seconds)

    def seconds(self, rows: float, positions: float, context_tokens: float) -> float:
        return float(np.interp(positions, *self._knots))


@dataclass(frozen=True)
class VerifierLoad:
    """Load of verifiers since the last look."""

    verifiers: int = 0
    """Verifiers that took steps."""
    rows: float = 0.0
    """Requests in a step of one verifier."""
    supply: float = 0.0
    """Share of these requests with a usable tail."""
    suspended: float = 0.0
    """Share of steps without drafts, because drafts did not pay."""


@dataclass(frozen=True)
class Bounds:
    """Limits and devices of a method."""

    least: int
    most: int
    devices: float
    """GPUs (or cores) of one draft actor."""
    verifying: float
    """GPUs (or cores) of all verifiers."""
    weight: float
    """See `ElasticConfig.devices_weight`."""
    window: int
    branches: int


@dataclass
class Figures:
    """Measurements of verifiers with a draft method."""

    verify: LearnedCost
    """V: seconds of a verify step."""
    draft: LearnedCost = field(default_factory=LearnedCost)
    """D: seconds of a draft step, by rows and branches."""
    probability: float = DEFAULT_PRIOR
    """Chance that a draft token is right, where those before it are."""


@dataclass(frozen=True)
class Standing:
    """Pending change of a method."""

    aim: int = 0
    """The number of draft actors that is better than the present one, if there is one."""
    since: float = 0.0
    """Time since which the direction of the change is better, in seconds."""
    refused_rows: float = float("inf")
    """Requests in a step at which drafts last did not pay."""


def tokens_per_s(number: int, load: VerifierLoad, figures: Figures, bounds: Bounds) -> float:
    """Predicted tokens per second of a verifier with `number` draft actors, as in the plan (`plan/plan.py`)."""
    plain = load.rows / max(figures.verify.seconds(load.rows, load.rows, 0.0), 1e-9)
    if not number:
        return plain
    survival = geometric(np.array([figures.probability]), bounds.window)[0]
    rows = load.rows * load.verifiers / number
    step = best_ahead(figures.verify, figures.draft, survival, load.rows, rows, 0.0, bounds.branches)
    return max(plain, load.rows * step.tgs)


def best_number(present: int, load: VerifierLoad, figures: Figures, bounds: Bounds, refused_rows: float) -> int:
    """The best number of draft actors; `present` where no other is much better."""
    if not load.rows or load.suspended > _SUSPENDED:
        return bounds.least
    most = bounds.most
    if load.rows > _FEWER * refused_rows or (present and load.supply >= _SUPPLIED):
        most = max(min(present, most), bounds.least)
    worth = {
        number: tokens_per_s(number, load, figures, bounds)
        / (bounds.verifying + number * bounds.devices) ** bounds.weight
        for number in _candidates(present, bounds.least, most)
    }
    best = max(worth.values())
    if present in worth and worth[present] * _BETTER >= best:
        return present
    return min(number for number, value in worth.items() if value >= _NEARLY * best)


def revise(
    standing: Standing, present: int, best: int, load: VerifierLoad, now: float, up_s: float, down_s: float
) -> tuple[Standing, int]:
    """The pending change after a look, and the number of draft actors from now on, which changes once the same
    direction was better for `up_s` or `down_s` seconds. `now`: seconds."""
    if present and load.suspended > _SUSPENDED:
        standing = replace(standing, refused_rows=load.rows)
    elif load.rows and load.rows <= _FEWER * standing.refused_rows:
        standing = replace(standing, refused_rows=float("inf"))
    if best == present:
        return replace(standing, aim=present), present
    goes_on = (standing.aim > present) == (best > present) and standing.aim != present
    standing = replace(standing, aim=best, since=standing.since if goes_on else now)
    if now - standing.since < (up_s if best > present else down_s):
        return standing, present
    return replace(standing, aim=best), best


def _candidates(present: int, least: int, most: int) -> list[int]:
    powers = (1 << power for power in range(most.bit_length()))
    numbers = {least, most, present - 1, present, present + 1, *powers, *range(_FEW + 1)}
    return sorted(number for number in numbers if least <= number <= most)


class Elastic:
    """Keeps measurements, and changes the numbers of draft actors of methods with `max_replicas`.

    Args:
        priors: Draft method → chance that a draft token is right, from a profile.
    """

    def __init__(self, config: Config, priors: Mapping[str, float]) -> None:
        target, elastic, specs = config.target, config.elastic, drafter_specs(config)
        self._up_s, self._down_s = elastic.up_s, elastic.down_s
        self._interval_s = max(config.cluster.health_interval_s, min(elastic.up_s, elastic.down_s) / _LOOKS)
        self._bounds = {
            one.method: Bounds(
                one.min_replicas,
                one.max_replicas,
                one.gpus if target.gpus else one.cores,
                target.replicas * (target.gpus or target.cores),
                elastic.devices_weight,
                specs[one.method].window,
                specs[one.method].branches,
            )
            for one in acting_drafters(config)
            if one.max_replicas is not None
        }
        verify = LearnedCost()
        self._figures = {name: Figures(verify, probability=priors.get(name, DEFAULT_PRIOR)) for name in self._bounds}
        self._standing = {name: Standing() for name in self._bounds}
        self._held: set[str] = set()
        self._seen: dict[str, Mapping[str, Any]] = {}
        """Verifier → its counters at the last look."""
        self._looked_at = float("-inf")

    def hold(self, method: str, held: bool) -> None:
        """Keep the number of a method fixed, or change it by the load again."""
        (self._held.add if held else self._held.discard)(method)

    def holds(self, method: str) -> bool:
        return method in self._held

    def revise(
        self, members: Iterable[Member], wanted: Mapping[str, int], given_up: Iterable[str], now: float
    ) -> dict[str, int]:
        """Method → new number of draft actors, where it changes. `now`: seconds; `wanted`: the present numbers."""
        if not self._bounds or now - self._looked_at < self._interval_s:
            return {}
        members = [member for member in members if member.actor is not None or member.phase is Phase.PENDING]
        load = self._look(members)
        if load is None:
            return {}
        self._looked_at = now
        given_up, changed = set(given_up), {}
        for method, bounds in self._bounds.items():
            mine = [member for member in members if member.key == method]
            if self.holds(method) or method in given_up:
                continue
            present, figures = wanted[method], self._figures[method]
            best = best_number(present, load, figures, bounds, self._standing[method].refused_rows)
            if best > present and any(member.phase in (Phase.PENDING, Phase.STARTING) for member in mine):
                best = present  # those that come first
            self._standing[method], number = revise(
                self._standing[method], present, best, load, now, self._up_s, self._down_s
            )
            if number != present:
                changed[method] = number
                logger.info("%s: %d draft actors in place of %d: %s", method, number, present, load)
        return changed

    def _look(self, members: list[Member]) -> VerifierLoad | None:
        """Take the reports since the last look; None: there were none."""
        reports = {m.actor_id: m.actor.counters for m in members if m.actor is not None and m.phase is Phase.READY}
        verifiers = [m.actor_id for m in members if m.key == VERIFIER and "steps" in reports.get(m.actor_id, {})]
        fresh = [name for name in verifiers if reports[name] is not self._seen.get(name)]
        if not fresh:
            return None
        sums = np.zeros(4)
        busy = 0
        for name in fresh:
            names = ("steps", "row_steps", "supplied_row_steps", "suspended_steps")
            before, after = self._seen.get(name, {}), reports[name]
            more = np.array([after[one] - before.get(one, 0) for one in names], np.float64)
            if more[0] < 0:  # they were reset
                more = np.array([after[one] for one in names], np.float64)
            busy += more[0] > 0
            sums += more
            self._learn(after)
        self._seen = {name: reports[name] for name in verifiers}
        for member in members:
            if member.key in self._figures and (points := reports.get(member.actor_id, {}).get("cost")):
                self._figures[member.key].draft.take(points)
        steps, rows, supplied, suspended = sums.tolist()
        if not rows:
            return VerifierLoad()
        verifiers_busy = max(round(busy * len(verifiers) / len(fresh)), 1)
        return VerifierLoad(verifiers_busy, rows / steps, supplied / rows, suspended / steps)

    def _learn(self, counters: Mapping[str, Any]) -> None:
        for method, figures in self._figures.items():
            figures.verify.take(counters["cost"])
            if tried := list(_tried(counters, method)):
                figures.probability = sum(n * p for n, p in tried) / sum(n for n, _ in tried)


def _tried(counters: Mapping[str, Any], method: str) -> Iterator[tuple[float, float]]:
    """Tried draft tokens and the share of right ones, by ranges of output positions."""
    for standing in counters["ladder"]:
        if standing["method"] == method:
            yield standing["drafted"], standing["acceptance"]
