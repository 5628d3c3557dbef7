"""Measurement of a proposer on recorded outputs: seconds per token, and the share of right tokens.

Sampling is keyed, so the next token of the target does not depend on the drafter. Recorded outputs of plain decoding
are therefore the truth for every draft method and window, and no target is needed beside the proposer: draft until
the window is full, compare, commit the tokens that a verifier would commit, repeat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.evaluation import AcceptanceCounts, draft_all, replay
from specactor_ray.draft.proposer import Proposer, common_prefix, packed
from specactor_ray.transport.messages import Features


class TextStream:
    """All recorded tokens one after the other, as often as needed; features likewise, where there are any."""

    def __init__(self, recorded: Sequence[CorpusRecord]) -> None:
        self._tokens = [token for one in recorded for token in (*one.prompt_token_ids, *one.output_token_ids)]
        states = [one.states for one in recorded if one.states is not None]
        self._states = np.concatenate(states) if states else None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        return tuple(self._tokens[position % len(self._tokens)] for position in range(start, end))

    def features(self, begin: int, end: int) -> tuple[Features, ...]:
        """States for the positions `[begin, end)`, or nothing. They are real states, but of other tokens: only their
        shape matters here."""
        if self._states is None or end <= begin:
            return ()
        return (Features(begin, self._states[np.arange(begin, end) % len(self._states)]),)


def seconds_per_token(
    proposer: Proposer,
    text: TextStream,
    sampling: SamplingParams,
    *,
    batch: int,
    context: int,
    window: int,
    repeats: int,
) -> list[float]:
    """Seconds to draft one token for each of `batch` requests, once per repeat.

    A repeat is the work between two verify steps: the commit of the right tokens and one more, then drafting until the
    window is full. Its time is divided by the window. So it includes the cost of a commit, and a method that finds its
    whole window at once is measured like one that drafts token by token.

    Raises:
        InputError: A method with a model drafts nothing: its cache or its context is too small.
    """
    slots = np.arange(batch, dtype=np.int32)
    at = [9973 * slot for slot in range(batch)]  # far apart in the text, so that rows are no copies of each other
    committed = [0] * batch
    for slot in range(batch):
        begin = at[slot]
        at[slot] = begin + context
        proposer.open(slot, f"profile-{slot}", text.tokens(begin, begin + context), (), sampling, window)
        proposer.add_features(slot, text.features(0, context - 1))
    draft_all(proposer, slots, window)
    _reject_silent(proposer, slots, context)
    seconds = []
    for _ in range(repeats):
        commits, features = [], []
        for slot, (_, tail) in enumerate(proposer.tails(slots).rows()):
            truth = text.tokens(at[slot], at[slot] + len(tail) + 1)
            count = common_prefix(tail, truth) + 1
            known = context + committed[slot] - 1  # the newest token's state comes with the next commit
            features.append(text.features(known, known + count))
            commits.append((slot, committed[slot], truth[:count]))
            at[slot] += count
            committed[slot] += count
        arrays = packed(commits)
        begin_s = time.perf_counter()
        if not proposer.commit(*arrays).all():
            raise SpecActorError(f"{proposer.method} lost track of a request while it was profiled")
        for slot, states in enumerate(features):
            proposer.add_features(slot, states)
        draft_all(proposer, slots, window)
        seconds.append((time.perf_counter() - begin_s) / window)
    for slot in range(batch):
        proposer.close(slot, finished=False)
    return seconds


def _reject_silent(proposer: Proposer, slots: np.ndarray, context: int) -> None:
    if proposer.vocab_size is None:  # lookups may find nothing
        return
    silent = int((proposer.tails(slots).lengths == 0).sum())
    if silent:
        raise InputError(
            f"{proposer.method} drafts nothing for {silent} of {len(slots)} requests of {context} tokens: its cache or "
            "its context is too small. Fix: raise its kv_cache_gb, or profile smaller --batches or --contexts"
        )


def measure_acceptance(
    proposer: Proposer, recorded: Sequence[CorpusRecord], window: int, batch: int
) -> AcceptanceCounts:
    """Draft for the recorded requests, `batch` at a time, in order: later ones may use the outputs of those that ended.

    Raises:
        InputError: The outputs are too short to compare any draft with them.
    """
    counts = replay(proposer, recorded, window, batch)
    if not counts.survival:
        raise InputError("no draft could be held against an output: the outputs are too short to measure acceptance")
    return counts
