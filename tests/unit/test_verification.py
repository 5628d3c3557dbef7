"""Verifying the chains and trees of one step against a walk down each row alone; unsound logits fail their row."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import sample_rows
from specactor_ray.spec.tree import DraftTree, merge_tails
from specactor_ray.targets.base import Tail
from specactor_ray.targets.verification import DraftedRow, cut_tail, verify

VOCAB = 5


def random_tail(rng: random.Random) -> Tail:
    tree = merge_tails([rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(1, 6)))
    return tree.token_ids if tree.is_chain else tree


def descend(logits: torch.Tensor, row: DraftedRow) -> tuple[list[int], list[float], list[float], list[int]]:
    """Tokens, log-probabilities, margins and accepted nodes of one row whose logits these are."""
    tree = row.tail if isinstance(row.tail, DraftTree) else DraftTree.chain(row.tail)
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    path: list[int] = []
    while True:
        place = 1 + path[-1] if path else 0
        sampled = sample_rows(
            logits[place : place + 1], [row.sampling], [row.position + len(path)], record_margins=True
        )
        tokens += sampled.token_ids
        logprobs += sampled.logprobs
        margins += sampled.margins or []
        below = tree.walk(tokens)
        if len(below) == len(path):
            return tokens, logprobs, margins, path
        path = below


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_only_the_accepted_path_counts_and_a_broken_row_fails_alone(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = [
        DraftedRow(random_tail(rng), SamplingParams(rng.choice([0.0, 1.0]), top_k=3, seed=seed + i), rng.randint(0, 9))
        for i in range(rng.randint(1, 5))
    ]
    logits = torch.randn(sum(1 + len(row.tail) for row in rows), VOCAB)
    expected, begin, broken = [], 0, set()
    for i, row in enumerate(rows):
        count = 1 + len(row.tail)
        expected.append(descend(logits[begin : begin + count], row))
        looked_at = [0, *(1 + node for node in expected[-1][3])]
        for place in set(range(count)) - set(looked_at):
            logits[begin + place] = float("nan")
        if rng.random() < 0.3:
            logits[begin + rng.choice(looked_at)] = float("inf")
            broken.add(i)
        begin += count
    for i, (row, (tokens, logprobs, margins, path)) in enumerate(
        zip(verify(logits, rows, record_margins=True), expected, strict=True)
    ):
        if i in broken:
            assert "logits contain +inf" in row.problem
        else:
            assert (row.problem, row.token_ids, list(row.path)) == ("", tokens, path)
            assert (row.logprobs, row.margins) == (logprobs, margins)


def test_tails_are_cut_to_what_may_be_verified() -> None:
    assert cut_tail((1, 2, 3), 2, 9, VOCAB) == (1, 2)
    assert cut_tail([1, 2, 3], 9, 1, VOCAB) == [1]
    assert cut_tail((1, VOCAB, 3), 9, 9, VOCAB) == (1,)
    assert cut_tail((1, 2), -1, 9, VOCAB) == ()
    tree = merge_tails([(1, 2, 3), (1, 4), (-1, 0)])
    assert cut_tail(tree, 9, 9, VOCAB) == DraftTree((1, 2, 3, 4), (-1, 0, 1, 0))
    assert cut_tail(tree, 1, 9, VOCAB) == (1,), "a single branch is an ordinary tail"
    assert cut_tail(tree, 9, 3, VOCAB) == (1, 2, 3)
    assert cut_tail(tree, -1, 9, VOCAB) == ()
