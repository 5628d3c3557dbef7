"""The lookup methods against a brute-force reading of their rule, their sources, and their life cycle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import _lookup_kernels as kernels
from specactor_ray.draft.lookup import LookupProposer, NgramProposer, SuffixProposer
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.transport.messages import FinishedOutput
from tests.by_name import ByName

GREEDY = SamplingParams(temperature=0.0)
LONG = SamplingParams(temperature=0.0, max_tokens=10_000)


def ngram(*arguments: int, **limits: int) -> ByName:
    return ByName(NgramProposer(*arguments, **limits))


def suffix(*arguments: int, factor: float = 2.0, floor: float = 0.1, **limits: int) -> ByName:
    class Limited(SuffixProposer):
        length_factor, min_probability = factor, floor

    return ByName(Limited(*arguments, **limits))


both = pytest.mark.parametrize("method", [ngram, suffix])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Row:
    number: int
    text: int
    token: int
    group: int
    guess: bool


class BruteForceLog:
    """What `TokenLog` promises, by looking at every token: rows in the order they were written, of which the last
    `capacity` are known."""

    def __init__(self, capacity: int, low: int, high: int) -> None:
        self.capacity, self.low, self.high = capacity, low, high
        self.rows: list[Row] = []

    def append(self, text: int, tokens: Sequence[int], group: int, guess: bool = True) -> None:
        for token in tokens:
            self.rows.append(Row(len(self.rows), text, token, group, guess))

    def alive(self) -> list[Row]:
        return self.rows[-self.capacity :]

    def occurrences(self, context: Sequence[int], group: int | None) -> tuple[int, list[Row]]:
        """(longest match, its rows from the latest on); any group for None."""
        found = []
        for row in reversed(self.alive()):
            if row.guess and group in (None, row.group):
                before = [r.token for r in self.alive() if r.text == row.text and r.number < row.number]
                length = 0
                while (
                    length < min(len(before), len(context), self.high) and before[-1 - length] == context[-1 - length]
                ):
                    length += 1
                found.append((length, row))
        longest = max((length for length, _ in found), default=0)
        return (longest, [row for length, row in found if length == longest]) if longest >= self.low else (0, [])

    def following(self, row: Row) -> Row | None:
        return next((r for r in self.rows[row.number + 1 :] if r.text == row.text), None)

    def draft(
        self, context: Sequence[int], limit: int, group: int | None, floor: float
    ) -> tuple[int, list[int], float]:
        """(match length, tokens, score)."""
        length, rows = self.occurrences(context, group)
        tokens: list[int] = []
        score, path = 0.0, 1.0
        while rows and len(tokens) < limit:
            votes: dict[int, int] = {}
            for row in rows:
                votes[row.token] = votes.get(row.token, 0) + 1
            winner = max(votes, key=votes.__getitem__)
            path *= votes[winner] / (len(rows) + kernels.DOUBT)
            if path < floor:
                break
            tokens.append(winner)
            score += path
            rows = [n for row in rows if row.token == winner and (n := self.following(row)) is not None]
        return length, tokens, score


class Open:
    """A request as the rule sees it."""

    def __init__(self, prompt: tuple[int, ...], committed: list[int], sampling: SamplingParams, window: int) -> None:
        self.prompt, self.committed, self.sampling, self.window = prompt, committed, sampling, window
        self.tail: list[int] = []
        self.text = -1
        self.written: list[int] = []


class Reference:
    """The documented rule, word for word, without any index. `factor` 0: no limit; `runs`: looks at all outputs."""

    def __init__(self, low: int, high: int, kept: int, factor: float, floor: float, runs: bool) -> None:
        self.low, self.high, self.factor, self.floor, self.runs = low, high, factor, floor, runs
        self.run = BruteForceLog(kept, low, high) if kept else None
        self.groups: dict[tuple[int, ...], int] = {}
        self.texts = itertools.count()

    def open(self, request_id: str, request: Open) -> None:
        if self.run is None:
            return
        group = self.groups.setdefault(request.prompt, len(self.groups))
        request.text = next(self.texts)
        self.run.append(request.text, request.prompt[-self.high :], group, guess=False)
        self.write(request)

    def write(self, request: Open) -> None:
        if self.run is not None and request.text >= 0:
            fresh = request.committed[len(request.written) :]
            request.written = request.written + fresh
            self.run.append(request.text, fresh, self.groups[request.prompt])

    def forget(self, requests: dict[str, Open]) -> None:
        if self.run is not None:
            self.run.rows.clear()
            self.groups.clear()
        for request in requests.values():
            request.text = -1

    def fill(self, request: Open) -> None:
        guessed, position = len(request.tail), len(request.committed) + len(request.tail)
        own = BruteForceLog(10**6, self.low, self.high)
        own.append(0, [*request.prompt, *request.committed], 0)
        room = min(request.window - guessed, request.sampling.max_tokens - position)
        context = [*request.prompt, *request.committed, *request.tail]
        best = (0, list[int](), 0.0)
        sources: list[tuple[BruteForceLog, int | None]] = [(own, 0)]
        if self.run is not None and request.text >= 0:
            sources += [(self.run, self.groups[request.prompt])] + [(self.run, None)] * self.runs
        for log, group in sources:
            matched, _ = log.occurrences(context, group)
            limit = min(room, int(self.factor * max(matched - guessed, 0)) - guessed) if self.factor else room
            draft = log.draft(context, limit, group, self.floor)
            if draft[2] > best[2] and (not best[1] or matched >= best[0]):
                best = draft
        request.tail += best[1]


class Follower:
    """Drives a proposer and the reference alike, and compares them."""

    def __init__(self, proposer: ByName, reference: Reference) -> None:
        self.proposer, self.reference = proposer, reference
        self.requests: dict[str, Open] = {}
        self.dirty: list[str] = []

    def open(self, name: str, prompt: tuple[int, ...], committed: list[int], sampling: Any, window: int) -> None:
        self.end(name)
        self.proposer.open(name, prompt, committed, sampling, window)
        self.requests[name] = Open(prompt, committed, sampling, window)
        self.reference.open(name, self.requests[name])
        self.dirty.append(name)

    def extend(self) -> None:
        assert sorted(self.proposer.extend()) == sorted(self.dirty)
        for each in self.dirty:
            self.reference.fill(self.requests[each])
        self.dirty = []

    def end(self, name: str, finished: bool = False) -> None:
        self.requests.pop(name, None)
        self.dirty = [r for r in self.dirty if r != name]

    def close(self, name: str, finished: bool) -> None:
        self.proposer.close(name, finished)
        self.end(name, finished)

    def commit(self, name: str, fresh: list[int], overlap: int = 0) -> None:
        r = self.requests[name]
        overlap = min(len(r.committed), overlap)
        start = len(r.committed) - overlap
        assert self.proposer.commit(name, start, r.committed[start:] + fresh) is True
        agreed = r.tail[: len(fresh)] == fresh[: len(r.tail)]
        r.tail = r.tail[len(fresh) :] if agreed else []
        r.committed = r.committed + fresh
        self.reference.write(r)
        self.dirty += [name] if fresh and name not in self.dirty else []

    def compare(self) -> None:
        for each, r in self.requests.items():
            assert self.proposer.tail(each) == (len(r.committed), tuple(r.tail))
            assert len(r.tail) <= r.window
        kept = self.reference.run.alive() if self.reference.run else []
        assert self.proposer.history_tokens == len(kept)


def follower(method: Any, low: int, high: int, kept: int, factor: float, floor: float) -> Follower:
    if method is suffix:
        proposer = suffix(low, high, kept, factor=factor, floor=floor)
        return Follower(proposer, Reference(low, high, kept, factor, floor, True))
    return Follower(ngram(low, high, kept), Reference(low, high, kept, 0.0, 0.0, False))


tokens = st.integers(0, 2)
prompts = st.lists(tokens, min_size=1, max_size=10).map(tuple)
kinds = [
    "open", "commit", "commit", "commit", "late", "gap", "extend", "extend", "close", "stop", "forget"
]  # fmt: skip
operations = st.lists(
    st.tuples(
        st.sampled_from(kinds), st.sampled_from("abc"), st.integers(0, 6), st.lists(tokens, min_size=1, max_size=5),
        st.integers(0, 2),
    ),
    min_size=6,
    max_size=26,
)  # fmt: skip


@both
@settings(max_examples=130, deadline=None)
@given(
    low=st.integers(1, 3), extra=st.integers(0, 4), kept=st.sampled_from([0, 1, 12, 40, 4000]),
    factor=st.sampled_from([1.0, 2.5]), floor=st.sampled_from([0.0, 0.15]),
    window=st.integers(0, 6), known_prompts=st.lists(prompts, min_size=1, max_size=2), sequence=operations,
)  # fmt: skip
def test_tails_are_those_of_the_rule(
    method: Any, low: int, extra: int, kept: int, factor: float, floor: float, window: int,
    known_prompts: list[tuple[int, ...]], sequence: list[Any],
) -> None:  # fmt: skip
    f = follower(method, low, low + extra, kept, factor, floor)
    for kind, name, number, ids, which in sequence:
        if kind == "open":
            prompt = known_prompts[which % len(known_prompts)]
            f.open(name, prompt, list(ids), SamplingParams(max_tokens=14), window)
        elif kind == "extend":
            f.extend()
        elif kind in ("close", "stop"):
            f.close(name, finished=kind == "close")
        elif kind == "forget" and number == 0:
            f.proposer.forget_history()
            f.reference.forget(f.requests)
        elif name not in f.requests:
            assert f.proposer.commit(name, 0, ids) is False
        elif kind == "gap":
            assert f.proposer.commit(name, len(f.requests[name].committed) + 1 + which, ids) is False
        elif kind == "late":
            committed = f.requests[name].committed
            start, stop = max(0, len(committed) - number), max(0, len(committed) - which)
            assert f.proposer.commit(name, start, committed[start:stop]) is True
        else:  # half of the commits agree with the tail, as far as they go
            f.commit(name, (f.requests[name].tail + ids)[:number] if which else ids, overlap=which)
        f.compare()


def drafted(proposer: ByName, request_id: str = "r") -> list[int]:
    proposer.extend()
    return list(proposer.tail(request_id)[1])


def learn(proposer: ByName, prompt: list[int], *outputs: list[int]) -> None:
    for number, output in enumerate(outputs):
        proposer.open(f"earlier{number}", prompt, output, LONG, 4)
        proposer.close(f"earlier{number}")


# ---- both ----


@both
def test_only_the_latest_occurrences_vote(method: Any) -> None:
    proposer = method(2, 4, max_batch=200)
    learn(proposer, [1, 2], *[[7]] * 100, *[[8]] * (kernels.MAX_VOTES // 2 + 1))
    proposer.open("r", [1, 2], [], GREEDY, 1)
    assert drafted(proposer) == [8]


@both
def test_nothing_is_compiled_once_it_drafts(method: Any) -> None:
    """A kernel that is compiled in the middle of a rollout keeps verifiers waiting."""
    compiled_ones = [kernel for kernel in vars(kernels).values() if hasattr(kernel, "signatures")]
    proposer = method(1, 8, 1000, 64)
    compiled = [list(kernel.signatures) for kernel in compiled_ones]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=500, seed=3)
        proposer.open(f"t{temperature}", [*range(200)] * 2, [1, 2], sampling, 6)
        proposer.extend()
        assert proposer.commit(f"t{temperature}", 2, [3])
        proposer.extend()
        assert proposer.tail(f"t{temperature}")[1]
        proposer.close(f"t{temperature}")
        proposer.learn([FinishedOutput("other", (1, 2), ints(3, 4))])
    assert compiled_ones and [list(kernel.signatures) for kernel in compiled_ones] == compiled


@pytest.mark.parametrize(("name", "kept"), [("ngram", 1 << 16), ("suffix", 1 << 20)])
def test_keys_of_the_configuration(name: str, kept: int) -> None:
    proposer = ByName(build_proposer(DrafterConfig(method=name, history_tokens=3, max_batch=8), TargetConfig(), "cpu"))
    assert isinstance(proposer.proposer, LookupProposer) and (proposer.method, proposer.vocab_size) == (name, None)
    proposer.open("a", [1, 2], [3, 4, 5, 6], GREEDY, 4)
    assert proposer.history_tokens == 3
    default = ByName(build_proposer(DrafterConfig(method=name, max_batch=8), TargetConfig(), "cpu"))
    default.open("a", [1, 2], [3] * 70_000, GREEDY, 4)
    assert default.history_tokens == min(70_002, kept)


# ---- the history ----


@both
@given(st.data())
@settings(max_examples=30)
def test_what_others_finished_is_as_if_it_had_been_finished_here(method: Any, data: Any) -> None:
    """Row for row, also where the log is full, and where the output began here."""
    texts = st.lists(st.integers(0, 3), min_size=1, max_size=20)
    outputs = data.draw(st.lists(st.tuples(texts, texts, st.integers(0, 20)), max_size=6))
    told, shown = method(1, 6, 64), method(1, 6, 64)
    for number, (prompt, tokens, known) in enumerate(outputs):
        for one in (told, shown):
            one.open(str(number), prompt, tokens[:known], GREEDY, 4)
            one.close(str(number), finished=False)
        shown.open(str(number), prompt, tokens, GREEDY, 4)
        shown.close(str(number), finished=True)
        told.proposer.learn([FinishedOutput(str(number), tuple(prompt), ints(*tokens))])
    for plane in ("rows", "heads", "count"):
        assert np.array_equal(getattr(told.proposer._log, plane), getattr(shown.proposer._log, plane))
