"""What all engines do with rows: cut drafts, commit what was sampled, hand out states. Bad logits fail their row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import verify_arrays
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.target import rows as rows_of
from specactor_ray.target.base import Drafts
from specactor_ray.target.rows import commit, export, fewest_first
from specactor_ray.transport.messages import States

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


CASES = [
    # tokens of the target, drafts, row with bad logits, other rules; tokens that count, accepted, drafted, end
    ([1, 2, 3, 1], [1, 2, 3], None, {}, [1, 2, 3, 1], 3, 3, Finish.RUNNING),
    ([1, 2, 3, 1], [1, 0, 3], None, {}, [1, 2], 1, 3, Finish.RUNNING),
    ([1], [], None, {}, [1], 0, 0, Finish.RUNNING),
    ([1, 4, 3, 1], [1, 4, 3], None, {}, [1, 4], 2, 2, Finish.STOP),  # what lies behind an end is not drafted
    ([1, 4, 3, 1], [1, 4, 3], None, {"ignore_eos": True}, [1, 4, 3, 1], 3, 3, Finish.RUNNING),
    ([1, 2, 3, 1], [1, 2, 3], None, {"stop_token_ids": (3,)}, [1, 2, 3], 3, 3, Finish.STOP),
    ([1, 2, 3, 1], [1, 2, 3], 2, {}, [], 0, 0, Finish.ERROR),
    ([1, 4, 3, 1], [1, 4, 3], 2, {}, [1, 4], 2, 2, Finish.STOP),  # behind the end
    ([1, 2, 3, 1], [1, 0, 3], 2, {}, [1, 2], 1, 3, Finish.RUNNING),  # behind a wrong draft
]


def test_only_what_is_accepted_counts_and_a_broken_row_fails_alone() -> None:
    tokens, tails, broken, rules, wanted, accepted, drafted, finish = zip(*CASES, strict=True)
    samplings = [SamplingParams(0.0, **rule) for rule in rules]
    table, lengths = table_of(samplings, range(len(CASES))), np.array(list(map(len, tails)))
    logits, offsets = torch.eye(VOCAB)[[token for one in tokens for token in one]], begins(1 + lengths)[:-1]
    for offset, at in zip(offsets.tolist(), broken, strict=True):
        if at is not None:
            logits[offset + at] = float("inf")
    rows, flat = ints(*range(1, 2 * len(CASES), 2)), ints(*(token for tail in tails for token in tail))
    at = table.lengths[rows].astype(np.int64)
    found = verify_arrays(logits, offsets, begins(lengths), flat, at, rows, table.rules, 2)
    result = commit(table, rows, lengths, found, record_margins=True)
    assert result.rows.tolist() == rows.tolist() and result.starts.tolist() == list(range(len(CASES)))
    outputs = list(result.outputs())
    assert [output for _, output, _ in outputs] == list(wanted) and [end for *_, end in outputs] == list(finish)
    assert result.accepted.tolist() == list(accepted) and result.drafted.tolist() == list(drafted)
    assert result.errors.keys() == {13} and "logits contain +inf" in result.errors[13]
    expected = 1 - np.log(4 + np.e)
    assert result.margins is not None and np.allclose(result.margins, 1) and np.allclose(result.logprobs, expected)


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
