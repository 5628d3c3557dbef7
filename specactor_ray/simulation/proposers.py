"""Proposers of the virtual cluster, which take virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specactor_ray.config.methods import Traits
from specactor_ray.core.ragged import enlarged
from specactor_ray.draft.chains import MAIN, RANKS, Chains, compile_kernels
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.simulation import _kernels
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.text import guesses
from specactor_ray.simulation.world import World

_PAGE = 256
"""Tokens per page of a GPU's cache."""


class SimulatedProposer(SlotProposer):
    """Drafts the guesses of the world's text for its method.

    A forward drafts one token for every chain; a lookup fills all windows at once, as far as it finds guesses. Tokens
    that a request's cache lacks are prefilled in the next forward. `max_batch`: most requests drafted for at once;
    `branches`: most branches of a request."""

    vocab_size: int
    _by_slot = (*SlotProposer._by_slot, "_anchors", "_known", "_ranks")

    def __init__(self, method: str, clock: VirtualClock, world: World, max_batch: int = 64, branches: int = 0) -> None:
        self._time = world.draft_time(method)
        super().__init__(max_batch, 0 if self._time.is_lookup else branches)
        compile_kernels(branches=True)
        self.method, self.vocab_size = method, world.text.vocab_size
        self._clock, self._world = clock, world
        self.traits = Traits(looks_up=self._time.is_lookup, branches=branches > 0)
        self._anchors = np.zeros(0, np.int64)
        """int64 `(slots,)`: for an EAGLE head, number of tokens of main chains in the cache that are based on the
        target's states. `_rows`, and `rows` of the branches, are numbers of tokens in the cache."""
        self._known = np.zeros((0, 0), np.int32)
        """int32 `(slots, positions)`: right output tokens; for a lookup, its guesses."""
        self._ranks = np.zeros((0, 2, 0), np.int8)
        """int8 `(slots, 2, positions)`: see `Text.ranks`."""

    # ---- messages of verifiers ----

    def _enter(self, slot: int, late: bool) -> bool:
        sampling, text = self.samplings[slot], self._world.text
        version = self._world.version_of.get(sampling.seed, 0)
        ranks, output = text.ranks(self.method, sampling, version), text.output(sampling, version)
        width = len(output) + int(self.mirrors.windows[slot])
        if width > self._known.shape[1]:
            self._known, self._ranks = enlarged(self._known, 1, width), enlarged(self._ranks, 2, width)
        known = guesses(ranks[0], output, self.vocab_size) if self._time.is_lookup else output
        self._known[slot], self._ranks[slot] = 0, _kernels.NO_GUESS
        self._rows[slot] = self._anchors[slot] = 0
        self._known[slot, : len(output)], self._ranks[slot, :, : len(output)] = known, ranks
        return True

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        np.minimum.at(self._rows, slots, same if self._time.fusion is None else self._anchors[slots])

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.sync_s)

    # ---- guesses ----

    def extend(self) -> np.ndarray:
        self.rows_drafted = 0
        changed = self._look_up() if self._time.is_lookup else self._draft(self._ready())
        changed |= self._unanswered
        self._unanswered[:] = False
        slots: np.ndarray = np.flatnonzero(changed).astype(np.int32)
        return slots

    def _look_up(self) -> np.ndarray:
        """Fill the windows after new commits. Returns bool `(slots,)`: slots with changed tails."""
        mirrors, slots = self.mirrors, np.flatnonzero(self._unanswered & self._placed)
        limits = mirrors.limits[slots]
        found = _kernels.look_up(self._known, mirrors.lines, mirrors.prompts, mirrors.ends, slots, limits)
        if len(slots):
            self._work(self._time.forward.seconds(len(slots), found, 0), len(slots))
        return np.zeros(len(self._placed), np.bool_)

    def _ready(self) -> Chains:
        mirrors, placed = self.mirrors, self._placed
        reads = _kernels.reads(placed, self._rows, mirrors.arrays)
        none = np.zeros((2, len(placed)), np.int64)
        budget = 0 if reads else self.budget
        return self.branches.plan(mirrors.ends, none[0] > 0, placed, none[1], budget, forward_s=self.forward_s)

    def _draft(self, chains: Chains) -> np.ndarray:
        """Run one forward: a token for each chain. Returns bool `(slots,)`: slots with changed tails."""
        mirrors, table, changed = self.mirrors, self.branches, np.zeros(len(self._placed), np.bool_)
        if not len(chains.slots):
            return changed
        at = (self._known, self._ranks, self._rows, mirrors.arrays, table.arrays, chains.slots, chains.numbers)
        ends, prefill, tokens, gaps = _kernels.draft(*at, self.vocab_size, 1 + RANKS)
        table.append(mirrors.ends, chains, tokens, gaps)
        changed[chains.slots] = True
        common = mirrors.known // _PAGE * _PAGE  # of all chains of a request: each branch begins past the known tokens
        shared = int((ends - common[chains.slots]).sum() + common[np.unique(chains.slots)].sum())
        seconds = 0.0
        if self._time.fusion is not None:
            mains = chains.slots[chains.numbers == MAIN]
            seconds = self._time.fusion(int((mirrors.known - self._anchors)[mains].sum()))
            self._anchors[mains] = mirrors.known[mains]
        seconds += self._time.seconds(len(ends), int(ends.sum()), shared, prefill)
        self.rows_drafted = 0 if prefill else len(ends)
        self._work(seconds, len(ends))
        return changed

    def _work(self, seconds: float, rows: int) -> None:
        self._clock.work(seconds + rows * (self._world.python.draft_row_us / 1e6))
