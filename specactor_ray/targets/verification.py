"""What a forward says about the drafts of its rows: the tokens to commit, and which positions of the cache stay.

Chains are verified by `sampling.verify_tails`. In a tree the target descends from the last committed token: it samples
there, goes to the child that holds the sampled token, samples there, and so on until no child holds it. The sample at
a node is a function of (logits, seed, output position), so the path is the one that plain decoding takes, and its
length is the largest number of accepted tokens over all branches. Positions off the path are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import SamplingError, Verified, verify_tails
from specactor_ray.spec.tree import DraftTree
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
    path: Sequence[int] = ()
    """Accepted nodes (in a chain: the first ones), ascending."""
    problem: str = ""
    """Why its logits cannot be sampled from; then nothing else counts."""


def cut_tail(tail: Tail, max_depth: int, max_tokens: int, vocab_size: int) -> Tail:
    """What of a tail may be verified: `max_depth` tokens in a row, `max_tokens` in all, and no token outside the
    vocabulary or behind one. A tree of a single branch becomes an ordinary tail."""
    if isinstance(tail, DraftTree):
        tree = tail.cut(max_depth, max_tokens, vocab_size)
        return tree.token_ids if tree.is_chain else tree
    tail = tail[: max(min(max_depth, max_tokens), 0)]
    for i, token in enumerate(tail):
        if not 0 <= token < vocab_size:
            return tail[:i]
    return tail


def verify(logits: torch.Tensor, rows: Sequence[DraftedRow], record_margins: bool) -> list[VerifiedRow]:
    """What each row commits.

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
    chains = [i for i, row in enumerate(rows) if not isinstance(row.tail, DraftTree)]
    _verify_chains(logits, rows, offsets, chains, record_margins, results)
    trees = {i: row.tail for i, row in enumerate(rows) if isinstance(row.tail, DraftTree)}
    if trees:
        _descend(logits, rows, offsets, trees, record_margins, results)
    return results


def _verify_chains(
    logits: torch.Tensor,
    rows: Sequence[DraftedRow],
    offsets: Sequence[int],
    chains: Sequence[int],
    record_margins: bool,
    results: list[VerifiedRow],
) -> None:
    def check(sound: Sequence[int]) -> list[Verified]:
        return verify_tails(
            logits,
            [offsets[i] for i in sound],
            [rows[i].tail for i in sound],  # type: ignore[misc]  # no trees among them
            [rows[i].sampling for i in sound],
            [rows[i].position for i in sound],
            record_margins=record_margins,
        )

    for i, verified in _sound_ones(chains, results, check):
        path = range(verified.num_accepted)
        results[i] = VerifiedRow(verified.token_ids, verified.logprobs, verified.margins, path)


def _descend(
    logits: torch.Tensor,
    rows: Sequence[DraftedRow],
    offsets: Sequence[int],
    trees: Mapping[int, DraftTree],
    record_margins: bool,
    results: list[VerifiedRow],
) -> None:
    """All trees go down together: one call of the sampler per depth, over the rows that are still on a node."""
    if logits.device.type == "cpu":
        logits = logits.float()  # once, or the sampler would convert all rows at every depth
    children = {i: tree.children for i, tree in trees.items()}
    paths: dict[int, list[int]] = {i: [] for i in trees}
    for i, path in paths.items():
        results[i] = VerifiedRow(margins=[] if record_margins else None, path=path)

    def sample(sound: Sequence[int]) -> list[Verified]:
        places = [offsets[i] + 1 + paths[i][-1] if paths[i] else offsets[i] for i in sound]
        return verify_tails(
            logits,
            places,
            [()] * len(sound),  # nothing to compare with yet: one token each
            [rows[i].sampling for i in sound],
            [rows[i].position + len(paths[i]) for i in sound],
            record_margins=record_margins,
        )

    descending = list(trees)
    while descending:
        reached = _sound_ones(descending, results, sample)
        descending = []
        for i, sampled in reached:
            _append(results[i], sampled)
            child = children[i].get((paths[i][-1] if paths[i] else -1, sampled.token_ids[0]))
            if child is not None:
                paths[i].append(child)
                descending.append(i)


def _append(result: VerifiedRow, sampled: Verified) -> None:
    result.token_ids += sampled.token_ids
    result.logprobs += sampled.logprobs
    if result.margins is not None:
        result.margins += sampled.margins or ()


def _sound_ones(
    indices: Sequence[int], results: Sequence[VerifiedRow], call: Callable[[Sequence[int]], list[Verified]]
) -> list[tuple[int, Verified]]:
    """`call` on the rows that can be sampled from, with their indices; the others get their problem noted."""
    while indices:
        try:
            return list(zip(indices, call(indices), strict=True))
        except SamplingError as error:
            for index, problem in error.problems.items():
                results[indices[index]].problem = problem
            indices = [i for index, i in enumerate(indices) if index not in error.problems]
    return []
