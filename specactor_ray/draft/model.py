"""Drafting by models token by token, in batches: `ModelProposer`, the base of `draft_model` and `eagle`; `draft_model`.

`draft_model` is a smaller transformers model with the target's vocabulary. It samples with the target's keyed noise
(same seed, same position): P[match] >= (1 - TV) / (1 + TV) for total variation TV between the two distributions
(Daliri, Musco, Suresh, arXiv 2408.07978); independent draws match with sum p(v) q(v).
"""

from __future__ import annotations

import abc
from typing import Self

import numpy as np
import torch

from specactor_ray.config.methods import BUILT_IN, DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.ragged import places
from specactor_ray.draft.burst import LONGEST, Bursts, Runner
from specactor_ray.draft.chains import FREE, MAIN, Chains, compile_kernels, ranges_of
from specactor_ray.draft.proposer import STEP_TOKENS
from specactor_ray.draft.slots import SlotProposer
from specactor_ray.models.cache_size import device_bytes, drafter_cache_bytes
from specactor_ray.models.captured import CudaCapturer, capturer_for
from specactor_ray.models.layers import sleep, wake
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling.candidates import MOST, Candidates, candidates
from specactor_ray.sampling.keyed import warm_up
from specactor_ray.sampling.rules import Rules

_MOST_OF_A_COMMIT = 32
"""Tokens up to which a backlog is a commit, and not a prompt."""
_READ_PER_TOKEN = 8
"""Tokens of a request for each token of room with which it is taken on, beside a window: if it has to give up its pages
again, it has read no more than this for each token that it got."""


class ModelProposer(SlotProposer):
    """Drafts by forwards of several requests: cache rows of the requests, the loop over forwards, sampling.

    It owns the `runner`. `capturer`: of bursts; None: CUDA graphs on GPUs, and no capture on CPUs.
    """

    _by_slot = (*SlotProposer._by_slot, "_origins")

    def __init__(
        self,
        runner: Runner,
        max_batch: int = 64,
        branches: int = 0,
        capturer: CudaCapturer | None = None,
    ) -> None:
        super().__init__(max_batch, branches)
        cache = runner.cache
        self._runner, self._cache, self._ids = runner, cache, runner.ids
        self.vocab_size: int | None = runner.vocab_size
        self.max_len = min(runner.max_positions, cache.slots)
        self._rules = Rules(0, cache.device)
        """Sampling rules by slot; positions are those of the lines."""
        self._origins = np.zeros(0, np.int64)
        """int64 `(slots,)`: index in the line of the token that the first entry of the request's row has read."""
        self._most = MOST if branches else 1
        """Number of candidates per draw."""
        warm_up(cache.device, runner.dtype, self._most)
        compile_kernels(branches=True)
        self._bursts: Bursts | None = None
        if (capturer := capturer or capturer_for(cache.device)) is not None:
            rows = max_batch * (1 + branches)
            self._bursts = Bursts(runner, capturer, rows, STEP_TOKENS, self.max_len, self._most)

    @property
    def _tips(self) -> np.ndarray:
        """int32 `(slots,)`: index in the line at which main chains are extended, see `BranchTable.append`."""
        return self.mirrors.ends

    @abc.abstractmethod
    def _ready(self) -> Chains:
        """Chains for which a forward can draft: main chains before branches, the most urgent ones first."""

    @abc.abstractmethod
    def _run(
        self, chains: Chains, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        """Read `counts` tokens of each chain into its row of the cache. Returns the logits of the next tokens for
        chains that are complete then, bool `(n,)`."""

    @abc.abstractmethod
    def _begin(self, chains: Chains, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Sequence positions of the `counts` tokens that each chain reads next, int64, and their features."""

    def _end(self, chains: Chains, shares: np.ndarray, outputs: torch.Tensor) -> None:
        """Keep the outputs `(steps, n, feature_size)` of as many steps of each chain as its share, int64 `(n,)`."""

    def extend(self) -> np.ndarray:
        changed, self.drafted, rows, alike = np.zeros(len(self._placed), np.bool_), 0, 0, True
        while not changed.any() or (alike and self.drafted < self.burst):
            chains = self._ready()
            silent = self._unanswered.copy()
            silent[chains.slots] = False  # other slots have no more guesses
            changed |= silent
            if not len(chains.slots):
                break
            count, steps = self._forward(chains, max(self.burst - self.drafted, 1))
            for slots in steps:
                changed[slots] = True
                rows += count
                self.drafted += len(slots) > 0
                alike &= count > 0 and len(slots) > 0
        self.rows_drafted = round(rows / self.drafted) if alike and self.drafted else 0
        self._unanswered[changed] = False
        return np.flatnonzero(changed).astype(np.int32)

    def sleep(self) -> None:
        for slot in np.flatnonzero(self._placed).tolist():
            self._give_up(slot)  # no close has arrived yet
        self._waiting[:] = False
        if self._bursts is not None:
            self._bursts.release()
        sleep(self._runner.model, self._cache)

    def wake(self) -> None:
        wake(self._runner.model, self._cache)
        if self._bursts is not None:
            self._bursts.prepare()

    def _plan(self, reading: np.ndarray, ahead: np.ndarray, backlogs: np.ndarray) -> Chains:
        """See `BranchTable.plan`."""
        return self.branches.plan(self._tips, reading, ahead, backlogs, self.budget, self.max_len, self.forward_s)

    def _forward(self, chains: Chains, most: int) -> tuple[int, list[np.ndarray]]:
        """Draft a token for each of the chains that fit, or up to `most` of them in a burst. Returns the number of rows
        if each of them reads one token, else 0; and for each forward the slots with changed or ended tails."""
        chains, rows = self._reserve(chains, self._rows_of(chains))
        if not len(rows):
            return 0, [chains.slots]
        tokens, ends, complete = self.branches.read(self._tips, self._origins, self._cache.lengths, chains, rows)
        counts, bursts = chains.counts.astype(np.int64), self._bursts
        if bursts is not None and complete.all() and (first := bursts.find(counts)) is not None:
            room = np.minimum(self.mirrors.limits, self.max_len)[chains.slots] - ends
            shares = np.clip(room, 1, min(most, LONGEST))
            shares[~self._cache.reserve_rows(rows, self._cache.lengths[rows] + counts - 1 + shares)] = 1
            places, features = self._begin(chains, rows, counts)
            rules = self._rules.table[chains.slots]
            found = bursts.run(first, rows, counts, tokens, places, ends, shares, rules, features)
            return len(rows), self._append_all(chains, shares, *found)
        logits = self._run(chains, rows, counts, tokens, complete)
        if not complete.all():
            chains, ends = chains.at(complete), ends[complete]
        slots = chains.slots.astype(np.int64)
        drawn = candidates(logits, ends, slots, self._rules, self._most, ids=self._ids)
        return len(rows) if len(tokens) == len(rows) else 0, [self._append(chains, *drawn)]

    def _append_all(
        self, chains: Chains, shares: np.ndarray, steps: list[Candidates], outputs: torch.Tensor
    ) -> list[np.ndarray]:
        """Append the draws of a burst, as many of each chain as its share, see `_append` and `_end`."""
        self._end(chains, shares, outputs)
        changed, drafts = list[np.ndarray](), np.ones(len(shares), np.bool_)
        for step, (tokens, gaps) in enumerate(steps):
            drafts &= shares > step
            changed.append(self._append(chains.at(drafts), tokens[drafts], gaps[drafts]))
            drafts &= tokens[:, 0] >= 0
        return changed

    def _enter(self, slot: int, late: bool) -> bool:
        mirrors, cache, known = self.mirrors, self._cache, int(self.mirrors.known[slot])
        if known >= self.max_len:
            return False
        tokens = min(
            known + int(mirrors.windows[slot]) + known // _READ_PER_TOKEN, int(mirrors.lasts[slot]), self.max_len
        )
        row = cache.open(tokens)
        if row is None and tokens <= cache.slots_beside(self._rows[self._placed]):
            self._drop_branches()
            row = cache.open(tokens)
        if row is None:
            return False
        self._rows[slot] = row
        self._rules.write([slot], [self.samplings[slot]], [-int(self.mirrors.prompts[slot])])
        return True

    def _leave(self, slot: int) -> None:
        super()._leave(slot)
        self._free(self._rows[[slot]])

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        for slot in slots[self._placed[slots] & (self.mirrors.known[slots] >= self.max_len)].tolist():
            self._give_up(slot)  # others need its pages

    def _free(self, rows: np.ndarray) -> None:
        self._cache.free_rows(rows)

    def _drop_branches(self) -> None:
        """Free the pages of all branches for main chains."""
        self._free(self.branches.close_all())

    def _rows_of(self, chains: Chains) -> np.ndarray:
        """int64 `(n,)`: rows of the cache; the row of a new branch is forked from its main chain's."""
        slots, numbers, begins, _ = chains
        rows: np.ndarray = self._rows[slots]
        if not len(rows) or numbers[-1] == MAIN:  # branches come last
            return rows
        new, held = np.flatnonzero(begins != FREE), self.branches.rows
        held[slots[new], numbers[new]] = self._cache.fork(rows[new], begins[new] - self._origins[slots[new]])
        return np.where(numbers == MAIN, rows, held[slots, numbers])

    def _reserve(self, chains: Chains, rows: np.ndarray) -> tuple[Chains, np.ndarray]:
        """Make room in the cache for the tokens that each chain reads. If a main chain has no room, all branches are
        given up; chains without room are given up, too, and the request waits for pages. Returns the chains that fit
        into one forward, and their rows."""
        counts = chains.counts
        if counts.sum() > STEP_TOKENS:
            counts = np.minimum(counts, STEP_TOKENS - np.cumsum(counts) + counts).astype(np.int32)
            if self._bursts is not None:  # in a captured step rows read all they have: a commit that does not fit waits
                counts[(counts < chains.counts) & (chains.counts <= _MOST_OF_A_COMMIT)] = 0
            chains, rows = chains._replace(counts=counts).at(counts > 0), rows[counts > 0]  # the first ones
        ends = self._cache.lengths[rows] + chains.counts
        fits = self._cache.reserve_rows(rows, ends)
        if fits.all():
            return chains, rows
        for i in np.flatnonzero(~fits).tolist():
            if chains.numbers[i] == MAIN:
                self._drop_branches()
            if chains.numbers[i] != MAIN or not self._cache.reserve(int(rows[i]), int(ends[i])):
                self._give_up_chain(int(chains.slots[i]), int(chains.numbers[i]))
                self._waiting[chains.slots[i]] |= chains.numbers[i] == MAIN
        left, branch = self._placed[chains.slots], np.flatnonzero(chains.numbers != MAIN)
        left[branch] = self.branches.ats[chains.slots[branch], chains.numbers[branch]] != FREE
        return chains.at(left), rows[left]

    def _give_up_chain(self, slot: int, number: int) -> None:
        """Give up a branch, or a main chain together with its request."""
        if number == MAIN:
            self._give_up(slot)
        elif self.branches.ats[slot, number] != FREE:  # else it was dropped with its main chain
            self._free(self.branches.rows[slot, [number]])
            self.branches.close(slot, number)

    def _append(self, chains: Chains, tokens: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """Append the draws of each chain, see `Candidates`; a chain without a token is given up. Returns int32: slots
        with changed tails, and slots that were given up."""
        slots, numbers = chains.slots, chains.numbers
        for i in (tokens[:, 0] < 0).nonzero()[0].tolist():
            if numbers[i] == MAIN:  # NaN: a whole window is wrong
                self.judged[0] += self.mirrors.windows[slots[i]]
            self._give_up_chain(int(slots[i]), int(numbers[i]))
        changed: np.ndarray = slots[self.branches.append(self._tips, chains, tokens, ranges_of(gaps))]
        return changed


class DraftModelProposer(ModelProposer):
    """`draft_model`: drafts with a `RaggedModel`. Other arguments are those of `ModelProposer`."""

    method = "draft_model"
    traits = BUILT_IN[method].traits
    _runner: RaggedModel

    @classmethod
    def from_config(cls, config: DrafterSpec, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        trust, longest = config.trust_remote_code, target.max_model_len
        model = load_model(
            config.model, dtype=config.dtype, device=device, trust_remote_code=trust, max_model_len=longest
        )
        total = None if device == "cpu" else device_bytes(device)
        cache = drafter_cache_bytes(config, model.config.get_text_config(), model.dtype.itemsize, total)
        return cls(RaggedModel(model, cache), config.max_batch, config.branches)

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        super()._advance(slots, same)
        placed = self._placed[slots]
        np.minimum.at(self._cache.lengths, self._rows[slots[placed]], same[placed])

    def _ready(self) -> Chains:
        backlogs = self.mirrors.ends - self._cache.lengths[self._rows]
        reading = backlogs > 1
        return self._plan(self._placed & reading, self._placed & ~reading, backlogs)

    def _run(
        self, chains: Chains, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        return self._runner.forward(rows, counts, tokens, complete.astype(np.int64))

    def _begin(self, chains: Chains, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        return places(self._cache.lengths[rows], counts), torch.empty(int(counts.sum()), 0)
