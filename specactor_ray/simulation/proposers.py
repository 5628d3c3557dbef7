"""Drafters of the virtual cluster: proposers that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specactor_ray.draft.proposer import Proposer, Tails, Traits
from specactor_ray.messages import FinishedOutput, SamplingParams
from specactor_ray.ragged import enlarged
from specactor_ray.simulation import _kernels
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.world import World

_FIRST_SLOTS = 64


class SimulatedProposer(Proposer):
    """Guesses what the world's text says that its method guesses.

    A forward drafts one token for every request that has room in its window; a lookup fills all windows at once, as far
    as it finds something. What a request's cache lacks is prefilled in the next forward. `random` returns a number in
    [0, 1), for what corrupt drafters draft.
    """

    vocab_size: int | None

    def __init__(self, name: str, method: str, clock: VirtualClock, world: World, random: Callable[[], float]) -> None:
        self.method, self.vocab_size = method, world.text.vocab_size
        self._name, self._clock, self._world, self._random = name, clock, world, random
        self._time = world.draft_time(method)
        self.traits = Traits(looks_up=self._time.is_lookup)
        self._table = np.zeros((5, _FIRST_SLOTS), np.int32)
        """By slot; its rows are documented in `_kernels.py`."""
        self._known = np.zeros((_FIRST_SLOTS, 0), np.int32)
        """By slot and output position: the guess there."""
        self._changed = np.zeros(_FIRST_SLOTS, np.bool_)
        self._open = self._to_prefill = self._cached = 0
        """Open requests; of a model, positions that the next forward reads first, and tokens of all contexts."""

    # ---- messages of verifiers ----

    def open(
        self,
        slot: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self.close(slot, finished=False)
        prompt, base, text = len(prompt_token_ids), len(committed_token_ids), self._world.text
        guesses = text.guesses(self.method, sampling, self._world.version_of.get(sampling.seed, 0))
        if not self._time.is_lookup:
            guesses = np.maximum(guesses, 0)
            self._to_prefill += prompt + base
            self._cached += prompt + base
        self._fit(slot, len(guesses))
        self._known[slot, : len(guesses)] = guesses
        self._table[:, slot] = prompt, base, 0, window, len(guesses)
        self._changed[slot] = True
        self._open += 1

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        good: np.ndarray
        good, news = _kernels.follow(self._known, self._table, self._changed, slots, starts, lengths, tokens)
        if not self._time.is_lookup:
            self._cached += news
        return good

    def close(self, slot: int, finished: bool) -> None:
        if slot >= len(self._changed) or not self._table[_kernels.PROMPT, slot]:
            return
        if not self._time.is_lookup:
            self._cached -= int(self._table[[_kernels.PROMPT, _kernels.BASE], slot].sum())
        self._table[:, slot], self._changed[slot] = 0, False
        self._open -= 1

    def _fit(self, slot: int, length: int) -> None:
        slots, width = self._known.shape
        if slot >= slots:
            self._table, self._changed = enlarged(self._table, 1, 2 * slot), enlarged(self._changed, 0, 2 * slot)
            self._known = enlarged(self._known, 0, 2 * slot)
        if length > width:
            self._known = enlarged(self._known, 1, length)

    # ---- guesses ----

    def extend(self) -> np.ndarray:
        if self._time.is_lookup:
            changed, rows, positions, context = _kernels.look_up(self._known, self._table, self._changed)
        else:
            changed, rows, positions, context = _kernels.draft(self._table, self._changed)
        if rows:
            self._work(rows, positions, context)
        slots: np.ndarray = changed
        return slots

    def _work(self, rows: int, positions: int, context: int) -> None:
        clock, world, prefill = self._clock, self._world, self._to_prefill
        self._to_prefill = 0
        seconds = self._time.forward.seconds(rows, positions, context, prefill)
        begin = clock.now()
        clock.work(seconds + world.python.draft_s(clock.process, rows))
        world.record.span(self._name, "draft", begin, clock.now(), rows, positions)
        world.record.streams(self._name, self._open, self._cached)
        world.python.begin(clock.process)

    def tails(self, slots: np.ndarray) -> Tails:
        bases, lengths, tokens = _kernels.tails(self._known, self._table, slots)
        if self._name in self._world.corrupt:
            tokens = np.array([int(self._random() * 2e9) - 10**9 for _ in range(len(tokens))], np.int32)
        return Tails(bases, lengths, tokens)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.times.sync_s)


class TimedProposer(Proposer):
    """A real lookup over recorded tokens by the product's own proposer, at the durations of a cost model."""

    def __init__(self, inner: Proposer, clock: VirtualClock, world: World, name: str) -> None:
        self.method, self.vocab_size, self.traits = inner.method, inner.vocab_size, inner.traits
        self._inner, self._clock, self._world, self._name = inner, clock, world, name
        self._open: dict[int, None] = {}
        self._time = world.draft_time(inner.method)

    def open(self, slot: int, *arguments: Any) -> None:
        self._inner.open(slot, *arguments)
        self._open[slot] = None
        self._world.record.streams(self._name, len(self._open), 0)  # lookups keep no cache

    def commit(self, *arrays: np.ndarray) -> np.ndarray:
        return self._inner.commit(*arrays)

    def tails(self, slots: np.ndarray) -> Tails:
        return self._inner.tails(slots)

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        self._inner.learn(outputs)

    def forget_history(self) -> None:
        self._inner.forget_history()

    def close(self, slot: int, finished: bool) -> None:
        self._inner.close(slot, finished)
        self._open.pop(slot, None)
        self._world.record.streams(self._name, len(self._open), 0)

    def extend(self) -> np.ndarray:
        clock, world = self._clock, self._world
        world.python.begin(clock.process)  # what the lookup itself takes is what the cost model says
        changed = self._inner.extend()
        if len(changed):
            found = len(self._inner.tails(changed).tokens)
            begin, own_s = clock.now(), world.python.draft_s(clock.process, len(changed))
            clock.work(self._time.forward.seconds(len(changed), found, 0) + own_s)
            world.record.span(self._name, "draft", begin, clock.now(), len(changed), found)
        return changed
