"""Streams of draft tokens whose acceptance changes, by the product's verify loop on virtual time, beside an oracle.

One verifier decodes `rows` requests at a time. A plain step takes V, and each draft token beside it a share of V that
is called `slope`, divided by the rows. A model drafts a token for all its requests in D, and reads a token of a request
in D / 1000, the prompt of an opened request included. `coupled` models take turns with the verifier; `decoupled` ones
draft meanwhile, without branches and without delay of messages. A draft token is right with the rate of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import RaceName, SpeculationConfig
from specactor_ray.core.clock import Clock
from specactor_ray.core.step_cost import StepCost
from specactor_ray.core.types import SamplingParams
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.target.base import Drafts, StepResult
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, TailBatch
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.racing import Assigner

V, D = 0.02, 0.002
"""Seconds of a plain step, and of a draft token."""
READ = D / 1000.0
"""Seconds in which a model reads a token."""
PROMPT, WINDOW = 256, 8
DRAFTING_S, PLAIN_S = 1.1e-6, 0.3e-6
"""Seconds of our Python per row of a step, with drafts and without, as in `simulation.scenario.PythonConfig`."""
METHODS = ("draft_model", "eagle")
PERIOD = 4096
"""Output positions after which the chances of draft tokens repeat."""
AFTER = 100
"""Steps after a change, and steps of which the worst in a row are sought."""


class Stream(NamedTuple):
    """Rates at which draft tokens are right, `(methods, steps)`, and the steps at which they change."""

    rates: np.ndarray
    changes: tuple[int, ...] = (0,)


def phases(*rates_of: Sequence[float], steps: int = 300) -> Stream:
    """Phases of so many steps, by the rates of each method."""
    rates = np.repeat(np.array(rates_of, float).T, steps, axis=1)
    return Stream(rates, tuple(range(0, rates.shape[1], steps)))


def streams(coupled: bool) -> dict[str, Stream]:
    """Name → stream."""
    waves = 0.5 + 0.4 * np.cos(np.arange(1000) * np.pi / 500)
    return {
        "fall and return": phases([0.9], [0.2], [0.9]),
        "swap": phases([0.8, 0.4], [0.4, 0.8], [0.8, 0.4]),
        "alternating": phases(*[[0.9], [0.2]] * 10, steps=40),
        "slow drift": Stream(waves[None]),
        "untried better": phases([0.7, 0.95] if coupled else [0.6, 0.9], steps=900),
        **{f"steady {rate}": phases([rate], steps=400) for rate in (0.02, 0.2, 0.5, 0.7, 0.9)},
    }


class VirtualTime(Clock):
    """Seconds that pass only where the model of costs says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.now: Callable[[], float] = lambda: self.seconds  # type: ignore[misc]


class Engine:
    """A target whose every token is 1, with the steps of the model of costs."""

    vocab_size, max_model_len, weight_version = 4, 1 << 20, 0

    def __init__(self, clock: VirtualTime, slope: float) -> None:
        self._clock, self._slope, self.steps = clock, slope, 0
        self.beside: list[Model] = []
        """Models that draft during a step."""
        self.table = RequestTable(vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        self._rows = np.zeros(0, np.int32)

    def add(self, row: int) -> None:
        self._rows = np.append(self._rows, np.int32(row))

    def decoding(self) -> np.ndarray:
        return self._rows

    def has_work(self) -> bool:
        return True

    def seconds(self, positions: np.ndarray | int) -> Any:
        rows = max(len(self._rows), 1)
        return V * (1.0 + self._slope * (positions - rows) / rows)

    def step(self, drafts: Drafts, window: int = 0) -> StepResult:
        rows, drafted = self._rows, np.zeros(len(self._rows), np.int32)
        drafted[drafts.rows] = drafts.lengths
        firsts = np.zeros(len(rows), np.int32)
        firsts[drafts.rows] = np.cumsum(drafts.lengths) - drafts.lengths
        column = np.arange(drafted.max(initial=0))
        within = column < drafted[:, None]
        guesses = drafts.tokens[np.where(within, firsts[:, None] + column, 0)] if len(drafts.tokens) else within * 0
        accepted = np.logical_and.accumulate(within & (guesses == 1), axis=1).sum(axis=1).astype(np.int32)
        lengths, starts = accepted + np.int32(1), self.table.committed[rows]
        tokens = np.ones(lengths.sum(), np.int32)
        self.table.append(rows, lengths, tokens)
        finish, logprobs = np.zeros(len(rows), np.uint8), np.full(len(tokens), -1.0, np.float32)
        result = StepResult(rows, starts, lengths, tokens, logprobs, None, drafted, accepted, finish)
        result.num_tokens = len(rows) + int(drafted.sum())
        result.forward_s = float(self.seconds(result.num_tokens))
        spent = result.forward_s + len(rows) * (DRAFTING_S if window else PLAIN_S)
        self._clock.seconds += spent
        for model in self.beside:
            model.work(spent)
        self.steps += 1
        return result


class Model:
    """A drafter with chains of tokens that are right where `chances`, `(rows, PERIOD)`, are below the rate of the step:
    the part of a proposer and its draft loop that the verify loop uses."""

    def __init__(self, method: str, rates: np.ndarray, chances: np.ndarray, engine: Engine, clock: VirtualTime) -> None:
        rows = len(chances)
        self.drafter_id, self._rates, self._chances = f"{method}-0#1", rates, chances
        self._engine, self._clock = engine, clock
        self._generation, self._known, self._have = np.zeros((3, rows), np.int32)
        self._open, self._changed = np.zeros((2, rows), np.bool_)
        self._right = np.zeros((rows, WINDOW), np.bool_)
        self._unread, self._credit = 0, 0.0
        self.unread, self.drafted, self.token_s, self.vocab_size = 0, 1, D, None
        self.counters = dict.fromkeys(("opens", "tails", "branches"), 0)
        self._heard: list[CommitBatch] = []
        self.link: Link[CommitBatch] = Link(direct_sender(self._heard.append))
        self._verifier: Link[TailBatch] = self.link  # type: ignore[assignment]  # until `set_verifiers`

    # ---- what the verify loop calls of a hosted drafter ----

    @property
    def runner(self) -> Any:
        """As a `DraftRunner`."""
        return self

    @property
    def proposer(self) -> Any:
        return self

    def run(self, view: TableView, rows: np.ndarray, most: int = 1) -> np.ndarray:
        table = view.table
        self._open[:] = False
        self._open[rows] = True
        is_new = self._generation[rows] != table.generation[rows]
        new, old = rows[is_new], rows[~is_new]
        self._generation[new], self._known[new], self._have[new] = table.generation[new], table.committed[new], 0
        self._unread += int((PROMPT + self._known[new]).sum())
        moved = old[table.committed[old] > self._known[old]]
        self._take(moved, table.committed[moved] - self._known[moved])
        self._clock.seconds += self._unread * READ
        self._unread, drafts = 0, 0
        for _ in range(most):
            drafts += self._draft()
        self._clock.seconds += drafts * D
        self.drafted = most
        table.tail[view.seat, rows, 0, :WINDOW] = np.where(self._right[rows], 1, 2)
        table.length[view.seat, rows, 0] = self._have[rows]
        table.publish(view.seat, rows)
        return rows if drafts else rows[:0]

    # ---- messages ----

    def set_verifiers(self, links: Mapping[str, Link[TailBatch]]) -> None:
        [self._verifier] = links.values()

    # ---- beside the verifier ----

    def work(self, seconds: float) -> None:
        """Read and draft for these seconds."""
        self._credit += seconds
        read = min(self._unread, int(self._credit / READ))
        self._unread, self._credit = self._unread - read, self._credit - read * READ
        while not self._unread and self._credit >= D:
            self._credit -= D
            if not self._draft():
                self._credit = 0.0  # all windows are full

    def publish(self) -> None:
        self._hear()
        rows = np.flatnonzero(self._changed).astype(np.int32)
        if not len(rows) or self._unread:
            return
        self._changed[:] = False
        lengths, right = self._have[rows], self._right[rows]
        tokens = np.where(right, 1, 2).astype(np.int32)[np.arange(WINDOW) < lengths[:, None]]
        arrays = (rows, self._generation[rows], self._known[rows], lengths, tokens)
        self._verifier.offer(lambda: TailBatch(self.drafter_id, *arrays, token_s=D))

    # ---- state ----

    def _hear(self) -> None:
        for batch in self._heard:
            for row, generation, _ in batch.closed:
                self._open[row] &= self._generation[row] != generation
            for one in batch.opened:
                row, known = one.row, len(one.committed_token_ids)
                self._generation[row], self._known[row], self._have[row] = one.generation, known, 0
                self._open[row] = self._changed[row] = True
                self._unread += PROMPT + known
            self._take(batch.rows, batch.lengths)
        self._heard.clear()

    def _take(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Commits of right tokens: a chain that is right so far goes on behind them."""
        have, right, column = self._have[rows], self._right[rows], np.arange(WINDOW)
        kept = ((column < np.minimum(lengths, have)[:, None]) <= right).all(axis=1) & (have > lengths)
        self._unread += int(np.maximum(lengths - have - 1, 0).sum())
        self._known[rows] += lengths
        self._have[rows] = np.where(kept, have - lengths, 0)
        places = np.minimum(column + lengths[:, None], WINDOW - 1)
        self._right[rows] = np.take_along_axis(right, places, axis=1)
        self._changed[rows] = True

    def _draft(self) -> bool:
        """Draft a token for every request with room. Returns whether there was one."""
        rows = np.flatnonzero(self._open & (self._have < WINDOW))
        have = self._have[rows]
        rate = self._rates[min(self._engine.steps, len(self._rates) - 1)]
        self._right[rows, have] = self._chances[rows, (self._known[rows] + have) % PERIOD] < rate
        self._have[rows] += 1
        self._changed[rows] = True
        return len(rows) > 0


# ---- the oracle ----


class TrueRates(Acceptance):
    """Acceptance without an estimate."""

    def __init__(self, engine: Engine, rates: np.ndarray) -> None:
        super().__init__()
        self._engine, self._rates = engine, rates

    @property
    def now(self) -> np.ndarray:
        """`(methods,)`: the rates of the step."""
        found: np.ndarray = self._rates[:, min(self._engine.steps, self._rates.shape[1] - 1)]
        return found

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        found = np.zeros((len(self.evidence[0]), len(rows)))
        found[: len(self.now)] = self.now[:, None]
        return found


class TrueCost(StepCost):
    """The seconds of the model of costs."""

    is_known = True

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def record(self, num_tokens: int, seconds: float) -> None:
        pass

    def curve(self, num_rows: int, most: int) -> np.ndarray:
        found: np.ndarray = self._engine.seconds(np.arange(num_rows, num_rows + most + 1))
        return found

    def difference(self, num_tokens: int, fewer: int) -> float:
        return float(self._engine.seconds(num_tokens) - self._engine.seconds(fewer))


class BestModel(Assigner):
    """Assigns all requests to the best model at once when the rates change."""

    def step(self, decoding: np.ndarray) -> list[tuple[int, int]] | None:
        rates: Any = self._policy.acceptance
        best, table = int(np.argmax(rates.now)), self._table
        table.begun[decoding] = True
        released: list[tuple[int, int]] = []
        for seat, drafter in self._policy.drafters.items():
            drafter.watches = seat != best
            if seat != best:
                drafter.token_s = 0.0  # an idle model costs nothing
                released += [(seat, int(row)) for row in decoding if table.assigned[seat, row]]
        for seat, row in released:
            table.release(seat, row)
        for row in decoding:
            if not table.assigned[best, row]:
                table.assign(best, row)
        return released


# ---- runs ----


class Run(NamedTuple):
    """Tokens and seconds of each step, `(steps,)`, and requests of each drafter, `(steps, drafters)`."""

    tokens: np.ndarray
    seconds: np.ndarray
    assigned: np.ndarray


def run(stream: Stream, rows: int, slope: float, coupled: bool, seed: int = 0, oracle: bool = False) -> Run:
    """The steps of a stream by the product's decisions, or by those of an oracle that has the rates and costs. The
    pace of all models is known."""
    clock, methods = VirtualTime(), METHODS[: len(stream.rates)]
    engine = Engine(clock, slope)
    chances = np.random.default_rng(seed).random((len(METHODS), rows, PERIOD))
    models = [Model(*each, engine, clock) for each in zip(methods, stream.rates, chances, strict=False)]
    config = SpeculationConfig(window=WINDOW, race=RaceName.off)
    drafting = Drafting("verifier-0#1", coupled, config, engine.table, max_batch=rows)
    if oracle:
        policy = drafting.policy
        policy.acceptance, policy.cost = TrueRates(engine, stream.rates), TrueCost(engine)
        drafting.assigner = BestModel(config, policy, coupled, rows)
        policy.suspension.record = lambda *_: None  # type: ignore[method-assign]
    specs = [DrafterSpec(method, window=WINDOW, max_batch=rows, traits=traits(method)) for method in methods]
    pairs: Any = list(zip(specs, models, strict=True))
    target: Any = engine
    loop = VerifyLoop(target, drafting, [HostedDrafter(spec, one) for spec, one in pairs] if coupled else (), clock)
    if not coupled:
        for model in models:
            model.set_verifiers({"": Link(direct_sender(loop.deliver), clock=clock)})
        engine.beside = models
        loop.set_drafters({one.drafter_id: DrafterLink(spec, one.link) for spec, one in pairs})
    limits = [SamplingParams(seed=number, max_tokens=1 << 17) for number in range(rows)]
    loop.submit([TargetRequest(str(number), (1,) * PROMPT, one) for number, one in enumerate(limits)])
    loop.put(lambda: [setattr(one, "token_s", D) for one in drafting.policy.drafters.values()])
    steps, table, read = stream.rates.shape[1], drafting.table, 0
    totals, assigned = np.zeros((2, steps + 1)), np.zeros((steps, len(methods)), np.int64)
    for step in range(steps):
        loop.run_once()
        for model in engine.beside:
            model.publish()
        totals[:, step + 1] = table.committed.sum(), clock.seconds
        assigned[step] = table.assigned[: len(methods)].sum(axis=1)
        first, events = loop.poll(read, 0.0)
        read = first + len(events)
    return Run(*np.diff(totals, axis=1), assigned)


def total(runs: Sequence[Run]) -> np.ndarray:
    """`(2, steps)`: tokens and seconds of each step, of all runs together."""
    return np.sum([(one.tokens, one.seconds) for one in runs], axis=0)


def regrets(stream: Stream, mine: np.ndarray, best: np.ndarray) -> tuple[float | None, float]:
    """Share of the oracle's tokens per second that is lost in steady phases, from `AFTER` steps after their begin on,
    and in the first `AFTER` steps after a change (after the start if there is no other): phases of the same rates
    together, the worst of these."""
    lost: tuple[dict[bytes, list[int]], ...] = {}, {}
    ends = (*stream.changes[1:], stream.rates.shape[1])
    for begin, end in zip(stream.changes, ends, strict=True):
        name, edge = stream.rates[:, begin].tobytes(), min(begin + AFTER, end)
        lost[0].setdefault(name, []).extend(range(edge, end))
        lost[1].setdefault(name, []).extend(range(begin, edge) if begin or len(ends) == 1 else ())
    worst = [[1.0 - _rate(mine[:, at]) / _rate(best[:, at]) for at in one.values() if at] for one in lost]
    return max(worst[0], default=None), max(worst[1])


def _rate(steps: np.ndarray) -> float:
    tokens, seconds = steps.sum(axis=1)
    return float(tokens / seconds)


def measure(name: str, coupled: bool, rows: int, slope: float, seeds: int) -> dict[str, Any]:
    """The figures of a stream: means over seeds."""
    stream, plain = streams(coupled)[name], rows / (V + rows * PLAIN_S)
    mine, best = (
        total([run(stream, rows, slope, coupled, seed, who) for seed in range(seeds)]) for who in (False, True)
    )
    steady, after = regrets(stream, mine, best)
    sums = np.cumsum(np.pad(mine, ((0, 0), (1, 0))), axis=1)
    tokens, seconds = sums[:, AFTER:] - sums[:, :-AFTER]
    return {
        "stream": name,
        "layout": "coupled" if coupled else "decoupled",
        "rows": rows,
        "slope": slope,
        "x plain": _rate(mine) / plain,
        "oracle x plain": _rate(best) / plain,
        "regret steady": steady,
        "regret after a change": after,
        "worst 100 steps x plain": float((tokens / seconds).min()) / plain,
    }
