"""The draft ladder: draft methods ranked by predicted tokens per second (SpecActor, arXiv 2511.16193, section 5).

Which method is best depends on the workload, on the policy, and on the place in an output: acceptance decays along long
outputs. So the ladder keeps acceptance per method and range of output positions. It starts from offline figures where
there are any, and is refreshed by what is observed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BUCKET_STARTS = (0, 64, 256, 1024)
"""First output position of each range; the last is open."""
BUCKET_NAMES = ("0-63", "64-255", "256-1023", "1024+")

HALF_LIFE_TOKENS = 8192.0
"""Draft tokens of *any* method after which an observation counts half."""
PRIOR_TOKENS = 8.0
"""Weight of the prior, in tokens."""
EXPLORATION = 0.15
"""Size of the optimism about methods that were seldom tried."""
PENDING_TOKENS = 32.0
"""Tokens of evidence that a request which is being drafted for will bring soon."""
_DEFAULT_PRIOR = 0.5
_LARGEST_WEIGHT = 1e100
_HIGHEST = 0.98
"""Optimism stops here: certainty would make any cost worth it."""


def bucket_of(position: int) -> int:
    """Number of the range that holds this output position."""
    return max(0, bisect_right(BUCKET_STARTS, position) - 1)


class MethodPrior(NamedTuple):
    """What is known offline about a method, from a profile for instance."""

    probability: float
    """Chance that a draft token is right given that those before it are."""
    token_s: float = 0.0
    """Seconds per drafted token; 0 if unknown."""


class Estimate(NamedTuple):
    """How good a method's drafts are."""

    probability: float
    """Chance that a draft token is right given that those before it are."""
    guessing: float
    """Chance that it has a guess at all; lookup methods often have none."""


Rate = Callable[[str, Estimate, float], float]
"""(method, how good, seconds per drafted token) → predicted tokens per second."""


class Rung(NamedTuple):
    """A method's place on the ladder."""

    method: str
    tgs: float
    """Predicted tokens per second, optimism included."""


@dataclass(slots=True)
class _Cell:
    """One method's record in one range. Instead of letting what is old fade, what is new counts more: a sum divided by
    today's weight is the faded one, and recording touches nothing else."""

    drafted: float = 0.0
    tried: float = 0.0
    """Draft tokens whose predecessors were all right."""
    accepted: float = 0.0
    answers: float = 0.0
    """Steps at which it had answered the newest commit, or had a guess anyway."""
    guesses: float = 0.0
    """Those at which it had a guess."""

    def scaled(self, factor: float) -> _Cell:
        return _Cell(
            self.drafted * factor,
            self.tried * factor,
            self.accepted * factor,
            self.answers * factor,
            self.guesses * factor,
        )


@dataclass(slots=True)
class _Range:
    """One range of output positions; its clock are the draft tokens of all methods in it."""

    cells: dict[str, _Cell] = field(default_factory=dict)
    weight: float = 1.0
    """What an observation of now counts; doubles with every half-life."""

    def record(self, method: str, drafted: int, accepted: int) -> None:
        weight = self._advance(drafted)
        cell = self._cell(method)
        cell.drafted += weight * drafted
        cell.tried += weight * min(accepted + 1, drafted)
        cell.accepted += weight * accepted

    def record_answer(self, method: str, guessed: bool) -> None:
        cell = self._cell(method)
        cell.answers += self.weight
        cell.guesses += self.weight * guessed

    def now(self, method: str) -> _Cell:
        """The record, faded to now."""
        return self._cell(method).scaled(1.0 / self.weight)

    def total_tried(self) -> float:
        """`tried` of all methods, faded to now."""
        return sum(cell.tried for cell in self.cells.values()) / self.weight

    def _cell(self, method: str) -> _Cell:
        cell = self.cells.get(method)
        if cell is None:
            cell = self.cells[method] = _Cell()
        return cell

    def _advance(self, tokens: int) -> float:
        self.weight *= math.exp2(tokens / HALF_LIFE_TOKENS)
        if self.weight > _LARGEST_WEIGHT:
            self.cells = {method: cell.scaled(1.0 / self.weight) for method, cell in self.cells.items()}
            self.weight = 1.0
        return self.weight


@dataclass(slots=True)
class _Cost:
    token_s: float
    seen_at: float


class DraftLadder:
    """Acceptance and cost per draft method. Deterministic: no randomness, no clock but the tokens that are drafted.

    Exploring. To the acceptance of a method `EXPLORATION · sqrt(ln(1 + N) / (1 + n))` is added, where `n` tokens of
    it were put to the test in this range of positions, and `N` of all methods together (the upper confidence bound of
    discounted bandits: Garivier, Moulines, arXiv 0805.3415). All counts fade as others are observed, and what was
    measured long ago is drawn back to the prior. So a method nobody uses grows attractive again, is tried, and is
    found if it became good. A request that is being drafted for counts as `PENDING_TOKENS` of `n` already, so that
    one request explores, not all.

    Args:
        priors: Method → offline figures.
    """

    def __init__(self, priors: Mapping[str, MethodPrior] | None = None) -> None:
        self._priors = dict(priors or {})
        self._ranges = [_Range() for _ in BUCKET_STARTS]
        self._tokens = 0.0
        self._costs: dict[str, _Cost] = {}

    def record(self, method: str, bucket: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` draft tokens in this range of positions were right, counted from the first."""
        if drafted > 0:
            self._tokens += drafted
            self._ranges[bucket].record(method, drafted, min(max(accepted, 0), drafted))

    def record_answer(self, method: str, bucket: int, guessed: bool) -> None:
        """A drafter of this method had something to say about an output position, or nothing."""
        self._ranges[bucket].record_answer(method, guessed)

    def record_cost(self, method: str, token_s: float) -> None:
        """The method's drafters take so many seconds per token now. Nonsense is ignored."""
        if 0.0 < token_s < math.inf:
            self._costs[method] = _Cost(token_s, self._tokens)

    def probability(self, method: str, bucket: int) -> float:
        """Acceptance in this range, drawn to that over all ranges, and that to the prior."""
        prior = self._priors[method].probability if method in self._priors else _DEFAULT_PRIOR
        all_tried = all_accepted = tried = accepted = 0.0
        for number, of_range in enumerate(self._ranges):  # read for every tail of every step
            cell = of_range.cells.get(method)
            if cell is not None:
                all_tried += cell.tried / of_range.weight
                all_accepted += cell.accepted / of_range.weight
                if number == bucket:
                    tried, accepted = cell.tried / of_range.weight, cell.accepted / of_range.weight
        return _drawn(accepted, tried, _drawn(all_accepted, all_tried, prior))

    def guessing(self, method: str, bucket: int) -> float:
        """Share of its answers that hold a guess; 1 before anything is known."""
        cell = self._ranges[bucket].now(method)
        return _drawn(cell.guesses, cell.answers, 1.0)

    def estimate(self, method: str, bucket: int) -> Estimate:
        return Estimate(self.probability(method, bucket), self.guessing(method, bucket))

    def tried(self, method: str) -> float:
        """Its tokens that were put to the test, in all ranges, faded to now."""
        return sum(of_range.now(method).tried for of_range in self._ranges)

    def token_s(self, method: str) -> float:
        """Seconds per drafted token; 0 if unknown."""
        cost = self._costs.get(method)
        if cost is not None:
            return cost.token_s
        return self._priors[method].token_s if method in self._priors else 0.0

    def bonus(self, method: str, bucket: int, pending: Mapping[str, int] | None = None) -> float:
        """What optimism adds to the acceptance; `pending`: method → requests that it drafts for already."""
        here, soon = self._ranges[bucket], pending or {}
        total = here.total_tried() + PENDING_TOKENS * sum(soon.values())
        known = here.now(method).tried + PENDING_TOKENS * soon.get(method, 0)
        return EXPLORATION * math.sqrt(math.log1p(total) / (1.0 + known))

    def rank(
        self,
        bucket: int,
        methods: Sequence[str],
        rate: Rate,
        own: Callable[[str], Estimate] | None = None,
        pending: Mapping[str, int] | None = None,
    ) -> list[Rung]:
        """The methods by predicted TGS, best first; of equal ones in the order given.

        Args:
            bucket: Range of output positions.
            methods: Those that have draft actors now.
            rate: What a method of such quality and cost would bring.
            own: Method → its quality, where a request knows better than the average of its range.
            pending: Method → requests that it drafts for now.
        """
        rungs = []
        for method in methods:
            known = own(method) if own is not None else self.estimate(method, bucket)
            hoped = min(known.probability + self.bonus(method, bucket, pending), max(known.probability, _HIGHEST))
            tgs = rate(method, Estimate(hoped, known.guessing), self._hoped_token_s(method))
            rungs.append(Rung(method, tgs))
        return sorted(rungs, key=lambda rung: -rung.tgs)

    def standings(self, methods: Sequence[str], rate: Rate) -> dict[str, dict[str, Any]]:
        """What is known, as plain data: method → `token_s`, and per range of positions its `acceptance` (accepted /
        drafted; None where nothing was drafted), `probability`, `guessing`, and predicted `tgs` without optimism."""
        return {
            method: {
                "token_s": self.token_s(method),
                "buckets": {name: self._standing(method, bucket, rate) for bucket, name in enumerate(BUCKET_NAMES)},
            }
            for method in methods
        }

    def _standing(self, method: str, bucket: int, rate: Rate) -> dict[str, Any]:
        cell, known = self._ranges[bucket].now(method), self.estimate(method, bucket)
        return {
            "drafted": round(cell.drafted, 1),
            "acceptance": cell.accepted / cell.drafted if cell.drafted >= 1.0 else None,
            **known._asdict(),
            "tgs": rate(method, known, self.token_s(method)),
        }

    def _hoped_token_s(self, method: str) -> float:
        """A cost measured long ago fades too: it may have been that of a crowd that has left."""
        cost = self._costs.get(method)
        if cost is None:
            return self.token_s(method)
        return cost.token_s * math.exp2((cost.seen_at - self._tokens) / HALF_LIFE_TOKENS)


def _drawn(hits: float, trials: float, prior: float) -> float:
    """hits / trials, drawn to the prior."""
    return (hits + prior * PRIOR_TOKENS) / (trials + PRIOR_TOKENS)
