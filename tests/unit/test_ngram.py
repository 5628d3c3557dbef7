"""The n-gram proposer against a brute-force reading of its rule, and its life cycle."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.draft.lookup import ngram as module
from specactor_ray.draft.lookup.history import History
from specactor_ray.draft.lookup.ngram import NgramProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.messages import SamplingParams
from tests.by_name import ByName

SAMPLING = SamplingParams()


def ngram(*arguments: int, **limits: int) -> ByName:
    return ByName(NgramProposer(*arguments, **limits))


def occurrences(
    pieces: list[list[int]], suffix: list[int], low: int, high: int, most: int
) -> tuple[int, list[tuple[list[int], int]]]:
    """(longest match, its occurrences from the latest on), by looking at every position."""
    found = []
    for piece in reversed(pieces):
        for end in range(len(piece) - 1, low - 1, -1):
            if len(suffix) >= low and piece[end - low : end] == suffix[-low:]:
                lengths = [n for n in range(low, high + 1) if n <= end and piece[end - n : end] == suffix[-n:]]
                found.append((max(lengths), piece, end))
    found = found[:most]
    longest = max((length for length, _, _ in found), default=0)
    return longest, [(piece, end) for length, piece, end in found if length == longest]


class Reference:
    """The documented rule, word for word, without any index."""

    def __init__(self, low: int, high: int, history_tokens: int, most: int) -> None:
        self.low, self.high, self.history_tokens, self.most = low, high, history_tokens, most
        self.history: list[tuple[tuple[int, ...], list[int]]] = []

    def fill(self, prompt: tuple[int, ...], committed: list[int], tail: list[int], window: int) -> None:
        known = [*prompt, *committed]
        window = min(window, SAMPLING.max_tokens - len(committed))
        while len(tail) < window:
            text = known + tail
            own_length, own = occurrences([known], text, self.low, self.high, self.most)
            pieces = [piece for key, piece in self.history if key == prompt]
            length, others = occurrences(pieces, text, self.low, self.high, self.most)
            if length > own_length:
                following = [piece[end] for piece, end in others]
                most = max(following.count(token) for token in following)
                winner = next(token for token in following if following.count(token) == most)
                piece, end = next((p, e) for p, e in others if p[e] == winner)
                tail.extend(piece[end : end + window - len(tail)])
            elif own:
                start = own[0][1]
                for offset in range(window - len(tail)):
                    tail.append((known + tail)[start + offset])
            else:
                return

    def record(self, prompt: tuple[int, ...], committed: list[int]) -> None:
        lead = list(prompt[-self.high :])
        room = self.history_tokens - len(lead) - 1
        if room < 1 or not committed:
            return
        self.history.append((prompt, lead + committed[:room]))
        while sum(len(piece) + 1 for _, piece in self.history) > self.history_tokens:
            self.history.pop(0)


tokens = st.integers(0, 2)
prompts = st.lists(tokens, max_size=10).map(tuple)
operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "commit", "commit", "commit", "late", "gap", "extend", "extend", "extend", "close", "cancel"]
        ),
        st.sampled_from("abc"),
        st.integers(0, 6),
        st.lists(tokens, min_size=1, max_size=7),
        st.integers(0, 2),
    ),
    min_size=6,
    max_size=40,
)
# Before the random part some outputs are learned, so that history has a say.
learned = st.lists(st.lists(tokens, min_size=3, max_size=12), max_size=5)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0, 20, 60]),
    st.sampled_from([2, 64]),
    st.lists(prompts, min_size=1, max_size=2),
    learned,
    operations,
)
def test_tails_are_those_of_the_rule(low, extra, history_tokens, most, known_prompts, outputs, sequence) -> None:
    high = low + extra
    with mock.patch.object(module, "MAX_CANDIDATES", most):
        proposer = ngram(low, high, history_tokens)
        reference = Reference(low, high, history_tokens, most)
        open_requests: dict[str, tuple[tuple[int, ...], list[int], list[int], int]] = {}
        dirty: list[str] = []
        for number, output in enumerate(outputs):
            prompt = known_prompts[number % len(known_prompts)]
            proposer.open("earlier", prompt, output, SAMPLING, 4)
            proposer.close("earlier")
            reference.record(prompt, output)
        for name, request, number, ids, which in sequence:
            if name == "open":
                prompt = known_prompts[which % len(known_prompts)]
                proposer.open(request, prompt, ids, SAMPLING, number)
                open_requests[request] = (prompt, list(ids), [], number)
                dirty = [r for r in dirty if r != request] + [request]
            elif name == "extend":
                assert sorted(proposer.extend()) == sorted(dirty)
                for each in dirty:
                    prompt, committed, tail, window = open_requests[each]
                    reference.fill(prompt, committed, tail, window)
                dirty = []
            elif name in ("close", "cancel"):
                proposer.close(request, finished=name == "close")
                closed = open_requests.pop(request, None)
                dirty = [r for r in dirty if r != request]
                if closed and name == "close":
                    reference.record(closed[0], closed[1])
            elif request not in open_requests:
                assert proposer.commit(request, 0, ids) is False
            else:
                _, committed, tail, _ = open_requests[request]
                base = len(committed)
                if name == "gap":
                    assert proposer.commit(request, base + 1 + which, ids) is False
                elif name == "late":
                    start, end = max(0, base - number), max(0, base - which)
                    assert proposer.commit(request, start, committed[start:end]) is True
                else:
                    # Half of the commits agree with the tail, as far as they go.
                    fresh = (tail + ids)[:number] if which else ids
                    overlap = min(base, which)
                    assert proposer.commit(request, base - overlap, committed[base - overlap :] + fresh) is True
                    tail[:] = tail[len(fresh) :] if tail[: len(fresh)] == fresh[: len(tail)] else []
                    committed.extend(fresh)
                    if fresh and request not in dirty:
                        dirty.append(request)
            for each, (_, committed, tail, _) in open_requests.items():
                assert proposer.tail(each) == (len(committed), tuple(tail))
            assert proposer.history_tokens <= history_tokens
            assert proposer.history_tokens == sum(len(piece) + 1 for _, piece in reference.history)


def drafted(proposer: ByName, request_id: str = "r") -> list[int]:
    proposer.extend()
    return list(proposer.tail(request_id)[1])


def test_it_is_a_proposer() -> None:
    proposer = ngram()
    assert isinstance(proposer.proposer, Proposer) and (proposer.method, proposer.vocab_size) == ("ngram", None)
    proposer.open("r", [1, 2, 3, 1, 2], [], SAMPLING, 2)
    proposer.extend()
    proposer.load_weights(3, {})
    assert proposer.tail("r") == (0, (3, 1)), "it has no weights"


def test_copies_what_followed_the_longest_match() -> None:
    proposer = ngram(2, 4)
    proposer.open("r", [7, 1, 2, 3, 40, 41, 8, 2, 3, 50, 51, 9], [1, 2, 3], SAMPLING, 3)
    assert drafted(proposer) == [40, 41, 8]


def test_of_equal_matches_the_latest() -> None:
    proposer = ngram(2, 2)
    proposer.open("r", [1, 2, 3, 9, 1, 2, 4, 9], [1, 2], SAMPLING, 2)
    assert drafted(proposer) == [4, 9]


def test_periodic_text_continues_past_its_end() -> None:
    proposer = ngram(2, 8)
    proposer.open("r", [1, 2, 3], [1, 2], SAMPLING, 10)
    assert drafted(proposer) == [3, 1, 2, 3, 1, 2, 3, 1, 2, 3]


def test_refills_behind_a_surviving_tail_and_rolls_back_cleanly() -> None:
    proposer = ngram(2, 8)
    proposer.open("r", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2], SAMPLING, 3)
    assert drafted(proposer) == [3, 4, 5]
    assert proposer.commit("r", 2, [3, 4])
    assert drafted(proposer) == [5, 6, 7]
    assert proposer.commit("r", 4, [9])
    assert drafted(proposer) == []
    assert proposer.commit("r", 5, [1, 2])
    assert drafted(proposer) == [3, 4, 9], "the latest occurrence is the own output; the wrong 5, 6, 7 left no trace"


def test_every_commit_is_answered_once_also_without_a_guess() -> None:
    proposer = ngram()
    proposer.open("r", [1, 2, 3], [], SAMPLING, 4)
    assert proposer.extend() == ["r"]
    assert proposer.extend() == []
    proposer.commit("r", 0, [9])
    assert proposer.extend() == ["r"]
    assert proposer.tail("r") == (1, ())
    proposer.commit("r", 0, [9])
    assert proposer.extend() == [], "a repeated commit asks nothing new"


def test_history_serves_the_same_prompt_only_and_from_its_first_token() -> None:
    proposer = ngram(2, 8)
    prompt, output = [1, 2, 3], [10, 11, 12, 13]
    proposer.open("a", prompt, output, SAMPLING, 4)
    proposer.close("a")
    proposer.open("b", prompt, [], SAMPLING, 6)
    proposer.open("c", [0, 2, 3], [], SAMPLING, 6)
    proposer.extend()
    assert proposer.tail("b") == (0, (10, 11, 12, 13)), "not past the end of that output"
    assert proposer.tail("c") == (0, ())


def test_own_text_is_preferred_at_equal_length_and_takes_over_where_history_ends() -> None:
    proposer = ngram(2, 8)
    prompt = [1, 2, 3, 9, 4, 5, 6, 7]
    proposer.open("a", prompt, [4, 5], SAMPLING, 4)
    proposer.close("a")
    proposer.open("r", prompt, [], SAMPLING, 4)
    assert drafted(proposer) == [4, 5, 6, 7]
    proposer.open("a", [1, 2, 3, 0], [1, 2, 8], SAMPLING, 4)
    proposer.close("a")
    proposer.open("r", [1, 2, 3, 0], [7, 1, 2], SAMPLING, 1)
    assert drafted(proposer) == [3]


def test_history_follows_the_majority_then_the_latest() -> None:
    proposer = ngram(2, 2)
    for output in ([5, 1], [5, 3], [6, 2]):
        proposer.open("a", [1, 2], output, SAMPLING, 4)
        proposer.close("a")
    proposer.open("r", [1, 2], [], SAMPLING, 2)
    assert drafted(proposer) == [5, 3]
    proposer.open("a", [1, 2], [6, 4], SAMPLING, 4)
    proposer.close("a")
    proposer.open("r", [1, 2], [], SAMPLING, 2)
    assert drafted(proposer) == [6, 4]


def test_cancelled_outputs_are_not_learned() -> None:
    proposer = ngram(2, 8)
    proposer.open("a", [1, 2], [10, 11], SAMPLING, 4)
    proposer.close("a", finished=False)
    assert proposer.history_tokens == 0
    proposer.open("r", [1, 2], [], SAMPLING, 4)
    assert drafted(proposer) == []


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_memory_is_bounded_and_freed() -> None:
    history = History(max_tokens=50, min_match=2, max_match=4)
    entries = [history.attach(ints(number, number)) for number in range(4)]
    for round_number in range(40):
        for entry in entries:
            history.record(entry, ints(*[round_number] * 8))
            assert 33 <= history.num_tokens <= 50 or round_number == 0
    for entry in entries:
        history.detach(entry)
    assert len(history) == 4
    other = history.attach(ints(9, 9))
    history.record(other, ints(*[1] * 1000))
    history.detach(other)
    assert (len(history), history.num_tokens) == (1, 50), "a long output keeps its beginning, alone"

    proposer = ngram(history_tokens=0)
    proposer.open("a", [1, 2], [10, 11], SAMPLING, 4)
    proposer.close("a")
    proposer.open("a", [1, 2], [], SAMPLING, 4)
    assert drafted(proposer, "a") == [] and proposer.history_tokens == 0


def test_of_a_history_that_is_full_the_newest_outputs_are_found() -> None:
    """The ring begins anew in the middle of an output."""
    proposer = ngram(2, 4, history_tokens=30)
    for number in range(20):
        first = 10 * number
        proposer.open("a", [1, 2, number], [first, first + 1, first + 2, first + 3], SAMPLING, 4)
        proposer.close("a")
        proposer.open("r", [1, 2, number], [], SAMPLING, 6)
        assert drafted(proposer) == [first, first + 1, first + 2, first + 3]
        assert proposer.history_tokens <= 30
    proposer.open("r", [1, 2, 3], [], SAMPLING, 6)
    assert drafted(proposer) == []


def test_more_requests_than_places_are_answered_without_guesses_until_one_ends() -> None:
    proposer = ngram(2, 4, max_batch=1)
    proposer.open("a", [1, 2, 3, 1, 2], [], SAMPLING, 2)
    proposer.open("b", [1, 2, 3, 1, 2], [3], SAMPLING, 2)
    assert proposer.extend() == ["a", "b"]
    assert proposer.tail("b") == (1, ())
    assert proposer.commit("b", 1, [1, 2]) is True
    assert proposer.extend() == ["b"]
    assert proposer.tail("b") == (3, ())
    proposer.close("a")
    assert proposer.extend() == [], "nothing was committed"
    assert proposer.commit("b", 3, [3]) is True
    assert drafted(proposer, "b") == [1, 2]


def test_reopening_starts_afresh() -> None:
    proposer = ngram(2, 4)
    proposer.open("r", [1, 2, 3], [1, 2], SAMPLING, 4)
    proposer.extend()
    proposer.open("r", [4, 5, 6], [4, 5], SAMPLING, 2)
    assert drafted(proposer) == [6, 4]


@pytest.mark.parametrize("arguments", [(0, 4), (3, 2), (1, 2, -1), (1, 2, 0, 0)])
def test_bad_arguments_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"is -?[0-9]"):
        NgramProposer(*arguments)


def test_no_match_reaches_across_the_ends_of_outputs() -> None:
    proposer = ngram(1, 4)
    for output in ([1, 2, 5], [2, 3]):
        proposer.open("a", [8, 9], output, SAMPLING, 4)
        proposer.close("a")
    proposer.open("r", [8, 9], [5], SAMPLING, 4)
    assert drafted(proposer) == [], "an output that ended there was followed by the lead of the next"
    proposer.open("r", [8, 9], [4, 2], SAMPLING, 1)
    assert drafted(proposer) == [3], "of equal matches the latest"
