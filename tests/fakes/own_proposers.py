"""Proposers of a user's own, one of each kind, and some that contradict themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.rows import RowProposer
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import States


class Model(RowProposer):
    """Guesses that the output goes on as after the first place of its last token; one token a call, as a model does."""

    method, vocab_size = "own", None
    step = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config.max_batch or 64)

    def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> list[int]:
        known = [*prompt.tolist(), *output.tolist()]
        after = known.index(known[-1]) + 1
        return known[after : after + self.step]


class Lookup(Model):
    """The same, whole windows at once."""

    traits = Traits(looks_up=True)
    step = 99


class OfTable(Proposer):
    """The same for all requests in one call, without a base class that follows them."""

    method, vocab_size = "own", None
    traits = Traits(looks_up=True)

    def propose(self, view: TableView, rows: np.ndarray) -> np.ndarray:
        for row in rows:
            known = [*view.prompt(row).tolist(), *view.output(row).tolist()]
            view.write(row, known[known.index(known[-1]) + 1 :])
        return rows


class Learner(Model):
    """Keeps whole outputs."""

    traits = Traits(keeps_history=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.learned: list[list[int]] = []

    def finish(self, prompt: np.ndarray, output: np.ndarray) -> None:
        self.learned.append(output.tolist())

    def forget_history(self) -> None:
        self.learned.clear()


class Reader(Model):
    """Notes which states it was sent."""

    traits = Traits(reads_features=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spans: dict[str, list[tuple[int, Any]]] = {}

    def add_features(self, *arrays: Any) -> None:
        for row, begin, states in States(*arrays).split():
            self.spans.setdefault(self.view.request_id(row), []).append((begin, states))


class Noisy(DraftModelProposer):
    """The package's own, under another name."""


class Deaf(Model):
    traits = Traits(reads_features=True)


class SecretReader(Model):
    def add_features(self, *arrays: Any) -> None: ...


class SecretLearner(Model):
    def forget_history(self) -> None: ...


class Vague(Model):
    traits = {"looks_up": True}  # type: ignore[assignment]


class Unfinished(RowProposer):
    method, vocab_size = "own", None


class Nameless(RowProposer):
    vocab_size = None

    def __init__(self, config: Any) -> None:
        super().__init__()

    def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> list[int]:
        return []


class Hollow(Model):
    def __init__(self, config: Any) -> None: ...


class Broken(Model):
    def __init__(self, config: Any) -> None:
        raise RuntimeError("no luck")


class Nothing(Model):
    @classmethod
    def from_config(cls, *_: Any) -> None:  # type: ignore[override]
        return None


class Raises(Model):
    def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> list[int]:
        raise ValueError("no guess")
