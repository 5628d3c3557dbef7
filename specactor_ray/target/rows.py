"""Common work of engines on requests: refuse impossible ones, cut drafts, end outputs, export hidden states. The data
is a structure of arrays by the row of the request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.core.errors import InputError, RangeError
from specactor_ray.core.ragged import begins, grow, places
from specactor_ray.core.types import TopTokens
from specactor_ray.sampling.keyed import Found
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.base import Drafts, Finish, StepResult, TargetRequest
from specactor_ray.transport.messages import States

if TYPE_CHECKING:
    import torch

_FIRST_ROWS, _ALL = 32, 1 << 62


class EngineRows:
    """The requests of an engine, in arrays that grow with the largest row. `eos_token_ids` end an output unless the
    request ignores them; `device` reads the sampling rules."""

    def __init__(
        self, vocab_size: int, max_model_len: int, eos_token_ids: Collection[int], device: torch.device | None = None
    ) -> None:
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self.requests: dict[int, TargetRequest] = {}
        """Row → its request, in the order of their addition."""
        self.prompt, self.length, self.limit, self.exported = np.zeros((4, _FIRST_ROWS), np.int32)
        """int32 `(rows,)`: prompt tokens; prompt and output tokens; most of these, by max_tokens and by the context;
        number of sequence positions whose states were exported."""
        self._minds_eos = np.zeros(_FIRST_ROWS, np.bool_)
        self._stops: dict[int, Sequence[int]] = {}
        """Row → its own stop ids, if it has any."""
        self.rules = Rules(_FIRST_ROWS, device)
        """Sampling rules by row; positions are those in the sequence."""

    def open(self, row: int, request: TargetRequest) -> Finish | None:
        """Open a row for a request, unless its committed tokens end its output: then the end is returned. InputError:
        the request can never run, or the row is in use."""
        if row in self.requests:
            raise InputError(f"row {row} holds request {self.requests[row].request_id}")
        refuse_impossible(request, self._vocab_size, self._max_model_len)
        if (finish := self._end_of(request)) is not None:
            return finish
        if row >= len(self.length):
            names = ("prompt", "length", "limit", "exported", "_minds_eos")
            grow(self, names, max(2 * len(self.length), row + 1))
        sampling, prompt = request.sampling, len(request.prompt_token_ids)
        self.requests[row] = request
        self.prompt[row], self.length[row] = prompt, prompt + len(request.committed_token_ids)
        self.limit[row] = min(prompt + sampling.max_tokens, self._max_model_len)
        self.exported[row], self._minds_eos[row] = 0, not sampling.ignore_eos
        if sampling.stop_token_ids:
            self._stops[row] = sampling.stop_token_ids
        self.rules.write([row], [sampling], [-prompt])
        return None

    def _end_of(self, request: TargetRequest) -> Finish | None:
        sampling, prompt, committed = request.sampling, request.prompt_token_ids, request.committed_token_ids
        if not committed:
            return None
        last = committed[-1]
        if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in self._eos):
            return Finish.STOP
        full = len(committed) >= min(sampling.max_tokens, self._max_model_len - len(prompt))
        return Finish.LENGTH if full else None

    def close(self, row: int) -> bool:
        """Free a row. Returns whether it held a request."""
        self._stops.pop(row, None)
        return self.requests.pop(row, None) is not None

    def cut(self, rows: np.ndarray, drafts: Drafts, most: int, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """Select the drafts that may be verified in these rows, which decode: a draft ends before a token outside the
        vocabulary, and leaves room for the token that the target adds.

        `most`: draft tokens of a row; `budget`: draft tokens of all rows, of which the first rows take theirs. Returns
        int64 `(n,)`: begin of each row's drafts in `drafts.tokens`, and how many of them count.
        """
        if not len(drafts.tokens) or most <= 0:
            firsts, lengths = np.zeros((2, len(rows)), np.int64)
            return firsts, lengths
        first, length = np.zeros((2, max(len(self.length), int(drafts.rows.max(initial=0)) + 1)), np.int64)
        first[drafts.rows], length[drafts.rows] = begins(drafts.lengths)[:-1], drafts.lengths
        room = np.minimum(self.limit[rows] - self.length[rows] - 1, most)
        firsts, lengths = first[rows], np.minimum(length[rows], np.maximum(room, 0))
        bad = np.flatnonzero((drafts.tokens < 0) | (drafts.tokens >= self._vocab_size))
        if len(bad):
            following = np.append(bad, len(drafts.tokens))[np.searchsorted(bad, firsts)]
            lengths = np.minimum(lengths, following - firsts)
        ends = np.cumsum(lengths)
        if len(ends) and ends[-1] > budget:
            lengths = np.clip(budget - (ends - lengths), 0, lengths)
        return firsts, lengths

    def commit(
        self,
        rows: np.ndarray,
        drafted: np.ndarray,
        found: Found,
        record_margins: bool,
        tops: TopTokens | None = None,
    ) -> StepResult:
        """Commit the target's samples for these rows, int32 `(n,)`, up to their ends. The caller closes rows that have
        ended. `drafted`: draft tokens that were verified; `record_margins`: whether `found` has margins; `tops`: the
        most probable tokens at the positions of `found`."""
        counts, tokens, column = found.counts, found.tokens, np.arange(found.width)
        ends = (tokens[:, :, None] == self._eos).any(axis=2) & self._minds_eos[rows, None]
        if self._stops:
            for i, row in enumerate(rows.tolist()):
                if row in self._stops:
                    ends[i] |= np.isin(tokens[i], self._stops[row])
        ends &= column < counts[:, None]
        stopped = ends.any(axis=1)
        failed = (found.statuses != 0) & ~stopped  # tokens after an end do not count
        errors = found.problems(drafted) if failed.any() else {}
        lengths = np.where(failed, 0, np.where(stopped, ends.argmax(axis=1) + 1, counts))
        accepted = np.where(failed, 0, counts - (found.statuses == 0))
        # Draft tokens after the end are neither right nor wrong.
        drafted = np.where(failed | (accepted >= lengths), np.minimum(accepted, lengths), drafted)
        before = self.length[rows]
        self.length[rows] = after = before + lengths
        finish = np.where(stopped, Finish.STOP, np.where(after >= self.limit[rows], Finish.LENGTH, Finish.RUNNING))
        kept = column < lengths[:, None]
        return StepResult(
            rows,
            before - self.prompt[rows],
            lengths.astype(np.int32),
            tokens[kept].astype(np.int32),
            found.logprobs[kept].astype(np.float32),
            found.margins[kept].astype(np.float32) if record_margins else None,
            drafted.astype(np.int32),
            np.minimum(accepted, lengths).astype(np.int32),
            np.where(failed, Finish.ERROR, finish).astype(np.uint8),
            {int(rows[i]): text for i, text in errors.items() if failed[i]},
            tops=None if tops is None else _first_positions(tops, counts, lengths),
        )

    def export(self, states_of: Callable[[np.ndarray, np.ndarray, int], States], rows: np.ndarray) -> States:
        """The final states of these rows, int32 `(n,)`, that were not exported before; `states_of` is
        `TargetEngine.states`. Called after `commit`."""
        exported = states_of(rows, self.exported[rows], _ALL)
        self.exported[exported.rows] += exported.lengths
        return exported


def fewest_first(ends: np.ndarray, starts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that have something between `starts` and `ends`, those with the fewest first, and how much each of them has
    if `most` are taken in all: int64 indices and int32 lengths of at least 1."""
    lengths = ends.astype(np.int64) - starts
    chosen = np.argsort(lengths, kind="stable")
    chosen = chosen[lengths[chosen] > 0]
    lengths = lengths[chosen]
    lengths = np.minimum(lengths, most + lengths - np.cumsum(lengths))
    return chosen[lengths > 0], lengths[lengths > 0].astype(np.int32)


def _first_positions(tops: TopTokens, had: np.ndarray, lengths: np.ndarray) -> TopTokens:
    """Reduce `tops` from the first `had` to the first `lengths` positions of each request, `(n,)` each."""
    at = places(begins(had * tops.counts)[:-1], lengths * tops.counts)
    return TopTokens(tops.counts, tops.tokens[at], tops.logprobs[at])


def refuse_unknown(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for a token id that is not in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        position, token = next(one for one in enumerate(token_ids) if not 0 <= one[1] < vocab_size)
        raise InputError(f"token id {token} at position {position} is outside the vocabulary (0 to {vocab_size - 1})")


def refuse_impossible(request: TargetRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise InputError for a request that can never run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InputError("the prompt has no tokens")
    refuse_unknown((*prompt, *request.committed_token_ids), vocab_size)
    if (stop := max(request.sampling.stop_token_ids, default=0)) >= vocab_size:
        raise RangeError("sampling.stop_token_ids", str(stop), f"hold token ids of the model, at most {vocab_size - 1}")
    if (logprobs := request.sampling.logprobs) > vocab_size:
        raise RangeError("sampling.logprobs", str(logprobs), f"be at most {vocab_size}, the size of the vocabulary")
    if len(prompt) >= max_model_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; with at least one output token it must stay within "
            f"{max_model_len} (the smallest of target.max_model_len, the model's context and the cache budget)"
        )
