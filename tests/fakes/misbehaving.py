"""Proposers that do everything wrong, for tests of "drafters are only ever a matter of speed"."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.draft.proposer import Proposer
from specactor_ray.table.view import TableView


class Liar(Proposer):
    """A proposer that lies: random tokens, tokens out of range, written past the view's checks; rows that are free."""

    method = "liar"
    vocab_size = None

    def __init__(self, config: Any = None) -> None:
        self._rng = random.Random(1)

    def propose(self, view: TableView, rows: np.ndarray) -> np.ndarray:
        time.sleep(0.005)  # leaves the interpreter to the verifier where both share a process
        for row in rows.tolist():
            self.write(view, row)
        return rows

    def write(self, view: TableView, row: int) -> None:
        tokens = [self._rng.randrange(500) for _ in range(self._rng.choice([0, 1, 5, 3000]))]
        if self._rng.random() < 0.1:
            tokens.append(self._rng.choice([-7, 10**9]))
        put(view, row, 0, tokens)


def put(view: TableView, row: int, place: int, tokens: list[int]) -> None:
    """Write a tail without a look at it."""
    tokens = tokens[-view.window :]
    view.table.tail[view.seat, row, place, : len(tokens)] = tokens
    view.table.length[view.seat, row, place] = len(tokens)


class Forker(Liar):
    """Lies in form: branches that agree with what was committed, and then do not."""

    method = "forker"
    traits = Traits(branches=True)
    vocab, most = 500, 4

    def write(self, view: TableView, row: int) -> None:
        known = view.output(row).tolist()
        for place in range(view.table.length.shape[2]):
            new = [self._rng.randrange(self.vocab) for _ in range(self._rng.randint(1, 6))]
            put(view, row, place, known[: self._rng.randint(0, 3)] + new)


class Crasher(Liar):
    """Lies, and raises every now and then."""

    method = "crasher"

    def propose(self, view: TableView, rows: np.ndarray) -> np.ndarray:
        if self._rng.random() < 0.3:
            raise RuntimeError("a drafter's bug")
        return super().propose(view, rows)
