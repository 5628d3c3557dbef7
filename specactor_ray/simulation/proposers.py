"""Drafters of the virtual cluster: proposers that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specactor_ray.draft.proposer import Proposer, Tails, Traits
from specactor_ray.messages import SamplingParams
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.text import NO_GUESS
from specactor_ray.simulation.world import World

_FIRST_SLOTS = 64


class SimulatedProposer(Proposer):
    """Guesses what the world's text says that its method guesses.

    A forward drafts one token for every request that has room in its window; a lookup fills all windows at once, as far
    as it finds something. What a request's cache lacks is prefilled in the next forward.

    Each request has a slot in arrays. `ahead` holds what the method says of the positions behind the committed ones;
    the tail is the part of it that has been drafted.

    Args:
        name: Its actor.
        method: The draft method it stands for.
        clock: Time of its process.
        world: Text and durations.
        random: A number in [0, 1), for what corrupt drafters say.
    """

    vocab_size: int | None

    def __init__(self, name: str, method: str, clock: VirtualClock, world: World, random: Callable[[], float]) -> None:
        self.method, self.vocab_size = method, world.text.vocab_size
        self._name, self._clock, self._world, self._random = name, clock, world, random
        self._time = world.draft_time(method)
        self.traits = Traits(looks_up=self._time.is_lookup)
        self._guesses: dict[int, np.ndarray] = {}
        """Open slot → the guess at each position of the output."""
        self._prompt, self._base, self._length, self._window = np.zeros((4, _FIRST_SLOTS), np.int32)
        """Tokens of prompt, committed output, and tail; most of the tail, 0 where nothing is open."""
        self._ahead = np.zeros((_FIRST_SLOTS, 0), np.int32)
        self._changed, self._open = np.zeros((2, _FIRST_SLOTS), np.bool_)
        self._to_prefill = 0
        self._cached = 0
        """Tokens of all requests that it follows; lookups keep none."""

    # ---- what verifiers say ----

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
        while slot >= len(self._open):
            self._grow()
        prompt, base, text = len(prompt_token_ids), len(committed_token_ids), self._world.text
        guesses = text.guesses(self.method, sampling, self._world.version_of.get(sampling.seed, 0))
        self._guesses[slot] = guesses if self._time.is_lookup else np.maximum(guesses, 0)
        self._prompt[slot], self._base[slot] = prompt, base
        self._length[slot], self._window[slot], self._changed[slot], self._open[slot] = 0, window, True, True
        self._widen(window)
        self._look_ahead([slot])
        if not self._time.is_lookup:
            self._to_prefill += prompt + base
            self._cached += prompt + base

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        inside = np.minimum(slots, len(self._open) - 1)
        overlap, ends = self._base[inside] - starts, np.cumsum(lengths)
        good = (slots == inside) & self._open[inside] & (overlap >= 0)
        slots, overlap, ends, lengths = (array[good] for array in (slots, overlap, ends, lengths))
        fresh = np.maximum(lengths - overlap, 0)
        self._widen(fresh.max(initial=0))
        number = np.arange(fresh.max(initial=0))
        told = tokens.take((ends - fresh)[:, None] + number, mode="clip") if len(number) else number
        tested = number < np.minimum(fresh, self._length[slots])[:, None]
        agrees = ~(tested & (told != self._ahead[slots, : len(number)])).any(axis=1)
        self._length[slots] = np.where(agrees, np.maximum(self._length[slots] - fresh, 0), 0)
        self._base[slots] += fresh
        self._look_ahead(slots.tolist())
        self._changed[slots] = True
        if not self._time.is_lookup:
            self._cached += int(fresh.sum())
        return good

    def close(self, slot: int, finished: bool) -> None:
        if self._guesses.pop(slot, None) is None:
            return
        if not self._time.is_lookup:
            self._cached -= int(self._prompt[slot] + self._base[slot])
        self._window[slot] = self._length[slot] = 0
        self._changed[slot] = self._open[slot] = False

    def _look_ahead(self, slots: Sequence[int]) -> None:
        width = self._ahead.shape[1]
        for slot, base in zip(slots, self._base[slots].tolist(), strict=True):
            guesses = self._guesses[slot][base : base + width]
            self._ahead[slot, : len(guesses)] = guesses
            if len(guesses) < width:
                self._ahead[slot, len(guesses) :] = 0  # past the end: nobody will compare it

    def _widen(self, width: int) -> None:
        if width > self._ahead.shape[1]:
            self._ahead = np.zeros((len(self._open), width), np.int32)
            self._look_ahead(list(self._guesses))

    def _grow(self) -> None:
        for name in ("_prompt", "_base", "_length", "_window", "_ahead", "_changed", "_open"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))

    # ---- guesses ----

    def extend(self) -> np.ndarray:
        if self._time.is_lookup:
            self._look_up(np.flatnonzero(self._changed))
        else:
            self._forward(np.flatnonzero(self._length < self._window))
        changed = np.flatnonzero(self._changed).astype(np.int32)
        self._changed[:] = False
        return changed

    def _forward(self, slots: np.ndarray) -> None:
        if len(slots):
            context = int(self._prompt[slots].sum() + self._base[slots].sum())
            self._work(len(slots), len(slots), context)
            self._length[slots] += 1
            self._changed[slots] = True

    def _look_up(self, slots: np.ndarray) -> None:
        if len(slots):
            nothing = np.append(self._ahead[slots] == NO_GUESS, np.ones((len(slots), 1), np.bool_), axis=1)
            before = self._length[slots]
            self._length[slots] = np.maximum(before, np.minimum(nothing.argmax(axis=1), self._window[slots]))
            self._work(len(slots), int((self._length[slots] - before).sum()), 0)

    def _work(self, rows: int, positions: int, context: int) -> None:
        clock, world, prefill = self._clock, self._world, self._to_prefill
        self._to_prefill = 0
        seconds = self._time.forward.seconds(rows, positions, context, prefill)
        begin = clock.now()
        clock.work(seconds + world.python.draft_s(clock.process, rows))
        world.record.span(self._name, "draft", begin, clock.now(), rows, positions)
        world.record.streams(self._name, len(self._guesses), self._cached)
        world.python.begin(clock.process)

    def tails(self, slots: np.ndarray) -> Tails:
        lengths, ahead = self._length[slots], self._ahead[slots]
        tokens = ahead[np.arange(ahead.shape[1]) < lengths[:, None]]
        if self._name in self._world.corrupt:
            tokens = np.array([int(self._random() * 2e9) - 10**9 for _ in range(len(tokens))], np.int32)
        return Tails(self._base[slots], lengths, tokens)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.times.sync_s)


class TimedProposer(Proposer):
    """A real lookup over recorded tokens, which takes as long as a cost model says.

    Args:
        inner: The product's own proposer.
        clock: Time of its process.
        world: Durations.
        name: Its actor.
    """

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
