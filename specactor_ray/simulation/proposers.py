"""Proposers of the virtual cluster, which take virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.core.ragged import enlarged
from specactor_ray.draft.chains import MAIN, RANKS, Chains, compile_kernels
from specactor_ray.draft.rows import BatchProposer
from specactor_ray.simulation import _kernels
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.world import World, guesses

_PAGE = 256
"""Tokens per page of a GPU's cache."""


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
        common = self._known // _PAGE * _PAGE  # of all chains of a request: each branch begins past the known tokens
        shared = int((ends - common[chains.rows]).sum() + common[np.unique(chains.rows)].sum())
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
