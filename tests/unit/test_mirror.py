"""The drafter's mirror of one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.drafters.mirror import CommitOutcome, RequestMirror, common_prefix
from specactor_ray.messages import SamplingParams

TRUTH = [5, 3, 5, 5, 2, 3, 5, 1, 5, 3, 2, 2, 5, 4, 1, 3]


def mirror(committed: int = 0, tail: list[int] | None = None, window: int = 4) -> RequestMirror:
    made = RequestMirror((9, 9), TRUTH[:committed], SamplingParams(), window)
    made.tail.extend(tail or [])
    return made


def test_a_commit_that_agrees_shortens_the_tail() -> None:
    m = mirror(2, TRUTH[2:6])
    assert m.room == 0
    assert m.commit(2, TRUTH[2:4]) == CommitOutcome(True, advanced=2, matched=2, survived=2)
    assert (m.base_len, m.tail, m.room) == (4, TRUTH[4:6], 2)


def test_a_commit_past_a_right_tail_is_no_rollback() -> None:
    m = mirror(0, TRUTH[:2])
    assert m.commit(0, TRUTH[:4]) == CommitOutcome(True, advanced=4, matched=2, survived=0)


def test_a_wrong_tail_goes_as_a_whole() -> None:
    m = mirror(0, [TRUTH[0], 99, TRUTH[2]])
    assert m.commit(0, TRUTH[:2]) == CommitOutcome(True, advanced=2, matched=1, survived=0)
    assert m.tail == []


def test_a_gap_changes_nothing() -> None:
    m = mirror(2, [7])
    assert m.commit(3, TRUTH[3:5]) == CommitOutcome(False, survived=1)
    assert (m.base_len, m.tail) == (2, [7])
    assert not m.commit(-1, [1]).ok


def test_repeated_late_and_overlapping_commits_are_harmless() -> None:
    m = mirror(6, [7, 8])
    assert m.commit(0, TRUTH[:3]) == CommitOutcome(True, survived=2)
    assert m.commit(4, TRUTH[4:6]) == CommitOutcome(True, survived=2)
    assert m.commit(4, TRUTH[4:8]).advanced == 2
    assert m.committed == TRUTH[:8]


def test_a_contradiction_is_a_gap() -> None:
    m = mirror(4)
    assert not m.commit(2, [TRUTH[2], 99, 1]).ok
    assert m.committed == TRUTH[:4]


def test_common_prefix() -> None:
    assert [common_prefix([1, 2], other) for other in ([], [2], [1], [1, 3], [1, 2, 3])] == [0, 0, 1, 1, 2]


pieces = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.lists(st.integers(1, 5), max_size=6)))


@given(pieces)
def test_any_order_of_pieces_of_the_truth_keeps_a_prefix_of_it(sequence: list[tuple[int, int, list[int]]]) -> None:
    m = mirror()
    for start, end, guess in sequence:
        m.tail[:] = guess
        before = m.base_len
        outcome = m.commit(start, TRUTH[start:end])
        reach = max(before, min(max(start, end), len(TRUTH)))
        assert outcome.ok == (start <= before)
        assert m.base_len == (reach if outcome.ok else before)
        assert m.committed == TRUTH[: m.base_len]
        fresh = TRUTH[before : m.base_len]
        assert outcome.advanced == len(fresh)
        assert outcome.matched == common_prefix(guess, fresh)
        expected = guess[len(fresh) :] if guess[: len(fresh)] == fresh[: len(guess)] else []
        assert m.tail == expected
        assert outcome.survived == len(expected)
