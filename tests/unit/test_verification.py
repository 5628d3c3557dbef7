"""Verifying the drafts of one step against sampling each row alone, token by token; unsound logits fail their row."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import sample_rows
from specactor_ray.targets.base import Tail
from specactor_ray.targets.verification import DraftedRow, cut_tail, verify

VOCAB = 5


def random_tail(rng: random.Random) -> Tail:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]


def descend(logits: torch.Tensor, row: DraftedRow) -> tuple[list[int], list[float], list[float], int]:
    """Tokens, log-probabilities, margins and accepted draft tokens of one row whose logits these are."""
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    for place in range(1 + len(row.tail)):
        sampled = sample_rows(logits[place : place + 1], [row.sampling], [row.position + place], record_margins=True)
        tokens += sampled.token_ids
        logprobs += sampled.logprobs
        margins += sampled.margins or []
        if place < len(row.tail) and tokens[-1] != row.tail[place]:
            break
    return tokens, logprobs, margins, len(tokens) - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_only_what_is_accepted_counts_and_a_broken_row_fails_alone(seed: int) -> None:
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
        looked_at = range(1 + expected[-1][3])
        for place in set(range(count)) - set(looked_at):
            logits[begin + place] = float("nan")
        if rng.random() < 0.3:
            logits[begin + rng.choice(looked_at)] = float("inf")
            broken.add(i)
        begin += count
    for i, (row, (tokens, logprobs, margins, accepted)) in enumerate(
        zip(verify(logits, rows, record_margins=True), expected, strict=True)
    ):
        if i in broken:
            assert "logits contain +inf" in row.problem
        else:
            assert (row.problem, row.token_ids, row.num_accepted) == ("", tokens, accepted)
            assert (row.logprobs, row.margins) == (logprobs, margins)


def test_tails_are_cut_to_what_may_be_verified() -> None:
    assert cut_tail((1, 2, 3), 2, VOCAB) == (1, 2)
    assert cut_tail([1, 2, 3], 1, VOCAB) == [1]
    assert cut_tail((1, VOCAB, 3), 9, VOCAB) == (1,)
    assert cut_tail((1, 2), -1, VOCAB) == ()
