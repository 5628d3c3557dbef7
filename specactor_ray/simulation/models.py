"""Target engine and proposers of the virtual cluster: tokens and guesses of the world's text, in its durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.core.errors import InputError
from specactor_ray.core.ragged import enlarged
from specactor_ray.draft.chains import MAIN, RANKS, Chains, compile_kernels
from specactor_ray.draft.rows import BatchProposer
from specactor_ray.plan.hardware import shared_tokens
from specactor_ray.simulation import _kernels
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.world import World, guesses
from specactor_ray.table.requests import Finish
from specactor_ray.table.table import RequestTable
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.target.rows import fewest_first
from specactor_ray.transport.messages import States


class SimulatedEngine:
    """Commits the tokens of the world's text.

    Requests are admitted first come first served while there are rows and cache; prompts are prefilled in chunks that
    fit into the rest of `max_step_tokens`. When the cache is full, the request admitted last loses its cache, waits at
    the head of the queue, and is prefilled again, as in vLLM (recompute preemption). `cache_tokens`: most tokens of all
    contexts in total."""

    def __init__(
        self, clock: VirtualClock, world: World, max_batch: int, max_step_tokens: int, cache_tokens: float
    ) -> None:
        self.vocab_size, self.max_model_len = world.text.vocab_size, world.max_model_len
        self.weight_version, self.exports = 0, False
        self.closed = False
        self._clock, self._world = clock, world
        self._max_batch, self._max_step_tokens, self._cache_tokens = max_batch, max_step_tokens, cache_tokens
        self.table: RequestTable = _Table(self)
        self._admitted: dict[int, None] = {}
        self._waiting: dict[int, None] = {}
        self._numbers = np.zeros((5, 0), np.int32)
        """`(5, rows)`: see `_kernels.py`."""
        self._truth = np.zeros((0, 1), np.int32)
        """`(rows, positions)`: output tokens."""
        self.cached_tokens = 0
        """Number of tokens in the contexts of admitted requests."""
        self.speculates: Callable[[], bool] = lambda: False
        """Whether the verifier uses drafts in this step."""

    # ---- requests ----

    def add(self, row: int) -> None:
        request, prompt = self.table.requests[row], int(self.table.prompts[row])
        most, committed = request.sampling.max_tokens, len(self.table.output(row))
        if prompt + most > min(self.max_model_len, self._cache_tokens):
            raise InputError("the prompt is too long")
        if request.sampling.logprobs:
            raise InputError("sampling.logprobs: simulated engines have no probabilities")
        output = self.text(row)
        for axis, needed in enumerate((row + 1, len(output))):
            if self._truth.shape[axis] < needed:
                self._truth = enlarged(self._truth, axis, 2 * needed)
        if self._numbers.shape[1] < len(self._truth):
            self._numbers = enlarged(self._numbers, 1, len(self._truth))
        self._truth[row, : len(output)] = output
        self._numbers[:, row] = prompt, committed, len(output), prompt + committed, most
        self._waiting[row] = None

    def text(self, row: int) -> np.ndarray:
        """The whole output of a request with the present weights, integers `(n,)`."""
        return self._world.text.output(self.table.requests[row].sampling, self.weight_version)

    def remove(self, row: int) -> None:
        if row in self._admitted:
            del self._admitted[row]
            self.cached_tokens -= self._context(row)
        self._waiting.pop(row, None)

    def decoding(self) -> np.ndarray:
        self._admit()
        rows = self._in_order()
        return rows[self._numbers[_kernels.MISSING, rows] == 0]

    def has_work(self) -> bool:
        return bool(self._admitted or self._waiting)

    def _in_order(self) -> np.ndarray:
        """Admitted rows, int32 `(n,)`, oldest first."""
        return np.fromiter(self._admitted, np.int32, len(self._admitted))

    def _context(self, row: int) -> int:
        return int(self._numbers[_kernels.PROMPT, row] + self._numbers[_kernels.OUTPUT, row])

    # ---- steps ----

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        world, clock, python = self._world, self._clock, self._world.python
        self._admit()
        rows, budget = self._in_order(), self._max_step_tokens
        firsts, drafted, decoded, positions, prefilled = _kernels.begin_step(
            rows, self._numbers, drafts.rows, drafts.lengths, budget
        )
        seconds = world.target(decoded, positions, self.cached_tokens, prefilled)
        row_us = python.verify_row_us if self.speculates() else python.plain_row_us
        clock.work(seconds + decoded * (row_us / 1e6))
        columns = _kernels.verify(rows, self._numbers, self._truth, firsts, drafted, drafts.tokens)
        rows, starts, lengths, tokens, verified, accepted, finish = columns
        self.table.append(rows, lengths, tokens)
        self.cached_tokens += len(tokens)
        for row in rows[finish != Finish.RUNNING].tolist():
            self.remove(row)
        self._preempt()
        logprobs = np.full(len(tokens), -1.0, np.float32)
        result = StepResult(rows, starts, lengths, tokens, logprobs, None, verified, accepted, finish)
        result.forward_s, result.num_tokens = seconds * clock.process.slowness, positions + prefilled
        result.num_prefill_tokens = prefilled
        return result

    def _admit(self) -> None:
        while self._waiting and len(self._admitted) < self._max_batch:
            row = next(iter(self._waiting))
            if self._admitted and self.cached_tokens + self._context(row) + 1 > self._cache_tokens:
                return
            del self._waiting[row]
            self._admitted[row] = None
            self.cached_tokens += self._context(row)

    def _preempt(self) -> None:
        while self.cached_tokens > self._cache_tokens and len(self._admitted) > 1:
            row, _ = self._admitted.popitem()
            self.cached_tokens -= self._context(row)
            self._numbers[_kernels.MISSING, row] = self._context(row)
            self._waiting = {row: None, **self._waiting}

    # ---- weights and memory ----

    def states(self, rows: np.ndarray, starts: np.ndarray, most: int) -> States:
        width = self._world.state_size
        if not width:
            return States(rows[:0], starts[:0], starts[:0], np.zeros((0, 0)))
        from specactor_ray.models.weight_buckets import from_wire  # the form in which an engine exports them: torch

        numbers = self._numbers[:, rows]
        cached = numbers[_kernels.PROMPT] + numbers[_kernels.OUTPUT] - numbers[_kernels.MISSING]
        chosen, lengths = fewest_first(np.minimum(cached, self.table.lengths[rows] - 1), starts, most)
        states = from_wire(np.zeros((int(lengths.sum()), width), np.int16))
        return States(rows[chosen], starts[chosen], lengths, states)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if self.has_work():
            raise InputError("requests are running")
        self._clock.work(self._world.sync_s)
        self.weight_version = version

    def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, -1.0, np.float32)

    def reset_prefix_cache(self) -> None:
        pass

    def sleep(self, keep_weights: bool = True) -> None:
        if self.has_work():
            raise InputError("requests are running")

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class _Table(RequestTable):
    """The table of a simulated engine, in which outputs end where the world's text does."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(vocab_size=engine.vocab_size, max_model_len=engine.max_model_len)
        self._engine = engine

    def end_of(self, row: int) -> Finish | None:
        sampling, committed = self.requests[row].sampling, len(self.output(row))
        output = self._engine.text(row)
        if committed < len(output):
            return super().end_of(row)
        return Finish.LENGTH if len(output) == sampling.max_tokens else Finish.STOP


class SimulatedProposer(BatchProposer):
    """Drafts the guesses of the world's text for its method.

    A forward drafts one token for every chain; a lookup fills all windows at once, as far as it finds guesses. Tokens
    that a request's cache lacks are prefilled in the next forward. `max_batch`: most requests drafted for at once;
    `branches`: most branches of a request."""

    vocab_size: int
    _by_row = (*BatchProposer._by_row, "_anchors", "_right", "_ranks")

    def __init__(self, method: str, clock: VirtualClock, world: World, max_batch: int = 64, branches: int = 0) -> None:
        self._time = world.draft_time(method)
        super().__init__(max_batch, 0 if self._time.is_lookup else branches)
        compile_kernels()
        self.method, self.vocab_size = method, world.text.vocab_size
        self._clock, self._world = clock, world
        self.traits = Traits(looks_up=self._time.is_lookup, branches=branches > 0)
        self._anchors = np.zeros(0, np.int64)
        """int64 `(rows,)`: for an EAGLE head, number of tokens of main chains in the cache that are based on the
        target's states. `_cached`, and `rows` of the branches, are numbers of tokens in the cache."""
        self._right = np.zeros((0, 0), np.int32)
        """int32 `(rows, positions)`: right output tokens; for a lookup, its guesses."""
        self._ranks = np.zeros((0, 2, 0), np.int8)
        """int8 `(rows, 2, positions)`: see `GeneratedText.ranks`."""

    # ---- requests ----

    def _enter(self, row: int) -> bool:
        sampling, text = self.view.sampling(row), self._world.text
        version = self._world.version_of.get(sampling.seed, 0)
        ranks, output = text.ranks(self.method, sampling, version), text.output(sampling, version)
        width = len(output) + self.view.window
        if width > self._right.shape[1]:
            self._right, self._ranks = enlarged(self._right, 1, width), enlarged(self._ranks, 2, width)
        known = guesses(ranks[0], output, self.vocab_size) if self._time.is_lookup else output
        self._right[row], self._ranks[row] = 0, _kernels.NO_GUESS
        self._cached[row] = self._anchors[row] = 0
        self._right[row, : len(output)], self._ranks[row, :, : len(output)] = known, ranks
        return True

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        self._cached[rows] = np.minimum(self._cached[rows], same if self._time.fusion is None else self._anchors[rows])

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.sync_s)

    # ---- guesses ----

    def extend(self) -> np.ndarray:
        self.rows_drafted = 0
        changed = self._look_up() if self._time.is_lookup else self._draft(self._ready())
        changed |= self._unanswered
        self._unanswered[:] = False
        rows: np.ndarray = np.flatnonzero(changed).astype(np.int32)
        return rows

    def _look_up(self) -> np.ndarray:
        """Fill the tails after new commits. Returns bool `(rows,)`: rows with changed tails."""
        rows = np.flatnonzero(self._unanswered & self._placed)
        if len(rows):
            found = _kernels.look_up(self._right, self.view.texts, rows)
            self._work(self._time.forward(len(rows), found, 0, 0), len(rows))
        return np.zeros(len(self._placed), np.bool_)

    def _ready(self) -> Chains:
        view, placed = self.view, self._placed
        reads = placed & (view.ends < view.limits) & (view.ends - self._cached > 1)  # more than their last token
        none = np.zeros((2, len(placed)), np.int64)
        budget = 0 if reads.any() else self.budget
        return self.branches.plan(view, view.ends, none[0] > 0, placed, none[1], budget, forward_s=self.forward_s)

    def _draft(self, chains: Chains) -> np.ndarray:
        """Run one forward: a token for each chain. Returns bool `(rows,)`: rows with changed tails."""
        view, table, changed = self.view, self.branches, np.zeros(len(self._placed), np.bool_)
        if not len(chains.rows):
            return changed
        at = (self._right, self._ranks, self._cached, view.texts, table.arrays, chains.rows, chains.numbers)
        ends, prefill, tokens, gaps = _kernels.draft(*at, self.vocab_size, 1 + RANKS)
        table.append(view, view.ends, chains, tokens, gaps)
        changed[chains.rows] = True
        shared = shared_tokens(ends, self._known, chains.rows)
        seconds = 0.0
        if self._time.fusion is not None:
            mains = chains.rows[chains.numbers == MAIN]
            seconds = self._time.fusion(int((self._known - self._anchors)[mains].sum()))
            self._anchors[mains] = self._known[mains]
        seconds += self._time.seconds(len(ends), int(ends.sum()), shared, prefill)
        self.rows_drafted = 0 if prefill else len(ends)
        self._work(seconds, len(ends))
        return changed

    def _work(self, seconds: float, rows: int) -> None:
        self._clock.work(seconds + rows * (self._world.python.draft_row_us / 1e6))
