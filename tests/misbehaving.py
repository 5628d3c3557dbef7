"""Proposers that do everything wrong, for tests of "drafters are only ever a matter of speed"."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from specactor_ray.drafters.base import RowProposer
from specactor_ray.messages import SamplingParams


class Liar(RowProposer):
    """A proposer that lies: random tokens, tokens out of range, far too long tails, wrong positions."""

    method = "liar"
    vocab_size = None

    def __init__(self, config: Any = None) -> None:
        self._rng = random.Random(1)
        self._known: dict[str, int] = {}

    def open(self, request_id: str, prompt: Any, committed: Any, sampling: SamplingParams, window: int) -> None:
        self._known[request_id] = len(committed)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        if request_id not in self._known:
            return False
        self._known[request_id] = start + len(token_ids)
        return True

    def extend(self) -> list[str]:
        time.sleep(0.005)  # leaves the interpreter to the verifier where both share a process
        return list(self._known)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        base = self._known[request_id] + self._rng.choice([0, 0, 0, -1, 3])
        tokens = [self._rng.randrange(500) for _ in range(self._rng.choice([0, 1, 5, 3000]))]
        if self._rng.random() < 0.1:
            tokens.append(-7)
        return base, tuple(tokens)

    def pending(self, request_id: str) -> bool:
        return self._rng.random() < 0.5

    def close(self, request_id: str, finished: bool = True) -> None:
        self._known.pop(request_id, None)

    def load_weights(self, version: int, state_dict: Any) -> None:
        pass


class Sluggard(Liar):
    """Drafts nothing, and holds up its verifier after every token."""

    method = "sluggard"

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        time.sleep(0.03)
        return super().commit(request_id, start, token_ids)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        return self._known[request_id], ()


class Crasher(Liar):
    """Lies, and raises every now and then."""

    method = "crasher"

    def extend(self) -> list[str]:
        if self._rng.random() < 0.3:
            raise RuntimeError("a drafter's bug")
        return super().extend()


class Flooder(Liar):
    """Never idle: publishes a new tail of thousands of tokens for every request, as fast as it can."""

    method = "flooder"

    def extend(self) -> list[str]:
        return list(self._known)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        return self._known[request_id], tuple(self._rng.randrange(400) for _ in range(5000))
