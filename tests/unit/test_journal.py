"""The journal: one owner per request, no token twice or out of order, every request ends exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specactor_ray.messages import Finished, Progress, RequestStats, SamplingParams
from specactor_ray.rollout.journal import Journal, JournalEntry

VERIFIERS = ("v-1#a", "v-1#b", "v-2#c")
OUTPUT = tuple(range(100, 140))
"""What every request's tokens are: the token at a position is a function of the position alone."""


def entry(request_id: str = "r") -> JournalEntry:
    return JournalEntry(request_id, (1, 2, 3), SamplingParams(seed=5))


def owned(verifier_id: str = "v-1#a") -> Journal:
    journal = Journal()
    journal.add(entry())
    journal.assign("r", verifier_id)
    return journal


def progress(start: int, count: int, request_id: str = "r", margins: bool = False) -> Progress:
    tokens = OUTPUT[start : start + count]
    logprobs = tuple(-float(token) for token in tokens)
    return Progress(request_id, start, tokens, logprobs, tuple(float(t) for t in tokens) if margins else None)


def finished(num_tokens: int, request_id: str = "r", error: str = "") -> Finished:
    return Finished(request_id, "error" if error else "stop", RequestStats(steps=1), error, num_tokens)


class TestProgress:
    def test_tokens_and_logprobs_are_appended(self) -> None:
        journal = owned()
        assert journal.progress("v-1#a", progress(0, 3)) and journal.progress("v-1#a", progress(3, 1))
        kept = journal.entries["r"]
        assert tuple(kept.token_ids) == OUTPUT[:4]
        assert kept.logprobs == [-100.0, -101.0, -102.0, -103.0]
        assert journal.committed_tokens == 4

    @pytest.mark.parametrize("start", [0, 1, 2, 4, 7], ids=["repeat", "overlap", "overlap", "gap of 1", "gap of 4"])
    def test_anything_but_the_next_position_is_ignored(self, start: int) -> None:
        journal = owned()
        journal.progress("v-1#a", progress(0, 3))
        assert not journal.progress("v-1#a", progress(start, 2))
        assert tuple(journal.entries["r"].token_ids) == OUTPUT[:3]
        assert journal.committed_tokens == 3

    def test_a_stranger_is_ignored(self) -> None:
        journal = owned("v-1#a")
        assert not journal.progress("v-1#b", progress(0, 3))
        assert journal.entries["r"].token_ids == [] and journal.entries["r"].logprobs == []

    def test_a_request_nobody_owns_takes_nothing(self) -> None:
        journal = Journal()
        journal.add(entry())
        assert not journal.progress("v-1#a", progress(0, 1))

    def test_an_unknown_request_is_ignored(self) -> None:
        assert not owned().progress("v-1#a", progress(0, 1, request_id="other"))

    def test_margins_grow_with_the_tokens(self) -> None:
        journal = owned()
        journal.progress("v-1#a", progress(0, 2, margins=True))
        journal.progress("v-1#a", progress(2, 1, margins=True))
        assert journal.entries["r"].margins == [100.0, 101.0, 102.0]


class TestFinish:
    def test_only_with_all_tokens(self) -> None:
        journal = owned()
        journal.progress("v-1#a", progress(0, 2))
        assert journal.finish("v-1#a", finished(3)) is None
        assert "r" in journal.entries
        journal.progress("v-1#a", progress(2, 1))
        ended = journal.finish("v-1#a", finished(3))
        assert ended is not None and ended.finished is not None and ended.finished.finish_reason == "stop"
        assert journal.entries == {}

    def test_only_once(self) -> None:
        journal = owned()
        assert journal.finish("v-1#a", finished(0)) is not None
        assert journal.finish("v-1#a", finished(0)) is None

    def test_not_by_a_stranger(self) -> None:
        journal = owned("v-1#a")
        assert journal.finish("v-1#b", finished(0)) is None
        assert "r" in journal.entries

    def test_an_error_ends_it_with_what_there_is(self) -> None:
        journal = owned()
        journal.progress("v-1#a", progress(0, 2))
        ended = journal.finish("v-1#a", finished(9, error="the prompt is too long"))
        assert ended is not None and tuple(ended.token_ids) == OUTPUT[:2]

    def test_failing_from_the_rollouts_side(self) -> None:
        journal = owned()
        assert journal.fail("r", finished(0, error="gone")).finished == finished(0, error="gone")
        assert journal.entries == {}

    def test_two_requests_of_one_name_are_refused(self) -> None:
        with pytest.raises(ValueError, match="r is in the journal already"):
            owned().add(entry())


class TestMoving:
    def test_the_next_owner_goes_on_after_the_journaled_tokens(self) -> None:
        journal = owned("v-1#a")
        journal.progress("v-1#a", progress(0, 3))
        assert [one.request_id for one in journal.release("v-1#a")] == ["r"]
        request = journal.assign("r", "v-2#c")
        assert request.committed_token_ids == OUTPUT[:3] and request.prompt_token_ids == (1, 2, 3)
        assert not journal.progress("v-1#a", progress(3, 1)), "the old owner came back"
        assert journal.progress("v-2#c", progress(3, 1))
        assert journal.entries["r"].issues == 2

    def test_release_touches_only_that_verifiers_requests(self) -> None:
        journal = Journal()
        for name, owner in (("r", "v-1#a"), ("s", "v-2#c")):
            journal.add(entry(name))
            journal.assign(name, owner)
        journal.release("v-1#a")
        assert (journal.load("v-1#a"), journal.load("v-2#c")) == (0, 1)

    def test_after_a_move_the_old_owner_is_a_stranger(self) -> None:
        journal = owned("v-1#a")
        journal.progress("v-1#a", progress(0, 3))
        request = journal.move("r", "v-2#c")
        assert request.committed_token_ids == OUTPUT[:3]
        assert not journal.progress("v-1#a", progress(3, 2))
        assert journal.finish("v-1#a", finished(3)) is None
        assert journal.progress("v-2#c", progress(3, 1))

    def test_a_move_does_not_count_as_a_death(self) -> None:
        journal = owned("v-1#a")
        for verifier in ("v-2#c", "v-1#b"):
            journal.move("r", verifier)
        entry = journal.entries["r"]
        assert (entry.issues, entry.moves, entry.owners) == (1, 2, {"v-1#a", "v-2#c", "v-1#b"})

    @given(st.integers(0, 30), st.integers(0, 30))
    def test_what_is_handed_over_does_not_change_afterwards(self, before: int, after: int) -> None:
        journal = owned("v-1#a")
        journal.progress("v-1#a", progress(0, before))
        request = journal.assign("r", "v-2#c")
        journal.progress("v-2#c", progress(before, after))
        assert request.committed_token_ids == OUTPUT[:before]


@dataclass
class _Model:
    """What the journal should know of one request."""

    owner: str | None = None
    length: int = 0


@dataclass
class _Expected:
    requests: dict[str, _Model] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    tokens: int = 0


class JournalMachine(RuleBasedStateMachine):
    """Any messages of any verifier in any order, checked against a model of a few lines."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.journal, self.model = Journal(), _Expected()

    @rule(target=requests, number=st.integers(0, 10**6))
    def add(self, number: int) -> str:
        name = f"{number}-{len(self.model.requests) + len(self.model.ended)}"
        self.journal.add(entry(name))
        self.model.requests[name] = _Model()
        return name

    @rule(name=requests, verifier=st.sampled_from(VERIFIERS))
    def assign(self, name: str, verifier: str) -> None:
        if name in self.model.requests:
            request = self.journal.assign(name, verifier)
            assert request.committed_token_ids == OUTPUT[: self.model.requests[name].length]
            self.model.requests[name].owner = verifier

    @rule(name=requests, verifier=st.sampled_from(VERIFIERS))
    def move(self, name: str, verifier: str) -> None:
        if name in self.model.requests:
            issues = self.journal.entries[name].issues
            request = self.journal.move(name, verifier)
            assert request.committed_token_ids == OUTPUT[: self.model.requests[name].length]
            assert self.journal.entries[name].issues == issues
            self.model.requests[name].owner = verifier

    @rule(verifier=st.sampled_from(VERIFIERS))
    def release(self, verifier: str) -> None:
        mine = {name for name, model in self.model.requests.items() if model.owner == verifier}
        assert {one.request_id for one in self.journal.release(verifier)} == mine
        for name in mine:
            self.model.requests[name].owner = None

    @rule(name=requests, verifier=st.sampled_from(VERIFIERS), shift=st.integers(-4, 4), count=st.integers(0, 5))
    def progress(self, name: str, verifier: str, shift: int, count: int) -> None:
        model = self.model.requests.get(name)
        start = max(0, (model.length if model else 0) + shift)
        taken = self.journal.progress(verifier, progress(start, count, name))
        assert taken == (model is not None and model.owner == verifier and start == model.length)
        if model is not None and taken:
            grown = len(OUTPUT[start : start + count])
            model.length += grown
            self.model.tokens += grown

    @rule(name=requests, verifier=st.sampled_from(VERIFIERS), missing=st.integers(-2, 2), bad=st.booleans())
    def finish(self, name: str, verifier: str, missing: int, bad: bool) -> None:
        model = self.model.requests.get(name)
        total = (model.length if model else 0) + missing
        ended = self.journal.finish(verifier, finished(total, name, "no room" if bad else ""))
        allowed = model is not None and model.owner == verifier and (bad or missing == 0)
        assert (ended is not None) == allowed
        if ended is not None:
            self._end(name)

    @rule(name=consumes(requests))
    def fail(self, name: str) -> None:
        if name in self.model.requests:
            self.journal.fail(name, finished(0, name, "its verifier died"))
            self._end(name)

    def _end(self, name: str) -> None:
        del self.model.requests[name]
        self.model.ended[name] = self.model.ended.get(name, 0) + 1

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        assert self.journal.entries.keys() == self.model.requests.keys()
        for name, model in self.model.requests.items():
            kept = self.journal.entries[name]
            assert (kept.owner, tuple(kept.token_ids)) == (model.owner, OUTPUT[: model.length])
            assert len(kept.logprobs) == model.length
        assert self.journal.committed_tokens == self.model.tokens
        assert set(self.model.ended.values()) <= {1}, "a request ended twice"
        for verifier in VERIFIERS:
            assert self.journal.load(verifier) == sum(one.owner == verifier for one in self.model.requests.values())


TestAnyOrderOfMessages = JournalMachine.TestCase
