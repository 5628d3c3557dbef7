"""Numbers of draft actors: the best ones by reports of all actors (docs/design/controller.md), and possible ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.config.methods import DrafterSpec, acting_drafters, draft_actors, drafter_specs
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.controller.members import Member
from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.costs import range_number
from specactor_ray.plan.search import best_ahead, geometric
from specactor_ray.verify.acceptance import PRIOR

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
_COUNTERS = ("steps", "row_steps", "supplied_row_steps", "suspended_steps")


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


@dataclass
class Scaling:
    """Limits, devices, measurements and the pending change of one draft method."""

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
    verify: LearnedCost = field(default_factory=LearnedCost)
    """V: seconds of a verify step."""
    draft: LearnedCost = field(default_factory=LearnedCost)
    """D: seconds of a draft step, by rows and branches."""
    probability: float = PRIOR
    """Chance that a draft token is right, where those before it are."""
    aim: int = 0
    """The number of draft actors that is better than the present one, if there is one."""
    since: float = 0.0
    """Time since which the direction of the change is better, in seconds."""
    refused_rows: float = float("inf")
    """Requests in a step at which drafts last did not pay."""
    is_held: bool = False
    """Whether a user set the number."""

    def tokens_per_s(self, number: int, load: VerifierLoad) -> float:
        """Predicted tokens per second of a verifier with `number` draft actors, as in the plan (`plan/search.py`)."""
        plain = load.rows / max(self.verify.seconds(load.rows, load.rows, 0.0), 1e-9)
        if not number:
            return plain
        survival = geometric(np.array([self.probability]), self.window)[0]
        rows = load.rows * load.verifiers / number
        rate = best_ahead(self.verify, self.draft, survival, load.rows, rows, 0.0, self.branches)
        return max(plain, load.rows * rate)

    def best_number(self, present: int, load: VerifierLoad) -> int:
        """The best number of draft actors; `present` where no other is much better."""
        if not load.rows or load.suspended > _SUSPENDED:
            return self.least
        most = self.most
        if load.rows > _FEWER * self.refused_rows or (present and load.supply >= _SUPPLIED):
            most = max(min(present, most), self.least)
        worth = {
            number: self.tokens_per_s(number, load) / (self.verifying + number * self.devices) ** self.weight
            for number in self._candidates(present, most)
        }
        best = max(worth.values())
        if present in worth and worth[present] * _BETTER >= best:
            return present
        return min(number for number, value in worth.items() if value >= _NEARLY * best)

    def revise(self, present: int, best: int, load: VerifierLoad, now: float, up_s: float, down_s: float) -> int:
        """The number of draft actors from now on. It changes once the same direction was better for `up_s` or `down_s`
        seconds. `now`: seconds."""
        if present and load.suspended > _SUSPENDED:
            self.refused_rows = load.rows
        elif load.rows and load.rows <= _FEWER * self.refused_rows:
            self.refused_rows = float("inf")
        goes_on = (self.aim > present) == (best > present) and self.aim != present
        if not goes_on:
            self.since = now
        self.aim = best
        return best if now - self.since >= (up_s if best > present else down_s) else present

    def _candidates(self, present: int, most: int) -> list[int]:
        powers = (1 << power for power in range(most.bit_length()))
        numbers = {self.least, most, present - 1, present, present + 1, *powers, *range(_FEW + 1)}
        return sorted(number for number in numbers if self.least <= number <= most)


class Elastic:
    """Changes the numbers of draft actors of methods with `max_replicas`."""

    def __init__(self, config: Config) -> None:
        elastic, specs = config.elastic, drafter_specs(config)
        self._up_s, self._down_s = elastic.up_s, elastic.down_s
        self._interval_s = max(config.cluster.health_interval_s, min(elastic.up_s, elastic.down_s) / _LOOKS)
        self._verify = LearnedCost()
        self._methods = {
            one.method: self._scaling(config, one, specs[one.method])
            for one in acting_drafters(config)
            if one.max_replicas is not None
        }
        self._seen: dict[str, Mapping[str, Any]] = {}
        """Verifier → its counters at the last look."""
        self._looked_at = float("-inf")

    def hold(self, method: str, is_held: bool) -> None:
        """Keep the number of a method fixed, or change it by the load again."""
        if method in self._methods:
            self._methods[method].is_held = is_held

    def revise(
        self, members: Iterable[Member], wanted: Mapping[str, int], given_up: Iterable[str], now: float
    ) -> dict[str, int]:
        """Method → new number of draft actors, where it changes. `now`: seconds; `wanted`: the present numbers."""
        if not self._methods or now - self._looked_at < self._interval_s:
            return {}
        members = list(members)
        load = self._look([member for member in members if member.phase is Phase.READY])
        if load is None:
            return {}
        self._looked_at = now
        given_up, changed = set(given_up), {}
        for method, scaling in self._methods.items():
            if scaling.is_held or method in given_up:
                continue
            present = wanted[method]
            best = scaling.best_number(present, load)
            coming = (Phase.PENDING, Phase.STARTING)
            if best > present and any(member.key == method and member.phase in coming for member in members):
                best = present  # those that come first
            number = scaling.revise(present, best, load, now, self._up_s, self._down_s)
            if number != present:
                changed[method] = number
                logger.info("%s: %d draft actors in place of %d: %s", method, number, present, load)
        return changed

    def _scaling(self, config: Config, drafter: DrafterConfig, spec: DrafterSpec) -> Scaling:
        target = config.target
        assert drafter.max_replicas is not None
        return Scaling(
            drafter.min_replicas,
            drafter.max_replicas,
            drafter.gpus if target.gpus else drafter.cores,
            target.replicas * (target.gpus or target.cores),
            config.elastic.devices_weight,
            spec.window,
            spec.branches,
            self._verify,
        )

    def _look(self, ready: list[Member]) -> VerifierLoad | None:
        """Take the reports since the last look; None: there were none."""
        verifiers = {one.actor_id: one.counters for one in ready if one.key == VERIFIER and "steps" in one.counters}
        fresh = {name: after for name, after in verifiers.items() if after is not self._seen.get(name)}
        if not fresh:
            return None
        sums, busy = np.zeros(len(_COUNTERS)), 0
        for name, after in fresh.items():
            before = self._seen.get(name, {})
            if after["steps"] < before.get("steps", 0):  # they were reset
                before = {}
            more = np.array([after[one] - before.get(one, 0) for one in _COUNTERS], np.float64)
            busy += more[0] > 0
            sums += more
            self._learn(after)
        self._seen = dict(verifiers)
        for member in ready:
            if member.key in self._methods and (points := member.counters.get("cost")):
                self._methods[member.key].draft.take(points)
        steps, rows, supplied, suspended = sums.tolist()
        if not rows:
            return VerifierLoad()
        verifiers_busy = max(round(busy * len(verifiers) / len(fresh)), 1)
        return VerifierLoad(verifiers_busy, rows / steps, supplied / rows, suspended / steps)

    def _learn(self, counters: Mapping[str, Any]) -> None:
        """Take a verifier's step times, and shares of right draft tokens over ranges of output positions."""
        self._verify.take(counters["cost"])
        for method, scaling in self._methods.items():
            tried = [(one["drafted"], one["acceptance"]) for one in counters["ladder"] if one["method"] == method]
            if tried:
                scaling.probability = sum(n * p for n, p in tried) / sum(n for n, _ in tried)


def scale_refusal(config: Config, method: str, number: int | None) -> ConfigError | None:
    """Why there cannot be `number` draft actors of `method` (None: as many as pay); None when it is possible."""
    known = [drafter.method for drafter in config.drafters]
    if config.mode is ModeName.plain:
        return ConfigError("mode", "'plain' uses no drafters.", "start the run with mode=decoupled.")
    if config.mode is ModeName.coupled:
        problem = "'coupled' has no draft actors to scale: the verifiers draft themselves."
        return ConfigError("mode", problem, "start the run with mode=decoupled.")
    if method not in known:
        fix = f"use one of {', '.join(known)}."
        return ConfigError("drafters", f"method {method!r} is not configured for this run.", fix)
    key = f"drafters.{known.index(method)}"
    if method not in draft_actors(config):
        problem = f"verifiers draft by {method} themselves, so it has no draft actors to scale."
        return ConfigError(f"{key}.hosted", problem, f"start the run with {key}.hosted=false.")
    if number is None and config.drafters[known.index(method)].max_replicas is None:
        problem, fix = "is not set, so there is no number to scale up to.", f"start the run with {key}.max_replicas=4."
        return ConfigError(f"{key}.max_replicas", problem, fix)
    if number is not None and (not isinstance(number, int) or number < 0):
        return ConfigError(f"drafters.{method}", f"{number!r} is not a number of draft actors.", "use 0 or more.")
    return None
