"""How many draft tokens a step verifies, how far models of the verifier's thread draft, which methods promise most, and
when drafting is suspended.

All decisions maximise the expected committed tokens per second of the step:

    (rows + sum of expected accepted tokens) / (seconds of drafting + V(positions))

Old observations decay, and unknown values are estimated optimistically. See docs/design/policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.core.step_cost import StepCost
from specactor_ray.plan.search import coupled_rates, decoupled_rates, geometric
from specactor_ray.table.table import RequestTable
from specactor_ray.verify import _kernels
from specactor_ray.verify.acceptance import BUCKET_NAMES, Acceptance

_FIRST_ROUNDS = 3
"""Rounds of drafting while the seconds of a round are unknown."""
_RETURN_GAIN = 0.05
"""Least predicted gain of rounds if models must first read more than a window of commits."""
BUDGET = 0.01
"""Share of the seconds that trials of drafts that do not pay may take."""
_DEBT = 8.0
"""Trials on credit, where the newest draft tokens promise more than those before, or another method has changed."""
_CHANGED_STEPS = 16
"""Steps for which a change of a method is a reason to try others."""
PROBE_STEPS = 8
"""Steps with drafts before their speed is compared, after a first one that does not count."""
TELL_EVERY = 16
"""Period, in steps of a suspension, at which commits are sent to drafters."""
_STEP_FADE = 1.0 - 1.0 / 48.0
"""Weight that a step with drafts loses with each one after it."""
_FEWER = 0.5
"""Share of its initial requests at which a suspension ends early."""
_OWN_WEIGHT = 0.1
"""Weight of the newest plain step in the moving mean of the Python time of plain steps."""


@dataclass(eq=False)
class Drafter:
    """The properties of a seat's drafter that the policy uses."""

    drafter_id: str
    spec: DrafterSpec
    token_s: float = 0.0
    """D: seconds in which a model drafts one token for each of its requests; 0 if unknown."""
    token_rows: int = 0
    """Requests of the verifier when `token_s` arrived."""
    able: bool = True
    """Whether it can be reached."""
    hosted: bool = False
    """Whether the verifier's own thread runs it."""
    watches: bool = False
    """Whether it drafts only so that it can be compared (`racing.WATCHED`)."""
    read_s: float = 0.0
    """Seconds in which it reads a token of a request that is opened, where it takes turns; 0 if unknown."""
    tried: int = 0
    """Number of its newest trial."""

    @property
    def takes_turns(self) -> bool:
        """Whether it is a model that drafts while the verifier waits."""
        return self.hosted and not self.spec.traits.looks_up


class Seconds(NamedTuple):
    """Seconds of a step: total, forward and sampling, waiting for drafts."""

    total: float
    engine: float
    waiting: float

    @property
    def own(self) -> float:
        """Seconds of the verifier's own Python."""
        return max(self.total - self.engine - self.waiting, 0.0)


class Suspension:
    """Suspends drafts for a while if steps with drafts commit fewer tokens per second than plain ones would: the same
    steps without the wait, the draft positions and the additional Python. A slow machine favours neither."""

    def __init__(self) -> None:
        self._left = 0  # remaining steps of this suspension
        self._rows = 0  # requests at its begin
        self._steps = 0  # steps with drafts since the last suspension
        self._sums = np.zeros(4)  # tokens and seconds of these steps; the same for plain steps in their place
        self._plain_row_s = 0.0  # Python seconds per request in plain steps; 0 before the first one

    @property
    def is_on(self) -> bool:
        """Whether steps neither wait for drafts nor verify any."""
        return self._left > 0

    @property
    def is_quiet(self) -> bool:
        """Whether commits are not sent to drafters either."""
        return self._left % TELL_EVERY != 0

    def end(self) -> None:
        """Resume drafting now."""
        self._left, self._steps = 0, 0

    def record(self, num_rows: int, accepted: int, seconds: float, drafting_s: float, own_s: float) -> None:
        """Record a step of `seconds`, of which `drafting_s` for waiting for drafts and verifying them, and `own_s` in
        the verifier's Python. `num_rows`, `accepted`: decoded requests, and right draft tokens."""
        if not num_rows:
            return
        if self._left:
            if self.is_quiet:
                weight = _OWN_WEIGHT if self._plain_row_s else 1.0
                self._plain_row_s += weight * (own_s / num_rows - self._plain_row_s)
            # Fewer requests leave more room for drafts.
            self._left = self._left - 1 if num_rows > _FEWER * self._rows else 0
            return
        self._steps += 1
        if self._steps == 1:
            self._sums[:] = 0.0
            return  # drafters catch up
        saved_s = max(own_s - num_rows * self._plain_row_s, 0.0)
        plain_s = max(seconds - drafting_s - saved_s, 0.0)
        self._sums = _STEP_FADE * self._sums + (num_rows + accepted, seconds, num_rows, plain_s)
        if self._steps <= PROBE_STEPS:
            return
        tokens, seconds, plain_tokens, plain_s = self._sums
        lost_s, allowed_s = seconds - tokens * plain_s / plain_tokens, BUDGET * seconds
        if lost_s > allowed_s:
            self._left, self._steps, self._rows = int(PROBE_STEPS * lost_s / allowed_s), 0, num_rows


class DraftPolicy:
    """The decisions of one verifier, without clock, messages and models. `drafters`: seat → its drafter.

    In a step: `silent`, `turns`, `choose`, `record`; in a suspension `record` alone."""

    def __init__(
        self,
        config: SpeculationConfig,
        table: RequestTable,
        acceptance: Acceptance,
        cost: StepCost,
        drafters: Mapping[int, Drafter],
    ) -> None:
        self._config, self.table, self.drafters = config, table, drafters
        self.acceptance, self.cost = acceptance, cost
        self.suspension = Suspension()
        self.wait_s = config.draft_wait_s
        """Longest wait of a step for first drafts."""
        self.rows = 1
        """Rows of the newest step."""
        self._credit_s, self._trials, self._trial = 0.0, 0, -1  # for trials; their number; seat of the one under way

    def plan_rounds(self, rows: np.ndarray) -> int:
        """Number of tokens that models that take turns with the verifier draft for each request before the step."""
        table, longest = self.table, np.zeros((len(self.table.method), len(rows)), np.int32)
        token_s, most, known = np.zeros(len(longest)), 0, True
        for seat, one in self.drafters.items():
            if not (one.able and one.takes_turns and not one.watches and table.assigned[seat, rows].any()):
                continue
            if 2 * len(rows) <= one.token_rows:  # measured at twice the load, so unknown at this load
                one.token_s, one.token_rows = 0.0, 0
            longest[seat] = one.spec.window * table.assigned[seat, rows]
            token_s[seat], most, known = one.token_s, max(most, one.spec.window), known and one.token_s > 0.0
        if not most or not self.cost.is_known or self._config.verify is VerifyPolicy.all:
            return most * self.cost.is_known
        most = most if known else min(most, _FIRST_ROUNDS)
        supply, curve = self._supply(rows), self.cost.curve(len(rows), len(rows) * table.window)
        behind = table.committed[rows] - table.sent.take(rows, axis=1) > table.window
        hurdle = 1.0 + _RETURN_GAIN * float(behind[longest > 0].mean())
        tails = (self._probability(rows), supply, np.maximum(longest, supply), self._room(rows))
        rounds: int = _kernels.best_rounds(*tails, curve, token_s, most, hurdle)
        return rounds

    def turns(self, rows: np.ndarray) -> dict[int, int]:
        """Seat → number of tokens to draft for each of its requests before the step: those of models that take turns
        with the verifier, and of the one that is tried."""
        rounds, table, self._trial = self.plan_rounds(rows), self.table, -1
        mine = {seat: one for seat, one in self.drafters.items() if one.able and one.takes_turns}
        turns = {seat: rounds for seat, one in mine.items() if rounds and not one.watches}
        roomy = rows[self._room(rows) > 0]
        rises = {
            seat: self._rises(seat, rows) for seat in mine if seat not in turns and table.assigned[seat, roomy].any()
        }
        if rises and self.cost.is_known:
            seat = min(rises, key=lambda one: (not rises[one], mine[one].tried))
            if self._credit_s >= -_DEBT * mine[seat].token_s * rises[seat]:
                self._trials += 1
                self._trial, mine[seat].tried, turns[seat] = seat, self._trials, 1
        return turns

    def spent(self, seat: int, seconds: float, drafted: int, opened: int) -> None:
        """Record the seconds of a turn, with its draft tokens and the tokens of opened requests."""
        one = self.drafters[seat]
        if opened:
            one.read_s = max(seconds - drafted * one.token_s, 0.0) / opened
        if seat == self._trial:
            self._credit_s -= seconds

    @property
    def share_s(self) -> float:
        """Share of each request of the newest step in the seconds of a plain step."""
        return float(self.cost.curve(self.rows, 0)[0]) / self.rows

    def reading_s(self, method: str, rows: np.ndarray) -> float:
        """Seconds for which the verifier waits until models of this method have read one of these requests."""
        read_s = max((one.read_s for one in self.drafters.values() if one.spec.method == method), default=0.0)
        if not read_s:
            return 0.0
        return read_s * float(self.table.lengths[rows].mean())

    def _rises(self, seat: int, rows: np.ndarray) -> bool:
        """Whether the newest draft tokens of these rows promise more than those before, or another method changed."""
        methods = self.table.method
        others = methods[[one for one in self.drafters if methods[one] != methods[seat]]]
        if (self.acceptance.overall[4, others] < _CHANGED_STEPS).any():
            return True
        hits, tries, right, newest = self.table.evidence[:, methods[seat], rows].sum(axis=1)
        rate = hits / max(tries, 1.0)
        return bool(right - newest * rate > (newest * rate * (1.0 - rate)) ** 0.5)

    def choose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Verified parts of the tails: int32 `(rows,)` seats, -1 without a tail, and numbers of tokens. A row with a
        tail keeps its seat if no token pays: the seat counts as supplied; where `_room` is 0 it has none."""
        self.rows = len(rows)
        supply, room = self._supply(rows), self._room(rows)
        seats, lengths = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
        takes_all = self._config.verify is VerifyPolicy.all  # as if the step took the same time with any of them
        curve = np.ones(1) if takes_all else self.cost.curve(len(rows), len(rows) * self.table.window)
        _kernels.choose_lengths(self._probability(rows), supply, room, curve, seats, lengths)
        if takes_all:
            lengths = np.where(seats >= 0, np.minimum(supply[seats, np.arange(len(rows))], room), 0)
        return seats, lengths

    def silent(self, rows: np.ndarray) -> np.ndarray:
        """bool `(rows,)`: whether the row has room for drafts and no tail, but a draft actor that has not answered the
        newest commit."""
        table, seats = self.table, [seat for seat, one in self.drafters.items() if one.able and not one.hosted]
        base, asked = table.base[seats].take(rows, axis=1), table.assigned[seats].take(rows, axis=1)
        unanswered: np.ndarray = (asked & (base != table.committed[rows])).any(axis=0)
        return unanswered & ~self._supply(rows).any(axis=0) & (self._room(rows) > 0)

    def record(self, num_rows: int, positions: int, prefill: int, accepted: int, seconds: Seconds) -> None:
        """Learn the cost of steps, and whether drafts pay, unless the configuration demands drafts. `num_rows` requests
        were decoded, with `accepted` right draft tokens; of the `positions` of the forward `prefill` were of prompts,
        which take the same time with and without drafts."""
        if 2 * prefill > positions:
            return
        self._credit_s = min(self._credit_s + BUDGET * seconds.total, 0.0)
        self.cost.record(positions, seconds.engine)
        config, decoded = self._config, positions - prefill
        if config.verify is VerifyPolicy.all or config.race is RaceName.always:
            return
        prefill_s = self.cost.difference(positions, decoded) if prefill else 0.0
        drafting_s = seconds.waiting + self.cost.difference(decoded, num_rows)
        self.suspension.record(num_rows, accepted, seconds.total - prefill_s, drafting_s, seconds.own)

    def predict(self, method: str, probability: np.ndarray) -> np.ndarray:
        """Tokens per second of a request with this method alone at its best window, or of plain decoding if higher, by
        the equations of `plan/search.py`: a model that takes turns adds its seconds, another one hides them."""
        mine = [drafter for drafter in self.drafters.values() if drafter.spec.method == method]
        window, token_s = max(one.spec.window for one in mine), max(one.token_s for one in mine)
        verify_s = self.cost.curve(self.rows, self.rows * window)[:: self.rows]
        is_coupled = any(one.takes_turns for one in mine)
        survival = geometric(probability, window + (not is_coupled))
        rates: np.ndarray = (coupled_rates if is_coupled else decoupled_rates)(survival, token_s, verify_s).max(axis=1)
        return rates.clip(1.0 / verify_s[0])

    def standings(self) -> list[dict[str, Any]]:
        """The draft ladder as plain data: each method at each range of output positions with evidence."""
        acceptance, standings = self.acceptance, list[dict[str, Any]]()
        for method, token_s in {one.spec.method: one.token_s for one in self.drafters.values()}.items():
            number = acceptance.number(method)
            chances, drafted = acceptance.of_method()[number], acceptance.evidence[1, number]
            tgs = self.predict(method, chances)
            for at in np.flatnonzero(drafted >= 1.0).tolist():
                place = {"method": method, "positions": BUCKET_NAMES[at], "token_s": token_s}
                figures = {"drafted": float(drafted[at]), "acceptance": float(chances[at]), "tgs": float(tgs[at])}
                standings.append({**place, **figures})
        return standings

    def _probability(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`: chance that a draft token is right."""
        return self.acceptance.probability(self.table, rows)[self.table.method]

    def _supply(self, rows: np.ndarray) -> np.ndarray:
        """`(seats, rows)`: usable draft tokens, in C order, which kernels require."""
        return self.table.length[..., 0].take(rows, axis=1)

    def _room(self, rows: np.ndarray) -> np.ndarray:
        """int32 `(rows,)`: most draft tokens of each row, which leave room for one token of the target."""
        left: np.ndarray = self.table.limits[rows] - self.table.lengths[rows]
        return (left - 1).clip(0)
