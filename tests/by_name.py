"""Drives a proposer by request ids, one request at a time, as tests are easiest to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specactor_ray.core.ragged import common_prefix
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.proposer import Proposer, packed

_NEVER_OPEN = 10**6


class ByName:
    """A proposer and the slots of its requests; everything else is the proposer's own."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.slots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def open(
        self, name: str, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, window: int
    ) -> None:
        free = (slot for slot in range(len(self.slots) + 1) if slot not in self.slots.values())
        self.slots.setdefault(name, next(free))
        self.proposer.open(self.slots[name], name, prompt, committed, sampling, window)

    def commit(self, name: str, start: int, tokens: Sequence[int]) -> bool:
        (taken,) = self.proposer.commit(*packed([(self.slots.get(name, _NEVER_OPEN), start, tokens)]))
        return bool(taken)

    def extend(self) -> list[str]:
        names = {slot: name for name, slot in self.slots.items()}
        return [names[slot] for slot in self.proposer.extend().tolist()]

    def tail(self, name: str) -> tuple[int, tuple[int, ...]]:
        base, tokens = next(self.proposer.tails(np.array([self.slots[name]], np.int32)).rows())
        return base, tuple(tokens)

    def add_features(self, name: str, begin: int, states: np.ndarray) -> None:
        feed(self.proposer, self.slots[name], begin, states)

    def close(self, name: str, finished: bool = True) -> None:
        self.proposer.close(self.slots.pop(name, _NEVER_OPEN), finished)


def feed(proposer: Proposer, slot: int, begin: int, states: np.ndarray) -> None:
    """Give a request the states of its positions from `begin` on."""
    import torch

    if len(states):
        slots, starts, lengths = np.array([[slot], [begin], [len(states)]], np.int32)
        proposer.add_features(slots, starts, lengths, torch.from_numpy(states))


def extend_fully(drafter: Any) -> None:
    """Until nothing is left to draft."""
    for _ in range(200):
        if not len(drafter.extend()):
            return
    raise AssertionError("extend never came to rest")


def branches_of(drafter: ByName, name: str) -> list[tuple[int, tuple[int, ...]]]:
    """The branches that are published with a tail: where they leave it, and their tokens."""
    (base, main), *others = drafter.tails(np.array([drafter.slots[name]], np.int32)).rows()
    assert all(begin == base for begin, _ in others)
    places = [common_prefix(main, other) for _, other in others]
    return [(at, tuple(other[at:])) for at, (_, other) in zip(places, others, strict=True)]
