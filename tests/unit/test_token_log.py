"""The log of the `suffix` method against a search by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.draft.lookup._token_log_numba import MAX_VOTES
from specactor_ray.draft.lookup.token_log import Noise, Text, TokenLog
from tests.unit.brute_force_log import BruteForceLog

GROUPS = (0, 0, 1, 2)
tokens = st.integers(0, 2)
writes = st.lists(
    st.tuples(st.integers(0, 3), st.lists(tokens, min_size=1, max_size=6), st.sampled_from([True, True, True, False])),
    max_size=10,  # at most 60 tokens: no look-up has more rows to compare than MAX_VOTES
)
contexts = st.lists(st.lists(tokens, max_size=10), min_size=1, max_size=4)
noises = st.sampled_from([None, Noise(3, 0), Noise(2**64 - 1, 7)])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 6), st.sampled_from([1, 2, 5, 16, 40, 64]), writes, contexts, noises,
    st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_drafts_are_those_of_a_search_by_hand(low, extra, capacity, sequence, asked, noise, floor) -> None:
    log = TokenLog(capacity, low, low + extra, scopes=2)
    brute = BruteForceLog(capacity, low, low + extra)
    texts = [Text(group) for group in GROUPS]
    for which, ids, guess in sequence:
        log.append(texts[which], ids, guess=guess)
        brute.append(which, ids, GROUPS[which], guess)
        assert log.num_tokens == len(brute.alive()) <= capacity
        assert log.count == len(brute.rows)
        for context in asked:
            for scope, group in ((0, 0), (0, 1), (1, 0)):
                draft = log.draft(
                    context, 5, min_probability=floor, path=0.9, noise=noise, group=group, scope=scope
                )  # fmt: skip
                matched, ids, odds, score, ended = brute.draft(context, 5, None if scope else group, noise, floor, 0.9)
                assert (draft.matched, draft.tokens) == (matched, ids)
                assert draft.cut_short == ended
                assert draft.odds == pytest.approx(odds)
                assert draft.score == pytest.approx(score)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 6), writes, contexts)
def test_growing_forgets_nothing(low, extra, sequence, asked) -> None:
    log = TokenLog(1, low, low + extra, growing=True)
    brute = BruteForceLog(1000, low, low + extra)
    texts = [Text(group) for group in GROUPS]
    for which, ids, guess in sequence:
        log.append(texts[which], ids, guess=guess)
        brute.append(which, ids, GROUPS[which], guess)
    assert log.num_tokens == len(brute.rows)
    for context in asked:
        for group in (0, 1, 2):
            draft = log.draft(context, 5, group=group)
            assert (draft.matched, draft.tokens) == brute.draft(context, 5, group, None, 0.0)[:2]


def test_length_factor_counts_matched_tokens_without_guessed_ones() -> None:
    log, text = TokenLog(64, 1, 8), Text()
    log.append(text, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert log.draft([0, 2, 3], 9, factor=1.5).tokens == [4, 5, 6]
    assert log.draft([0, 2, 3], 2, factor=1.5).tokens == [4, 5]
    assert log.draft([1, 2, 3], 9, factor=1.0, drafted=1).tokens == [4], "one of the two that two tokens allow is there"
    assert log.draft([0, 2, 3], 9, factor=1.0, drafted=2).tokens == [], "only guesses match"
    assert log.draft([0, 2, 3], 0).tokens == []


def test_only_the_latest_occurrences_vote() -> None:
    log = TokenLog(4096, 1, 4)
    for token in [7] * 100 + [8] * (MAX_VOTES // 2 + 1):
        log.append(Text(), [5, token])
    assert log.draft([5], 1).tokens == [8]
    assert log.draft([5], 1).odds == [(MAX_VOTES // 2 + 1) / (MAX_VOTES + 0.5)]


def test_a_large_log_finds_what_a_small_one_finds() -> None:
    """Hash collisions and overwritten buckets in a log that is overwritten many times."""
    log, brute = TokenLog(50, 2, 4, scopes=2), BruteForceLog(50, 2, 4)
    texts = [Text(n % 3) for n in range(6)]
    for number in range(2000):
        which, ids = number * 7 % 6, [number * number % 11 % 8, number % 5]
        log.append(texts[which], ids)
        brute.append(which, ids, which % 3)
        if number % 50 == 49:
            brute.rows = brute.rows[-200:]
            for shift, row in enumerate(brute.rows):
                row.number = shift
        if number % 7 == 0:
            context = [row.token for row in brute.alive() if row.text == which]
            for scope in (0, 1):
                draft = log.draft(context, 4, group=which % 3, scope=scope)
                assert (draft.matched, draft.tokens) == brute.draft(context, 4, None if scope else which % 3, None, 0)[
                    :2
                ]
    assert log.num_tokens == 50
    assert log.remembers(log.count - 50) and not log.remembers(log.count - 51) and not log.remembers(log.count)


def test_bytes_are_reported_and_bounded() -> None:
    log, text = TokenLog(1000, 2, 8, scopes=2), Text()
    before = log.nbytes
    for _ in range(50):
        log.append(text, list(range(100)))
    assert log.nbytes == before == 1000 * 4 * (4 + 6) + 1024 * 4 * 6
