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
from specactor_ray.draft.rows import BatchProposer
from specactor_ray.models.captured import CudaCapturer, capturer_for
from specactor_ray.models.layers import sleep, wake
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.shapes import GIB
from specactor_ray.sampling.candidates import MOST, Candidates, candidates
from specactor_ray.sampling.keyed import warm_up
from specactor_ray.sampling.rules import Rules

_MOST_OF_A_COMMIT = 32
"""Tokens up to which a backlog is a commit, and not a prompt."""
_READ_PER_TOKEN = 8
"""Tokens of a request for each token of room with which it is taken on, beside a window: if it has to give up its pages
again, it has read no more than this for each token that it got."""


class ModelProposer(BatchProposer):
    """Drafts by forwards of several requests: cache rows of the requests, the loop over forwards, sampling.

    It owns the `runner`. `capturer`: of bursts; None: CUDA graphs on GPUs, and no capture on CPUs.
    """

    _by_row = (*BatchProposer._by_row, "_origins")

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
        """Sampling rules by row; positions are those of the lines."""
        self._origins = np.zeros(0, np.int64)
        """int64 `(rows,)`: index in the line of the token that the first entry of the request in the cache has read."""
        self._most = MOST if branches else 1
        """Number of candidates per draw."""
        warm_up(cache.device, runner.dtype, self._most)
        compile_kernels()
        self._bursts: Bursts | None = None
        if (capturer := capturer or capturer_for(cache.device)) is not None:
            rows = max_batch * (1 + branches)
            self._bursts = Bursts(runner, capturer, rows, STEP_TOKENS, self.max_len, self._most)

    @property
    def _tips(self) -> np.ndarray:
        """int32 `(rows,)`: index in the line at which main chains are extended, see `BranchTable.append`."""
        return self.view.ends

    @abc.abstractmethod
    def _ready(self) -> Chains:
        """Chains for which a forward can draft: main chains before branches, the most urgent ones first."""

    @abc.abstractmethod
    def _run(
        self, chains: Chains, held: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        """Read `counts` tokens of each chain into `held`, its row of the cache. Returns the logits of the next tokens
        for chains that are complete then, bool `(n,)`."""

    @abc.abstractmethod
    def _begin(self, chains: Chains, held: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Sequence positions of the `counts` tokens that each chain reads next, int64, and their features."""

    def _end(self, chains: Chains, shares: np.ndarray, outputs: torch.Tensor) -> None:
        """Keep the outputs `(steps, n, feature_size)` of as many steps of each chain as its share, int64 `(n,)`."""

    def extend(self) -> np.ndarray:
        changed, self.drafted, count, alike = np.zeros(len(self._placed), np.bool_), 0, 0, True
        while not changed.any() or (alike and self.drafted < self.burst):
            chains = self._ready()
            silent = self._unanswered.copy()
            silent[chains.rows] = False  # other rows have no more guesses
            changed |= silent
            if not len(chains.rows):
                break
            size, steps = self._forward(chains, max(self.burst - self.drafted, 1))
            for rows in steps:
                changed[rows] = True
                count += size
                self.drafted += len(rows) > 0
                alike &= size > 0 and len(rows) > 0
        self.rows_drafted = round(count / self.drafted) if alike and self.drafted else 0
        self._unanswered[changed] = False
        return np.flatnonzero(changed).astype(np.int32)

    def sleep(self) -> None:
        for row in np.flatnonzero(self._placed).tolist():
            self._give_up(row)  # its end is not known yet
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
        limits = self.budget, self.max_len, self.forward_s
        return self.branches.plan(self.view, self._tips, reading, ahead, backlogs, *limits)

    def _forward(self, chains: Chains, most: int) -> tuple[int, list[np.ndarray]]:
        """Draft a token for each of the chains that fit, or up to `most` of them in a burst. Returns the number of rows
        if each of them reads one token, else 0; and for each forward the rows with changed or ended tails."""
        chains, held = self._reserve(chains, self._cache_rows(chains))
        if not len(held):
            return 0, [chains.rows]
        cached = self._origins, self._cache.lengths
        tokens, ends, complete = self.branches.read(self.view, self._tips, *cached, chains, held)
        counts, bursts = chains.counts.astype(np.int64), self._bursts
        if bursts is not None and complete.all() and (first := bursts.find(counts)) is not None:
            room = np.minimum(self.view.limits, self.max_len)[chains.rows] - ends
            shares = np.clip(room, 1, min(most, LONGEST))
            shares[~self._cache.reserve_rows(held, self._cache.lengths[held] + counts - 1 + shares)] = 1
            places, features = self._begin(chains, held, counts)
            rules = self._rules.table[chains.rows]
            found = bursts.run(first, held, counts, tokens, places, ends, shares, rules, features)
            return len(held), self._append_all(chains, shares, *found)
        logits = self._run(chains, held, counts, tokens, complete)
        if not complete.all():
            chains, ends = chains.at(complete), ends[complete]
        rows = chains.rows.astype(np.int64)
        drawn = candidates(logits, ends, rows, self._rules, self._most, ids=self._ids)
        return len(held) if len(tokens) == len(held) else 0, [self._append(chains, *drawn)]

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

    def _enter(self, row: int) -> bool:
        view, cache, known = self.view, self._cache, int(self.view.table.lengths[row])
        if known >= self.max_len:
            return False
        longest = min(int(view.table.limits[row]), self.max_len)
        tokens = min(known + view.window + known // _READ_PER_TOKEN, longest)
        held = cache.open(tokens)
        if held is None and tokens <= cache.slots_beside(self._cached[self._placed]):
            self._drop_branches()
            held = cache.open(tokens)
        if held is None:
            return False
        self._cached[row] = held
        self._rules.write([row], [view.sampling(row)], [-int(view.table.prompts[row])])
        return True

    def _leave(self, row: int) -> None:
        super()._leave(row)
        self._free(self._cached[[row]])

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        for row in rows[self._placed[rows] & (self._known[rows] >= self.max_len)].tolist():
            self._give_up(row)  # others need its pages

    def _free(self, rows: np.ndarray) -> None:
        self._cache.free_rows(rows)

    def _drop_branches(self) -> None:
        """Free the pages of all branches for main chains."""
        self._free(self.branches.close_all())

    def _cache_rows(self, chains: Chains) -> np.ndarray:
        """int64 `(n,)`: rows of the cache; that of a new branch is forked from its main chain's."""
        rows, numbers, begins, _ = chains
        mains: np.ndarray = self._cached[rows]
        if not len(rows) or numbers[-1] == MAIN:  # branches come last
            return mains
        new, held = np.flatnonzero(begins != FREE), self.branches.rows
        held[rows[new], numbers[new]] = self._cache.fork(mains[new], begins[new] - self._origins[rows[new]])
        return np.where(numbers == MAIN, mains, held[rows, numbers])

    def _reserve(self, chains: Chains, held: np.ndarray) -> tuple[Chains, np.ndarray]:
        """Make room in the cache for the tokens that each chain reads. If a main chain has no room, all branches are
        given up; chains without room are given up, too, and the request waits for pages. Returns the chains that fit
        into one forward, and their rows of the cache."""
        counts = chains.counts
        if counts.sum() > STEP_TOKENS:
            counts = np.minimum(counts, STEP_TOKENS - np.cumsum(counts) + counts).astype(np.int32)
            if self._bursts is not None:  # in a captured step rows read all they have: a commit that does not fit waits
                counts[(counts < chains.counts) & (chains.counts <= _MOST_OF_A_COMMIT)] = 0
            chains, held = chains._replace(counts=counts).at(counts > 0), held[counts > 0]  # the first ones
        ends = self._cache.lengths[held] + chains.counts
        fits = self._cache.reserve_rows(held, ends)
        if fits.all():
            return chains, held
        for i in np.flatnonzero(~fits).tolist():
            if chains.numbers[i] == MAIN:
                self._drop_branches()
            if chains.numbers[i] != MAIN or not self._cache.reserve(int(held[i]), int(ends[i])):
                self._give_up_chain(int(chains.rows[i]), int(chains.numbers[i]))
                self._waiting[chains.rows[i]] |= chains.numbers[i] == MAIN
        left, branch = self._placed[chains.rows], np.flatnonzero(chains.numbers != MAIN)
        left[branch] = self.branches.ats[chains.rows[branch], chains.numbers[branch]] != FREE
        return chains.at(left), held[left]

    def _give_up_chain(self, row: int, number: int) -> None:
        """Give up a branch, or a main chain together with its request."""
        if number == MAIN:
            self._give_up(row)
        elif self.branches.ats[row, number] != FREE:  # else it was dropped with its main chain
            self._free(self.branches.rows[row, [number]])
            self.branches.close(row, number)

    def _append(self, chains: Chains, tokens: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """Append the draws of each chain, see `Candidates`; a chain without a token is given up. Returns int32: rows
        with changed tails, and rows that were given up."""
        rows, numbers = chains.rows, chains.numbers
        for i in (tokens[:, 0] < 0).nonzero()[0].tolist():
            if numbers[i] == MAIN:  # NaN: a whole window is wrong
                self.view.table.judged[self.view.seat, 0] += self.view.window
            self._give_up_chain(int(rows[i]), int(numbers[i]))
        changed: np.ndarray = rows[self.branches.append(self.view, self._tips, chains, tokens, ranges_of(gaps))]
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
        return cls(RaggedModel(model, int(config.kv_cache_gb * GIB)), config.max_batch, config.branches)

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        super()._advance(rows, same)
        placed = self._placed[rows]
        held = self._cached[rows[placed]]
        self._cache.lengths[held] = np.minimum(self._cache.lengths[held], same[placed])

    def _ready(self) -> Chains:
        backlogs = self.view.ends - self._cache.lengths[self._cached]
        reading = backlogs > 1
        return self._plan(self._placed & reading, self._placed & ~reading, backlogs)

    def _run(
        self, chains: Chains, held: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        return self._runner.forward(held, counts, tokens, complete.astype(np.int64))

    def _begin(self, chains: Chains, held: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        return places(self._cache.lengths[held], counts), torch.empty(int(counts.sum()), 0)
