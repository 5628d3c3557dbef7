"""Drives a proposer by request ids, one request at a time, as tests are easiest to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specactor_ray.core.ragged import common_prefix
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.rows import BatchProposer
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import FinishedOutput, States

WINDOW = 16
"""Most tokens of a tail, of a table without a smaller one."""


class ByName:
    """A proposer over a table; everything else is the proposer's own."""

    def __init__(self, proposer: Proposer, window: int = WINDOW) -> None:
        self.proposer = proposer
        branches = getattr(getattr(proposer, "branches", None), "most", 0)
        self.table = RequestTable(window, branches)
        self.view = TableView(self.table, 0, window)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    @property
    def slots(self) -> dict[str, int]:
        return self.table.row_of

    def open(
        self, name: str, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, window: int
    ) -> None:
        if name in self.slots:
            self.view.forget(self.slots[name])
            self.table.close(self.slots[name])
        if window > self.table.window:
            self.table.fit_tails(window, self.table.length.shape[2] - 1)
        self.view.window = window
        self.table.open(TargetRequest(name, tuple(prompt), sampling, tuple(committed)))
        self.follow()

    @property
    def rows(self) -> np.ndarray:
        return np.array(sorted(self.slots.values()), np.int32)

    def follow(self) -> None:
        """Let the proposer take what has happened, as at the beginning of a call."""
        if isinstance(self.proposer, BatchProposer):
            self.proposer.view = self.view
            self.proposer._follow(self.rows)

    def commit(self, name: str, start: int, tokens: Sequence[int]) -> bool:
        arrays = np.array([[self.slots.get(name, 0)], [start], [len(tokens)]], np.int32)
        (taken,) = self.table.follow(*arrays, np.array(tokens, np.int32)) if name in self.slots else (False,)
        self.follow()
        return bool(taken) and self.slots[name] not in self.view.lost

    def propose(self) -> np.ndarray:
        return self.proposer.propose(self.view, self.rows)

    def extend(self) -> list[str]:
        return [self.table.requests[row].request_id for row in self.propose().tolist()]

    def tail(self, name: str) -> tuple[int, tuple[int, ...]]:
        row = self.slots[name]
        return int(self.table.committed[row]), tuple(self.view.tail(row).tolist())

    def add_features(self, name: str, begin: int, states: np.ndarray) -> None:
        feed(self.view, self.slots[name], begin, states)

    def close(self, name: str, finished: bool = True) -> None:
        row = self.slots.get(name)
        if row is None:
            return
        if finished and self.proposer.traits.keeps_history:
            prompt, output = self.view.prompt(row), self.view.output(row)
            self.proposer.learn([FinishedOutput(name, tuple(prompt.tolist()), output.copy())])
        self.view.forget(row)
        self.table.close(row)
        self.follow()


def feed(view: TableView, row: int, begin: int, states: np.ndarray) -> None:
    """Give a request the states of its positions from `begin` on, at the next call."""
    import torch

    if len(states):
        rows, starts, lengths = np.array([[row], [begin], [len(states)]], np.int32)
        view.states.append(States(rows, starts, lengths, torch.from_numpy(states)))


def extend_fully(drafter: Any) -> None:
    """Until nothing is left to draft."""
    for _ in range(200):
        if not len(drafter.extend()):
            return
    raise AssertionError("extend never came to rest")


def branches_of(drafter: ByName, name: str) -> list[tuple[int, tuple[int, ...]]]:
    """The branches that are published with a tail: where they leave it, and their tokens."""
    _, lengths, tokens = drafter.table.tails(0, np.array([drafter.slots[name]], np.int32))
    main, *others = (part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1]))
    places = [common_prefix(main, other) for other in others]
    return [(at, tuple(other[at:])) for at, other in zip(places, others, strict=True)]
