"""The suffix proposer against a brute-force reading of its rule, its sources, and its life cycle."""

from __future__ import annotations

import itertools
import sys
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup import _token_log_numba
from specactor_ray.draft.lookup.run_history import RunHistory
from specactor_ray.draft.lookup.suffix import SuffixProposer
from specactor_ray.draft.lookup.token_log import Noise
from specactor_ray.draft.registry import build_proposer
from specactor_ray.messages import SamplingParams
from tests.by_name import ByName
from tests.unit.brute_force_log import BruteForceLog

GREEDY = SamplingParams(temperature=0.0)


def suffix(*arguments: float, **limits: float) -> ByName:
    return ByName(SuffixProposer(*arguments, **limits))  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Open:
    """A request as the rule sees it."""

    def __init__(self, prompt: tuple[int, ...], committed: list[int], sampling: SamplingParams, window: int) -> None:
        self.prompt, self.committed, self.sampling, self.window = prompt, committed, sampling, window
        self.tail: list[int] = []
        self.odds: list[float] = []
        self.text = -1
        self.written: list[int] = []


class Reference:
    """The documented rule, word for word, without any index."""

    def __init__(self, low: int, high: int, history_tokens: int, factor: float, floor: float) -> None:
        self.low, self.high, self.factor, self.floor = low, high, factor, floor
        self.run = BruteForceLog(history_tokens, low, high) if history_tokens else None
        self.groups: dict[tuple[int, ...], int] = {}
        self.texts = itertools.count()
        self.unfinished: dict[str, Open] = {}

    def open(self, request_id: str, request: Open) -> None:
        group = self.groups.setdefault(request.prompt, len(self.groups))
        earlier = self.unfinished.pop(request_id, None)
        if earlier and earlier.prompt == request.prompt:
            overlap = min(len(earlier.written), len(request.committed))
            if earlier.written[:overlap] == request.committed[:overlap]:
                request.text, request.written = earlier.text, earlier.written
        if request.text < 0:
            request.text = next(self.texts)
            if self.run is not None:
                self.run.append(request.text, request.prompt[-self.high :], group, guess=False)
        self.write(request)

    def write(self, request: Open) -> None:
        fresh = request.committed[len(request.written) :]
        request.written = request.written + fresh
        if self.run is not None:
            self.run.append(request.text, fresh, self.groups[request.prompt])

    def fill(self, request: Open) -> None:
        guessed, budget = len(request.tail), None
        own = BruteForceLog(10**6, self.low, self.high)
        own.append(0, [*request.prompt, *request.committed], 0)
        while True:
            position = len(request.committed) + len(request.tail)
            room = min(request.window - len(request.tail), request.sampling.max_tokens - position)
            context = [*request.prompt, *request.committed, *request.tail]
            noise = Noise(request.sampling.seed, position) if request.sampling.temperature > 0 else None
            best = (0, list[int](), list[float](), 0.0, False)
            sources = [(own, 0)]
            if self.run is not None:
                sources += [(self.run, self.groups[request.prompt]), (self.run, None)]
            for log, group in sources:
                limit = room
                matched, _ = log.occurrences(context, group)
                if budget is None:
                    limit = min(room, int(self.factor * max(matched - guessed, 0)) - guessed)
                else:
                    limit = min(room, budget - len(request.tail))
                draft = log.draft(context, limit, group, noise, self.floor, prod(request.odds))
                best = draft if draft[3] > best[3] else best
            if not best[1]:
                return
            if budget is None:
                budget = int(self.factor * (best[0] - guessed))
            request.tail += best[1]
            request.odds += best[2]
            if not best[4]:
                return


tokens = st.integers(0, 2)
prompts = st.lists(tokens, max_size=6).map(tuple)
operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "reopen", "commit", "commit", "commit", "late", "gap", "extend", "extend", "close", "stop"]
        ),
        st.sampled_from("abc"),
        st.integers(0, 5),
        st.lists(tokens, min_size=1, max_size=4),
        st.integers(0, 2),
    ),
    min_size=6,
    max_size=22,
)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 2), st.integers(0, 4), st.sampled_from([0, 12, 4000]), st.sampled_from([1.0, 2.5]),
    st.sampled_from([0.0, 0.15]), st.sampled_from([0.0, 1.0]), st.lists(prompts, min_size=1, max_size=2), operations,
)  # fmt: skip
def test_tails_are_those_of_the_rule(low, extra, kept, factor, floor, temperature, known_prompts, sequence) -> None:
    proposer = suffix(low, low + extra, kept, 64, factor, floor)
    reference = Reference(low, low + extra, kept, factor, floor)
    requests: dict[str, Open] = {}
    dirty: list[str] = []

    def end(name: str, finished: bool) -> None:
        closed = requests.pop(name, None)
        if closed and not finished:
            reference.unfinished[name] = closed

    for kind, name, number, ids, which in sequence:
        if kind in ("open", "reopen"):
            end(name, False)
            committed, prompt = list(ids), known_prompts[which % len(known_prompts)]
            if kind == "reopen" and name in reference.unfinished:  # more, or less, of what was there
                earlier = reference.unfinished[name]
                committed, prompt = (earlier.written + ids)[: len(earlier.written) + number - 3], earlier.prompt
            sampling = SamplingParams(temperature, max_tokens=14, seed=ord(name))
            proposer.open(name, prompt, committed, sampling, number)
            requests[name] = Open(prompt, committed, sampling, number)
            reference.open(name, requests[name])
            dirty = [r for r in dirty if r != name] + [name]
        elif kind == "extend":
            assert sorted(proposer.extend()) == sorted(dirty)
            for each in dirty:
                reference.fill(requests[each])
            dirty = []
        elif kind in ("close", "stop"):
            proposer.close(name, finished=kind == "close")
            end(name, kind == "close")
            dirty = [r for r in dirty if r != name]
        elif name not in requests:
            assert proposer.commit(name, 0, ids) is False
        else:
            r = requests[name]
            base = len(r.committed)
            if kind == "gap":
                assert proposer.commit(name, base + 1 + which, ids) is False
            elif kind == "late":
                start, stop = max(0, base - number), max(0, base - which)
                assert proposer.commit(name, start, r.committed[start:stop]) is True
            else:
                fresh = (r.tail + ids)[:number] if which else ids
                overlap = min(base, which)
                assert proposer.commit(name, base - overlap, r.committed[base - overlap :] + fresh) is True
                agreed = r.tail[: len(fresh)] == fresh[: len(r.tail)]
                r.tail, r.odds = (r.tail[len(fresh) :], r.odds[len(fresh) :]) if agreed else ([], [])
                r.committed = r.committed + fresh
                reference.write(r)
                dirty += [name] if fresh and name not in dirty else []
        for each, r in requests.items():
            assert proposer.tail(each) == (len(r.committed), tuple(r.tail))
            assert len(r.tail) <= r.window
        assert proposer.history_tokens == (len(reference.run.alive()) if reference.run else 0) <= kept


def drafted(proposer: ByName, request_id: str = "r") -> list[int]:
    proposer.extend()
    return list(proposer.tail(request_id)[1])


def test_it_is_a_proposer_and_takes_its_keys_from_the_configuration() -> None:
    config = DrafterConfig(method="suffix", max_match=4, history_tokens=3, max_batch=8)
    proposer = ByName(build_proposer(config, TargetConfig(), "cpu"))
    assert isinstance(proposer.proposer, SuffixProposer) and (proposer.method, proposer.vocab_size) == ("suffix", None)
    proposer.open("a", [1, 2], [3, 4, 5, 6], GREEDY, 4)
    assert proposer.history_tokens == 3
    proposer.load_weights(3, {})
    assert proposer.history_tokens == 3, "outputs of another policy are still worth something"
    default = ByName(build_proposer(DrafterConfig(method="suffix", max_batch=8), TargetConfig(), "cpu"))
    default.open("a", [1, 2], [3] * 70_000, GREEDY, 4)
    assert default.history_tokens == 70_002, "more than what ngram keeps by default"


def test_siblings_see_what_is_committed_at_once() -> None:
    proposer = suffix(2, 8)
    proposer.open("a", [1, 2, 3], [], GREEDY, 4)
    proposer.open("b", [1, 2, 3], [], GREEDY, 4)
    assert drafted(proposer, "b") == []
    proposer.commit("a", 0, [10, 11, 12])
    proposer.open("c", [1, 2, 3], [], GREEDY, 4)
    assert drafted(proposer, "c") == [10, 11, 12], "from its first token on"
    proposer.commit("b", 0, [10])
    assert drafted(proposer, "b") == [11, 12]
    proposer.commit("a", 3, [13])
    proposer.commit("b", 1, [11])
    assert drafted(proposer, "b") == [12, 13]


def test_the_majority_leads_and_a_lone_occurrence_is_no_certainty() -> None:
    proposer = suffix(2, 8, min_probability=0.0, length_factor=8)
    for number, output in enumerate(([5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 4])):
        proposer.open(str(number), [1, 2], output, GREEDY, 4)
        proposer.close(str(number))
    proposer.open("r", [1, 2], [5], GREEDY, 3)
    assert drafted(proposer) == [6, 7, 4], "4 and 8 are as frequent; 4 came later"
    odds = proposer._odds[proposer.slots["r"], 3:6]
    assert odds.tolist() == [3 / 3.5, 2 / 3.5, 1 / 2.5]


def test_other_prompts_help_when_nothing_nearer_does() -> None:
    proposer = suffix(2, 8)
    proposer.open("a", [1, 2], [20, 21, 22, 23], GREEDY, 4)
    proposer.open("b", [3, 4], [20, 21], GREEDY, 2)
    assert drafted(proposer, "b") == [22, 23]
    proposer.open("c", [3, 4], [20, 21, 40, 41, 20, 21], GREEDY, 2)
    assert drafted(proposer, "c") == [40, 41], "of equal scores the own text"


def test_the_noise_of_the_target_chooses_among_what_was_seen() -> None:
    """Outputs that split evenly: requests whose noise favours the one or the other are drafted for accordingly."""
    from specactor_ray.sampling.keyed import gumbel_noise

    proposer = suffix(2, 8)
    for number in range(6):
        proposer.open(str(number), [1, 2], [5 + number % 2], GREEDY, 4)
    guesses = set()
    for seed in range(12):
        proposer.open("r", [1, 2], [], SamplingParams(1.0, seed=seed), 1)
        g = gumbel_noise(seed, 0, 8)
        assert drafted(proposer) == [5 if g[5] > g[6] else 6]
        guesses.update(drafted(proposer))
    assert guesses == {5, 6}
    majority = suffix(2, 8, shared_noise=False)
    for number in range(6):
        majority.open(str(number), [1, 2], [5 + number % 2], GREEDY, 4)
    majority.open("r", [1, 2], [], SamplingParams(1.0, seed=1), 1)
    assert drafted(majority) == [6]


def test_drafts_end_where_the_output_must() -> None:
    proposer = suffix(2, 8)
    proposer.open("r", [1, 2, 3, 1, 2, 3], [1, 2], SamplingParams(0.0, max_tokens=4), 8)
    assert drafted(proposer) == [3, 1]


def test_the_oldest_is_forgotten_first() -> None:
    proposer = suffix(2, 2, history_tokens=12)
    proposer.open("a", [1, 2], [10, 11], GREEDY, 4)
    proposer.close("a")
    proposer.open("r", [1, 2], [], GREEDY, 2)
    assert drafted(proposer) == [10, 11]
    for number in range(3):
        proposer.open(f"other{number}", [3, 4], [6, 7, 8, 9], GREEDY, 4)
        proposer.close(f"other{number}")
    proposer.open("s", [1, 2], [], GREEDY, 2)
    assert drafted(proposer, "s") == []
    assert proposer.history_tokens == 12


def test_prompts_are_forgotten_with_their_tokens() -> None:
    history = RunHistory(50, 2, 4, max_unfinished=3)
    held = history.open("held", ints(9, 9), ints(1))
    for number in range(500):
        output = history.open(str(number), ints(number, number), ints(1, 2, 3))
        history.close(str(number), output, finished=number % 2 == 0)
        assert len(history) <= 50 / 5 + 2
        assert len(history._unfinished) <= 3
    history.write(held, ints(1, 5))
    history.close("held", held, finished=True)
    assert len(history._idle) == len(history)


def test_an_output_that_comes_back_does_not_count_twice() -> None:
    proposer = suffix(2, 8)
    proposer.open("a", [1, 2], [5, 6], GREEDY, 4)
    proposer.open("a", [1, 2], [5, 6, 7], GREEDY, 4)
    proposer.close("a", finished=False)
    proposer.open("a", [1, 2], [5], GREEDY, 4)
    assert proposer.history_tokens == 5
    proposer.commit("a", 1, [6, 7, 8])
    assert proposer.history_tokens == 6
    proposer.open("a", [1, 2], [5, 9], GREEDY, 4)
    assert proposer.history_tokens == 10, "another output under the same name is an output of its own"


def test_an_output_whose_prompt_was_forgotten_begins_anew() -> None:
    history = RunHistory(20, 2, 4)
    history.close("a", history.open("a", ints(1, 2), ints(5, 6)), finished=False)
    history.close("b", history.open("b", ints(3, 4), ints(*[7] * 30)), finished=True)
    assert len(history) == 1
    history.open("c", ints(1, 2), ints())
    output = history.open("a", ints(1, 2), ints(5, 6, 8))
    assert history.log.draft([1, 2], 3, group=output.text.group).tokens == [5, 6, 8]
    assert history.log.draft([1, 2], 3, group=history.open("d", ints(1, 2), ints()).text.group).tokens == [5, 6, 8]


def test_a_tail_that_survives_is_lengthened_as_if_it_were_new() -> None:
    """Its confirmed part no longer counts against the probability of the whole."""
    proposer = suffix(2, 8, history_tokens=0, length_factor=2, min_probability=0.2)
    text = list(range(10, 40))
    proposer.open("r", text, text[:8], GREEDY, 20)
    assert drafted(proposer) == text[8:11], "0.67 ** 4 is below 0.2"
    proposer.commit("r", 8, text[8:10])
    assert drafted(proposer) == text[10:13]


def test_without_history_only_the_own_text() -> None:
    proposer = suffix(2, 8, history_tokens=0)
    proposer.open("a", [1, 2], [5, 6, 7], GREEDY, 4)
    proposer.open("b", [1, 2], [5, 6], GREEDY, 4)
    assert drafted(proposer, "b") == []
    proposer.open("b", [1, 2], [5, 6, 5], GREEDY, 1)
    proposer.commit("b", 3, [6])
    assert drafted(proposer, "b") == [5]
    assert proposer.history_tokens == 0


def test_a_request_that_gets_a_place_late_brings_all_its_text() -> None:
    proposer = suffix(2, 4, max_batch=1)
    proposer.open("a", [1, 2, 3, 1, 2], [], GREEDY, 2)
    proposer.open("b", [1, 2, 3, 1, 2], [3], GREEDY, 1)
    assert proposer.extend() == ["a", "b"]
    assert proposer.tail("b") == (1, ()) and proposer.history_tokens == 4
    assert proposer.commit("b", 1, [1]) is True
    proposer.close("a")
    assert proposer.commit("b", 2, [2]) is True
    assert drafted(proposer, "b") == [3]
    assert proposer.history_tokens == 4 + 4 + 3, "the ends of both prompts, and the output of the second"


def test_bytes_are_reported() -> None:
    proposer = suffix(2, 8, history_tokens=1000)
    empty = proposer.history_bytes
    assert empty == 1000 * 4 * (4 + 6) + 6 * 1024 * 4
    proposer.open("a", [1] * 500, [2] * 5000, GREEDY, 4)
    assert proposer.history_bytes > empty + 5500 * 4 * 7
    proposer.close("a")
    assert proposer.history_bytes == empty + 400, "one prompt is known"


def test_of_a_long_prompt_a_digest_is_kept() -> None:
    history = RunHistory(1000, 2, 8)
    prompt = np.arange(100_000, dtype=np.int32)
    before = sys.getrefcount(prompt)
    for finished in (False, True):
        history.close("a", history.open("a", prompt, ints(1, 2, 3)), finished)
        assert len(history) == 1 and sys.getrefcount(prompt) == before, "the prompt is kept"
    assert history.nbytes < history.log.nbytes + 1000


@pytest.mark.parametrize(
    "arguments",
    [(0, 4), (3, 2), (1, 2, -1), (1, 2, 0, 0), (1, 2, 0, 1, 0.0), (1, 2, 0, 1, 1.0, 1.0), (1, 2, 0, 1, 1.0, -0.1)],
)
def test_bad_arguments_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"is -?[0-9]"):
        SuffixProposer(*arguments)


def test_nothing_is_compiled_once_it_drafts() -> None:
    """A kernel that is compiled in the middle of a rollout keeps verifiers waiting."""
    kernels = [kernel for kernel in vars(_token_log_numba).values() if hasattr(kernel, "signatures")]
    proposer = suffix(1, 8, 1000, 64)
    compiled = [list(kernel.signatures) for kernel in kernels]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=500, seed=3)
        proposer.open(f"t{temperature}", [*range(200)] * 2, [1, 2], sampling, 6)
        proposer.extend()
        assert proposer.commit(f"t{temperature}", 2, [3])
        proposer.extend()
        assert proposer.tail(f"t{temperature}")[1]
    assert kernels and [list(kernel.signatures) for kernel in kernels] == compiled
