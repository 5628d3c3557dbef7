"""Proposers that do everything wrong, for tests of "drafters are only ever a matter of speed"."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.draft.proposer import Proposer, Tails


class Liar(Proposer):
    """A proposer that lies: random tokens, tokens out of range, far too long tails, wrong positions."""

    method = "liar"
    vocab_size = None

    def __init__(self, config: Any = None) -> None:
        self._rng = random.Random(1)
        self._known: dict[int, int] = {}

    def open(self, slot: int, request_id: str, prompt: Any, committed: Any, *rest: Any) -> None:
        self._known[slot] = len(committed)

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        self._known.update(zip(slots.tolist(), (starts + lengths).tolist(), strict=True))
        return np.ones(len(slots), np.bool_)

    def extend(self) -> np.ndarray:
        time.sleep(0.005)  # leaves the interpreter to the verifier where both share a process
        return np.array(list(self._known), np.int32)

    def tails(self, slots: np.ndarray) -> Tails:
        bases, tails = zip(*map(self.tail, slots.tolist()), strict=True)
        return Tails(np.array(bases, np.int32), *_ragged(tails))

    def tail(self, slot: int) -> tuple[int, list[int]]:
        base = self._known[slot] + self._rng.choice([0, 0, 0, -1, 3])
        tokens = [self._rng.randrange(500) for _ in range(self._rng.choice([0, 1, 5, 3000]))]
        if self._rng.random() < 0.1:
            tokens.append(-7)
        return base, tokens

    def close(self, slot: int, finished: bool) -> None:
        self._known.pop(slot, None)

    def load_weights(self, version: int, state_dict: Any) -> None:
        pass


class Forker(Liar):
    """Lies in form: branches that agree with what was committed, and then do not."""

    method = "forker"
    traits = Traits(branches=True)
    vocab, most = 500, 4

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._outputs: dict[int, list[int]] = {}

    def open(self, slot: int, request_id: str, prompt: Any, committed: Any, *rest: Any) -> None:
        super().open(slot, request_id, prompt, committed)
        self._outputs[slot] = list(committed)

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        for slot, start, new in zip(slots.tolist(), starts.tolist(), parts, strict=True):
            self._outputs[slot][start:] = new.tolist()
        return super().commit(slots, starts, lengths, tokens)

    def tails(self, slots: np.ndarray) -> Tails:
        counts = np.array([self._rng.randint(1, 1 + self.most) for _ in slots], np.int32)
        bases, tails = [], []
        for slot in np.repeat(slots, counts).tolist():
            output = self._outputs[slot]
            bases.append(self._rng.randint(max(len(output) - 3, 0), len(output)))
            tails.append(self._line(slot, bases[-1])[: self._rng.randrange(7)])
        return Tails(np.array(bases, np.int32), *_ragged(tails), counts)

    def _line(self, slot: int, begin: int) -> list[int]:
        """The output from here on, which soon goes on as it never did."""
        new = [self._rng.randrange(self.vocab) for _ in range(self._rng.randint(1, 6))]
        return self._outputs[slot][begin : begin + self._rng.randint(0, 4)] + new


def _ragged(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int32 lengths, and all values."""
    return np.array(list(map(len, lists)), np.int32), np.array([one for values in lists for one in values], np.int32)


class Crasher(Liar):
    """Lies, and raises every now and then."""

    method = "crasher"

    def extend(self) -> np.ndarray:
        if self._rng.random() < 0.3:
            raise RuntimeError("a drafter's bug")
        return super().extend()


class Flooder(Liar):
    """Never idle: publishes a new tail of thousands of tokens for every request, as fast as it can."""

    method = "flooder"

    def extend(self) -> np.ndarray:
        return np.array(list(self._known), np.int32)

    def tail(self, slot: int) -> tuple[int, list[int]]:
        return self._known[slot], [self._rng.randrange(400) for _ in range(5000)]
