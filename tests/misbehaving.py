"""Proposers that do everything wrong, for tests of "drafters are only ever a matter of speed"."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

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
        lengths = np.array([len(tail) for tail in tails], np.int32)
        return Tails(
            np.array(bases, np.int32), lengths, np.array([token for tail in tails for token in tail], np.int32)
        )

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


class Sluggard(Liar):
    """Drafts nothing, and holds up its verifier after every token."""

    method = "sluggard"

    def commit(self, slots: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        time.sleep(0.03 * len(slots))
        return super().commit(slots, *arrays)

    def tail(self, slot: int) -> tuple[int, list[int]]:
        return self._known[slot], []


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
