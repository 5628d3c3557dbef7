"""The drafter's mirrors of its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.ragged import common_prefix
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import MirrorTable
from specactor_ray.draft.proposer import packed

TRUTH = [5, 3, 5, 5, 2, 3, 5, 1, 5, 3, 2, 2, 5, 4, 1, 3]
PROMPT = (9, 9)


def mirror(committed: int = 0, tail: list[int] | None = None, window: int = 4) -> MirrorTable:
    """A table with one request in slot 2."""
    table = MirrorTable()
    table.open(2, PROMPT, TRUTH[:committed], SamplingParams(), window)
    table.lengthen(2, tail or [])
    return table


def commit(table: MirrorTable, start: int, tokens: list[int]) -> tuple[int, int]:
    """Up to which output token the line is what it was (below 0: the commit does not fit), and new tokens."""
    same, fresh = table.commit(*packed([(2, start, tokens)]))
    return int(same[0]) - len(PROMPT), int(fresh[0])


def tail(table: MirrorTable) -> tuple[int, list[int]]:
    ((base, tokens),) = table.tails(np.array([2])).rows()
    assert table.ends[2] == len(PROMPT) + base + len(tokens)
    return base, tokens


@pytest.mark.parametrize(
    ("drafts", "committed", "judged"),
    [
        (TRUTH[:4], 2, [2, 2]),  # the others wait for the next commit
        (TRUTH[:2], 4, [2, 2]),
        ([TRUTH[0], 99, TRUTH[2]], 3, [2, 1]),  # what follows a wrong one is not counted
        ([99], 3, [1, 0]),
        ([], 3, [0, 0]),
    ],
)
def test_drafts_that_commits_decide_on_are_counted_once(drafts: list[int], committed: int, judged: list[int]) -> None:
    m = mirror(0, drafts)
    commit(m, 0, TRUTH[:committed])
    assert m.judged.tolist() == judged
    commit(m, 0, TRUTH[:committed])
    commit(m, committed + 1, [1])
    commit(m, 0, [98, *TRUTH[1:committed]])
    assert m.judged.tolist() == judged, "repeated, early and contradicting ones decide on nothing"


def test_a_slot_that_is_not_open_takes_nothing() -> None:
    m = mirror(4)
    same, fresh = m.commit(*packed([(slot, 0, [1]) for slot in (0, 1, 3, 10**6, -1)]))
    assert same.tolist() == [-1] * 5 and not fresh.any()
    m.close(2)
    assert commit(m, 4, [1])[0] < 0 and not m.is_open(2) and not m.is_open(10**6)


def test_a_commit_far_beyond_takes_no_memory() -> None:
    m = mirror()
    assert commit(m, 2**31 - 2, [1])[0] < 0
    assert m.lines.size < 100


def test_several_commits_of_one_slot_are_taken_in_turn() -> None:
    m = mirror()
    same, fresh = m.commit(*packed([(2, 0, TRUTH[:2]), (2, 2, TRUTH[2:4]), (2, 5, [1])]))
    assert fresh.tolist() == [2, 2, 0] and same.tolist() == [2, 4, -1]
    assert m.committed(2).tolist() == TRUTH[:4]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_ids_that_do_not_fit_are_refused_and_none_becomes_another_one(dtype: Any) -> None:
    m = mirror()
    with pytest.raises(ValueError, match="guesses are token ids, not 2147483653"):
        m.lengthen(2, np.array([1, 2**31 + 5], dtype))
    assert tail(m)[1] == []


pieces = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.lists(st.integers(1, 5), max_size=6)))


@given(pieces)
def test_any_order_of_pieces_of_the_truth_keeps_a_prefix_of_it(sequence: list[tuple[int, int, list[int]]]) -> None:
    m = mirror(window=6)
    for start, end, guess in sequence:
        m.ends[2] = m.known[2]
        m.lengthen(2, guess)
        before, _ = tail(m)
        same, advanced = commit(m, start, TRUTH[start:end])
        reach = max(before, min(max(start, end), len(TRUTH)))
        assert (same >= 0) == (start <= before)
        base, left = tail(m)
        assert base == (reach if same >= 0 else before)
        assert m.prompt(2).tolist() == list(PROMPT) and m.committed(2).tolist() == TRUTH[:base]
        fresh = TRUTH[before:base]
        assert advanced == len(fresh)
        agrees = guess[: len(fresh)] == fresh[: len(guess)]
        assert left == (guess[len(fresh) :] if agrees else [])
        if same >= 0:
            assert same == before + (len(guess) if agrees else common_prefix(guess, fresh))
