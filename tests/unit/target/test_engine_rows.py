"""What all engines do with rows: cut drafts, commit what was sampled, hand out states. Bad logits fail their row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import verify_arrays
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.target import rows as rows_of
from specactor_ray.target.base import Drafts
from specactor_ray.target.rows import commit, export, fewest_first
from specactor_ray.transport.messages import States
from tests.tails import sample_rows

VOCAB, PROMPT = 5, 3


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def table_of(samplings: Sequence[SamplingParams], committed: Sequence[int] = ()) -> RequestTable:
    """Requests in rows 1, 3, 5, ..., with so many committed tokens."""
    table = RequestTable(vocab_size=VOCAB, max_model_len=100, eos_token_ids=[4])
    for i, sampling in enumerate(samplings):
        table.open(TargetRequest(f"beside-{i}", (0,), SamplingParams()))
        table.open(TargetRequest(str(i), (0,) * PROMPT, sampling, (1,) * (committed or [0] * (i + 1))[i]))
    return table


def descend(
    logits: torch.Tensor, tail: Sequence[int], sampling: SamplingParams, position: int
) -> tuple[list[int], list[float], list[float]]:
    """Tokens, log-probabilities and margins of one row whose logits these are, sampled one by one."""
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    for place in range(1 + len(tail)):
        sampled = sample_rows(logits[place : place + 1], [sampling], [position + place], record_margins=True)
        tokens += sampled.token_ids
        logprobs += sampled.logprobs
        margins += sampled.margins or []
        if place < len(tail) and tokens[-1] != tail[place]:
            break
    return tokens, logprobs, margins


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_only_what_is_accepted_counts_and_a_broken_row_fails_alone(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.randint(1, 5)
    samplings = [
        SamplingParams(rng.choice([0.0, 1.0]), top_k=3, seed=seed + i, ignore_eos=rng.random() < 0.8)
        for i in range(count)
    ]
    committed = [rng.randint(0, 9) for _ in samplings]
    table = table_of(samplings, committed)
    tails = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))] for _ in samplings]
    drafted = np.array(list(map(len, tails)))
    offsets = begins(1 + drafted)[:-1]
    logits = torch.randn(int((1 + drafted).sum()), VOCAB)
    expected, broken = [], dict[int, int]()
    for i, tail in enumerate(tails):
        begin, end = int(offsets[i]), int(offsets[i]) + 1 + len(tail)
        expected.append(descend(logits[begin:end], tail, samplings[i], committed[i]))
        looked_at = range(len(expected[i][0]))
        logits[begin + len(looked_at) : end] = float("nan")
        if rng.random() < 0.3:
            broken[i] = rng.choice(looked_at)
            logits[begin + broken[i]] = float("inf")
    rows, tokens = ints(*range(1, 2 * count, 2)), ints(*(token for tail in tails for token in tail))
    places = table.lengths[rows].astype(np.int64)
    found = verify_arrays(logits, offsets, begins(drafted), tokens, places, rows, table.rules, 2)
    result = commit(table, rows, drafted, found, record_margins=True)
    assert result.rows.tolist() == rows.tolist() and result.starts.tolist() == committed
    assert result.margins is not None
    outputs, ends = list(result.outputs()), begins(result.lengths)
    for i, (want, logprobs, margins) in enumerate(expected):
        _, got, finish = outputs[i]
        ended = 4 in want and not samplings[i].ignore_eos
        size = want.index(4) + 1 if ended else len(want)
        if broken.get(i, size) < size:  # what a draft behind the end leads to does not count
            assert "logits contain +inf" in result.errors[int(rows[i])] and not got and finish is Finish.ERROR
            continue
        assert int(rows[i]) not in result.errors
        assert (got, finish) == (want[:size], Finish.STOP if ended else Finish.RUNNING)
        assert np.allclose(result.logprobs[ends[i] : ends[i + 1]], logprobs[:size])
        assert np.allclose(result.margins[ends[i] : ends[i + 1]], margins[:size])
        accepted = min(len(want) - 1, size)
        assert result.accepted[i] == accepted
        assert result.drafted[i] == (accepted if accepted == size else len(tails[i])), "what lies behind an end"


def cut(drafts: dict[int, list[int]], rows: list[int], most: int = 9, budget: int = 99, **sampling: int) -> list[int]:
    table = table_of([SamplingParams(**sampling)] * 4, [0] * 4)
    given = Drafts.of(drafts)
    firsts, lengths = rows_of.cut(table, ints(*rows), given, most, budget)
    for row, first, length in zip(rows, firsts.tolist(), lengths.tolist(), strict=True):
        assert given.tokens[first : first + length].tolist() == drafts.get(row, [])[:length]
    return lengths.tolist()


def test_drafts_are_cut_to_what_may_be_verified() -> None:
    assert cut({1: [1, 2, 3], 3: [1]}, [1, 3], most=2) == [2, 1]
    assert cut({1: [1, 2, 3]}, [1], max_tokens=3) == [2], "then comes a token of the target's own"
    assert cut({1: [1, 2, 3]}, [1], max_tokens=1) == [0]
    assert cut({1: [1, VOCAB, 3], 3: [2, 2], 5: [-1], 7: [3, 10**9]}, [1, 3, 5, 7]) == [1, 2, 0, 1]
    assert cut({1: [1, 2, 3], 3: [1, 2], 5: [1]}, [1, 3, 5], budget=4) == [3, 1, 0]
    assert cut({5: [1, 2, 3], 1: [2]}, [1, 3, 5]) == [1, 0, 3], "in any order"
    assert cut({5: [1, 2, 3], 99: [1], 1: [2]}, [1, 3]) == [1, 0], "and of rows that do not decode"
    assert cut({}, [1, 3]) == cut({1: []}, [1, 3]) == [0, 0]


def test_states_are_exported_once_and_in_order() -> None:
    table, rows = table_of([SamplingParams()] * 2, [0, 4]), ints(1, 3)

    def exported(*ends: int) -> dict[int, list[int]]:
        def states_of(rows: np.ndarray, starts: np.ndarray, most: int) -> States:
            chosen, lengths = fewest_first(ints(*ends), starts, most)
            return States(rows[chosen], starts[chosen], lengths, torch.from_numpy(places(starts[chosen], lengths)))

        return {row: values.tolist() for row, _, values in export(table, states_of, rows).split()}

    assert exported(3, 2) == {1: [0, 1, 2], 3: [0, 1]}
    assert exported(6, 1) == {1: [3, 4, 5]}, "the second was preempted: it is computed again"
    assert exported(7, 7) == {1: [6], 3: [2, 3, 4, 5, 6]}


def test_rows_with_the_fewest_positions_come_first() -> None:
    for most, expected in ((99, {0: 5, 1: 2}), (4, {1: 2, 0: 2}), (2, {1: 2})):
        chosen, lengths = fewest_first(ints(7, 7, 7), ints(2, 5, 7), most)
        assert dict(zip(chosen.tolist(), lengths.tolist(), strict=True)) == expected
