"""What a forward says about the drafts of its rows: the tokens to commit, and how many drafts stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import SamplingError, verify_tails
from specactor_ray.targets.base import Tail


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A row that samples in this step."""

    tail: Tail
    sampling: SamplingParams
    position: int
    """Output position of the first token it may commit."""


@dataclass(slots=True)
class VerifiedRow:
    """What the target says to one row."""

    token_ids: list[int] = field(default_factory=list)
    """Accepted draft tokens, then one of the target's own."""
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] | None = None
    num_accepted: int = 0
    problem: str = ""
    """Why its logits cannot be sampled from; then nothing else counts."""


def cut_tail(tail: Tail, most: int, vocab_size: int) -> Tail:
    """What of a tail may be verified: at most `most` tokens, and none outside the vocabulary or behind one."""
    tail = tail[: max(most, 0)]
    for i, token in enumerate(tail):
        if not 0 <= token < vocab_size:
            return tail[:i]
    return tail


def verify(logits: torch.Tensor, rows: Sequence[DraftedRow], record_margins: bool) -> list[VerifiedRow]:
    """What each row commits. A row whose logits cannot be sampled from gets its problem noted; the others go on.

    Args:
        logits: `(sum of 1 + len(tail), vocab)`: per row one for its last committed token, then one per draft token.
        rows: In the order of the logits.
        record_margins: Also return the perturbed top-2 margins.
    """
    offsets, begin = [], 0
    for row in rows:
        offsets.append(begin)
        begin += 1 + len(row.tail)
    results = [VerifiedRow() for _ in rows]
    sound = list(range(len(rows)))
    while sound:
        try:
            verified = verify_tails(
                logits,
                [offsets[i] for i in sound],
                [rows[i].tail for i in sound],
                [rows[i].sampling for i in sound],
                [rows[i].position for i in sound],
                record_margins=record_margins,
            )
        except SamplingError as error:
            for index, problem in error.problems.items():
                results[sound[index]].problem = problem
            sound = [i for index, i in enumerate(sound) if index not in error.problems]
            continue
        for i, one in zip(sound, verified, strict=True):
            results[i] = VerifiedRow(one.token_ids, one.logprobs, one.margins, one.num_accepted)
        break
    return results
