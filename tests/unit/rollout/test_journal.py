"""The journal: one attempt per request counts, no token twice or out of order, every request ends exactly once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.rollout.trajectory import trajectory_of
from specactor_ray.transport.messages import Finished, Progress, RequestStats, Verified

VERIFIERS = ("v-1#a", "v-1#b", "v-2#c")
OUTPUT = tuple(range(100, 140))
"""What every request's tokens are: the token at a position is a function of the position alone."""


def entry(request_id: str = "r") -> JournalEntry:
    return JournalEntry(request_id, (1, 2, 3), SamplingParams(seed=5), weight_version=7)


def owned(verifier_id: str = "v-1#a") -> Journal:
    """A journal with the first attempt at request `r` under way."""
    journal = Journal()
    journal.add(entry())
    journal.hand_to("r", verifier_id)
    return journal


def progress(start: int, count: int, request_id: str = "r", attempt: int = 1, margins: bool = False) -> Progress:
    return step((request_id, attempt, start, count), margins=margins)


def step(*rows: tuple[str, int, int, int], margins: bool = False) -> Progress:
    """What one step committed: request, attempt, first output position and number of tokens of each row."""
    outputs = [OUTPUT[start : start + count] for _, _, start, count in rows]
    tokens = np.array([token for output in outputs for token in output], np.int32)
    return Progress(
        tuple((name, attempt) for name, attempt, _, _ in rows),
        np.array([start for _, _, start, _ in rows], np.int32),
        np.array([len(output) for output in outputs], np.int32),
        tokens,
        -tokens.astype(np.float32),
        tokens.astype(np.float32) if margins else None,
    )


def finished(num_tokens: int, request_id: str = "r", error: str = "", attempt: int = 1) -> Finished:
    return Finished(request_id, "error" if error else "stop", error, num_tokens, attempt)


class TestProgress:
    @pytest.mark.parametrize(("drafts", "mask"), [(3, "011010"), (4, "011011")])
    def test_the_steps_tell_draft_tokens(self, drafts: int, mask: str) -> None:
        """Of each step all but its last token, unless the output ended with a draft token."""
        journal = owned()
        for start, count in ((0, 1), (1, 3), (4, 2)):
            journal.progress(progress(start, count))
        end = journal.entries["r"]
        end.count_drafts("suffix", 9, drafts)
        output = trajectory_of(end, None)
        assert list(output.steps) == [1, 3, 2] and output.stats.steps == 3
        assert output.drafted == [bit == "1" for bit in mask]

    def test_drafts_are_summed_over_attempts_by_method(self) -> None:
        """Of the present attempts alone, and not where a step has a gap."""
        journal = Journal()
        for name in "abc":
            journal.add(entry(name))
            journal.hand_to(name, "v-1#a")

        def verified(message: Progress, names: tuple[str, ...], *rows: tuple[int, int, int]) -> Progress:
            method, drafted, accepted = np.array(rows).T
            columns = method.astype(np.int8), drafted.astype(np.int16), accepted.astype(np.int16)
            return replace(message, verified=Verified(names, *columns))

        first = step(("a", 1, 0, 3), ("b", 2, 0, 3), ("c", 1, 1, 3))
        journal.progress(verified(first, ("ngram", "eagle"), (0, 4, 2), (0, 9, 2), (1, 9, 2)))
        journal.release("a")
        journal.hand_to("a", "v-2#c")
        second = step(("a", 2, 3, 2), ("b", 1, 0, 1), ("c", 1, 0, 1))
        journal.progress(verified(second, ("eagle", "ngram"), (0, 3, 1), (1, 0, 0), (1, 0, 0)))
        journal.progress(verified(step(("a", 2, 5, 1), ("c", 1, 1, 2)), ("eagle", "ngram"), (1, 2, 0), (1, 300, 1)))
        stats = [journal.entries[name].stats for name in "abc"]
        assert stats[0] == RequestStats(3, 9, 3, 0, {"ngram": (6, 2), "eagle": (3, 1)})
        assert stats[1:] == [RequestStats(1), RequestStats(2, 300, 1, 0, {"ngram": (300, 1)})]
        assert journal.discarded_tokens == 6
        total = RequestStats.total(stats)
        assert total == RequestStats(6, 309, 4, 0, {"ngram": (306, 3), "eagle": (3, 1)})

    def test_rows_of_one_step_are_judged_one_by_one(self) -> None:
        journal = Journal()
        for name in "abcd":
            journal.add(entry(name))
            journal.hand_to(name, "v-1#a")
        rows = (("a", 1, 0, 2), ("b", 2, 0, 3), ("c", 1, 1, 1), ("x", 1, 0, 1), ("d", 1, 0, 4))
        assert journal.progress(step(*rows, margins=True)) == ["c"]
        assert [tuple(journal.entries[name].token_ids) for name in "abcd"] == [OUTPUT[:2], (), (), OUTPUT[:4]]
        margins = [journal.entries[name].margins for name in "abcd"]
        assert margins == [[100.0, 101.0], None, None, [*map(float, OUTPUT[:4])]]
        assert journal.entries["a"].logprobs == [-100.0, -101.0] and journal.committed_tokens == 6
        assert not journal.progress(step(("a", 1, 2, 1), margins=True))
        assert journal.entries["a"].margins == [100.0, 101.0, 102.0]

    def test_extreme_values_are_kept_and_a_token_takes_few_bytes(self) -> None:
        journal, extreme = owned(), 2**31 - 1
        for start in range(0, 4000, 4):
            numbers = np.arange(start, start + 4, dtype=np.int32)
            rows = (("r", 1),), np.array([start], np.int32), np.array([4], np.int32)
            journal.progress(Progress(*rows, extreme - numbers, np.float32(-1e-30) * numbers))
        kept = journal.entries["r"]
        assert kept.token_ids == [extreme - number for number in range(4000)] and kept.margin_bytes is None
        assert kept.logprobs == [float(np.float32(-1e-30) * np.float32(number)) for number in range(4000)]
        assert type(kept.token_ids[0]) is int and type(kept.logprobs[0]) is float
        assert sys.getsizeof(kept.records) <= 12 * kept.num_tokens


@dataclass
class _Model:
    """What the journal should know of one request."""

    owner: str | None = None
    attempt: int = 0
    length: int = 0
    steps: int = 0


@dataclass
class _Expected:
    requests: dict[str, _Model] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    discarded: int = 0


class JournalMachine(RuleBasedStateMachine):
    """Any messages of any attempt in any order, checked against a model of a few lines."""

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
    def hand_to(self, name: str, verifier: str) -> None:
        model = self.model.requests.get(name)
        if model is not None:
            request = self.journal.hand_to(name, verifier)
            model.owner, model.attempt = verifier, model.attempt + 1
            assert (request.committed_token_ids, request.attempt) == (OUTPUT[: model.length], model.attempt)
            assert (request.prompt_token_ids, request.weight_version) == ((1, 2, 3), 7)

    @rule(name=requests)
    def release(self, name: str) -> None:
        if name in self.model.requests:
            self.journal.release(name)
            self.model.requests[name].owner = None

    @rule(name=requests, age=st.integers(0, 2), shift=st.integers(-4, 4), count=st.integers(0, 5))
    def progress(self, name: str, age: int, shift: int, count: int) -> None:
        model = self.model.requests.get(name) or _Model()
        start = max(0, model.length + shift)
        current = model.owner is not None and age == 0
        gapped = self.journal.progress(progress(start, count, name, model.attempt - age))
        assert gapped == [name] * (current and start != model.length)
        grown = len(OUTPUT[start : start + count])
        if current and not gapped:
            model.length += grown
            model.steps += 1
            self.model.tokens += grown
        else:
            self.model.discarded += grown

    @rule(name=requests, age=st.integers(0, 2), missing=st.integers(-2, 2), bad=st.booleans())
    def finish(self, name: str, age: int, missing: int, bad: bool) -> None:
        model = self.model.requests.get(name) or _Model()
        message = finished(model.length + missing, name, "no room" if bad else "", model.attempt - age)
        ended = self.journal.finish(message)
        assert (ended is not None) == (model.owner is not None and age == 0 and (bad or missing == 0))
        if ended is not None:
            self._end(name)

    @rule(name=consumes(requests))
    def end(self, name: str) -> None:
        if name in self.model.requests:
            self.journal.end(finished(0, name, "its verifier died"))
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
            assert len(kept.logprobs) == model.length and kept.stats == RequestStats(model.steps)
            assert self.journal.is_current(name, model.attempt) == (model.owner is not None)
        assert self.journal.committed_tokens == self.model.tokens
        assert self.journal.discarded_tokens == self.model.discarded
        assert set(self.model.ended.values()) <= {1}, "a request ended twice"
        for verifier in VERIFIERS:
            mine = {name for name, model in self.model.requests.items() if model.owner == verifier}
            assert {one.request_id for one in self.journal.owned_by(verifier)} == mine
            assert self.journal.load(verifier) == len(mine)


TestAnyOrderOfMessages = JournalMachine.TestCase


def test_versions_end_behind_their_last_token() -> None:
    journal, one = Journal(), entry()
    journal.add(one)
    assert journal.begun == 0
    journal.hand_to("r", "v")
    assert journal.begun == 1
    one.raise_version(8)
    assert one.versions == [] and one.weight_version == 8, "none of its tokens is of the old version"
    assert journal.progress(progress(0, 3)) == [] and one.tokens_from(2) == [(OUTPUT[2], -float(OUTPUT[2]))]
    for _again in range(2):
        one.raise_version(9)
    request = journal.hand_to("r", "w")
    assert one.versions == [(8, 3)] and (request.weight_version, request.committed_token_ids) == (9, OUTPUT[:3])
    assert journal.begun == 1
    journal.end(Finished("r", "abort"))
    assert journal.begun == 0
