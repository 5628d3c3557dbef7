"""What every proposer keeps to: the package's, the simulator's, and those of a user's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup import NgramProposer, SuffixProposer
from specactor_ray.draft.model import DraftModelProposer, ModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.rows import RowProposer
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.models import SimulatedProposer
from specactor_ray.simulation.world import World
from tests.by_name import ByName
from tests.fakes import own_proposers as own
from tests.fakes.loops import eagle, ragged
from tests.number_text import HashedText
from tests.tiny import tiny_draft

CONFIG = SimpleNamespace(max_batch=None)
STATES = np.random.default_rng(0).standard_normal((400, 192)).astype(np.float32)
MAX_TOKENS = 60


def clock() -> VirtualClock:
    return VirtualClock(Kernel(0), Process("d"))


def simulated(method: str) -> SimulatedProposer:
    return SimulatedProposer(method, clock(), World(HashedText()))


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "draft_model": lambda: DraftModelProposer(ragged(tiny_draft())),
    "eagle": eagle,
    "simulated model": lambda: simulated("draft_model"),
    "simulated lookup": lambda: simulated("ngram"),
    "own model": lambda: own.Model(CONFIG),
    "own lookup": lambda: own.Lookup(CONFIG),
    "own learner": lambda: own.Learner(CONFIG),
    "own reader": lambda: own.Reader(CONFIG),
}
every = pytest.mark.parametrize("name", PROPOSERS)


class Request:
    """A request as the proposer has to see it."""

    def __init__(self, rng: random.Random) -> None:
        self.prompt = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        self.committed = [rng.randrange(4) for _ in range(rng.choice([0, 0, 3]))]
        self.sent = 0
        self.answered = False

    def states(self) -> tuple[int, np.ndarray]:
        begin, self.sent = self.sent, len(self.prompt) + len(self.committed) - 1
        return begin, STATES[begin : self.sent]


class Driver:
    """Drives a proposer and compares it with a list of requests after every call."""

    def __init__(self, proposer: Proposer, seed: int, window: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.window = self.rng.randint(1, 6) if window is None else window
        self.proposer, self.by_name = proposer, ByName(proposer, self.window)
        self.requests: dict[str, Request] = {}
        self.guessed = 0

    def open(self, name: str) -> None:
        request = self.requests[name] = Request(self.rng)
        sampling = SamplingParams(self.rng.choice([0.0, 1.0]), max_tokens=MAX_TOKENS, seed=int(name))
        self.by_name.open(name, request.prompt, request.committed, sampling, self.window)
        self.feed(name)
        assert self.tails()[name] == []

    def close(self, name: str, finished: bool) -> None:
        self.requests.pop(name, None)
        self.by_name.close(name, finished)

    def feed(self, name: str) -> None:
        if self.proposer.traits.reads_features:
            self.by_name.add_features(name, *self.requests[name].states())

    def tails(self) -> dict[str, list[int]]:
        """Of all requests, after a look at their form."""
        table, tails = self.by_name.table, {}
        for name, request in self.requests.items():
            counts, lengths, tokens = table.tails(0, np.array([self.by_name.slots[name]], np.int32))
            assert counts[0] == len(lengths) and lengths.sum() == len(tokens) and lengths.max() <= self.window
            assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < (self.proposer.vocab_size or 2**31)
            base, tail = self.by_name.tail(name)
            assert base == len(request.committed) and len(tail) == lengths[0]
            tails[name] = list(tail)
        return tails

    def extend(self) -> list[str]:
        changed = self.by_name.propose()
        assert changed.dtype == np.int32 and changed.ndim == 1
        names = [self.by_name.table.requests[row].request_id for row in changed.tolist()]
        assert len(set(names)) == len(changed) and set(names) <= self.requests.keys()
        for name in names:
            self.requests[name].answered = True
        self.guessed += sum(map(len, self.tails().values()))
        return names

    def rest(self) -> None:
        """Until nothing is left to do; then everything has been answered."""
        for _ in range(200):
            if not self.extend():
                assert all(request.answered for request in self.requests.values())
                return
        raise AssertionError("extend never came to rest")

    def commit(self, names: list[str]) -> None:
        """New, repeated, late, overlapping and gapped commits, of closed requests too."""
        for name in names:
            request, before = self.requests.get(name), self.tails()
            if request is None:
                assert not self.by_name.commit(name, self.rng.randrange(3), [1, 2])
                continue
            base, kind = len(request.committed), self.rng.choice(["new", "new", "new", "late", "gap", "other"])
            fresh: list[int] = []
            if kind == "other" and base:  # it contradicts the last token
                assert not self.by_name.commit(name, base - 1, [request.committed[-1] + 1, 1])
            elif kind in ("gap", "other"):
                assert not self.by_name.commit(name, base + self.rng.randint(1, 5), [1])
            elif kind == "late":
                start = self.rng.randint(0, base)
                assert self.by_name.commit(name, start, request.committed[start : self.rng.randint(start, base)])
            else:
                right = before[name][: self.rng.randint(0, len(before[name]))]
                wrong = [self.rng.randrange(4) for _ in range(self.rng.randint(0, 2))]
                fresh = (right + wrong)[: MAX_TOKENS - base]
                start = self.rng.randint(max(base - 3, 0), base)
                assert self.by_name.commit(name, start, request.committed[start:] + fresh)
                request.committed += fresh
                request.answered &= not fresh
            old = before[name]
            agrees = old[: len(fresh)] == fresh[: len(old)]
            assert self.tails() == {**before, name: old[len(fresh) :] if agrees else []}
            self.feed(name)


def run(name: str, work: Callable[[Proposer], None]) -> None:
    """The simulator's take time, in a process of their own."""
    proposer: Any = PROPOSERS[name]()
    if not hasattr(proposer, "_clock"):
        work(proposer)
        return
    proposer._clock.spawn(lambda: work(proposer), "work")
    proposer._clock.kernel.run()
    assert not proposer._clock.kernel.crashes


@every
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_tails_follow_what_is_committed(name: str, seed: int) -> None:
    def work(proposer: Proposer) -> None:
        driver = Driver(proposer, seed)
        rng, names = driver.rng, list(map(str, range(8)))
        for _ in range(60):
            one = rng.choice(names)
            match rng.choice(["open", "open", "close", "commit", "commit", "commit", "extend", "extend", "rest"]):
                case "open":
                    driver.open(one)
                case "close":
                    driver.close(one, rng.random() < 0.5)
                case "commit":
                    driver.commit(rng.sample(names, rng.randint(1, 8)))
                case "extend":
                    driver.extend()
                case "rest":
                    driver.rest()
        driver.rest()
        assert driver.guessed > 10, "nothing is compared with nothing"
        for one in rng.sample(names, 8):
            driver.close(one, finished=True)
            driver.rest()
        assert not len(driver.by_name.propose())
        driver.open("3")
        driver.rest()

    run(name, work)


@every
def test_requests_beyond_the_places_are_answered_and_get_the_next_place(name: str) -> None:
    def work(proposer: Any) -> None:
        proposer._places = 1
        driver = Driver(proposer, 5, window=6)
        for one in "012":
            driver.open(one)
        driver.rest()
        assert proposer._placed.tolist()[:3] == [True, False, False]
        driver.close("0", finished=True)
        for one in "21":
            taken = driver.by_name.commit(one, len(driver.requests[one].committed), [1])
            assert taken == (one == "1" or not proposer.traits.reads_features)
            driver.requests[one].committed.append(1)
            driver.rest()
        assert proposer._placed.tolist()[:3] == [False, False, True] and proposer._places == 0
        for one in "12":
            driver.close(one, finished=False)
        assert proposer._places == 1
        if isinstance(proposer, ModelProposer):
            assert proposer._cache.free_slots == proposer._cache.slots, "cache was leaked"

    run(name, work)


@every
def test_a_request_that_is_released_and_assigned_again_is_drafted_for_again(name: str) -> None:
    """Without a call in between: its tail is gone, and no commit says so."""

    def work(proposer: Any) -> None:
        driver = Driver(proposer, 3, window=6)
        for one in "012":
            driver.open(one)
        driver.rest()
        before, row = driver.tails(), driver.by_name.slots["1"]
        driver.by_name.table.release(0, row)
        driver.by_name.table.assign(0, row)
        assert driver.tails() == {**before, "1": []}
        driver.requests["1"].answered = False
        if proposer.traits.reads_features:  # it asks for the hidden states again
            driver.extend()
            assert driver.by_name.view.lost == {row}
            driver.by_name.view.lost.clear()
            driver.requests["1"].sent = 0
            driver.feed("1")
        driver.rest()
        assert driver.tails() == before

    run(name, work)


@every
def test_after_an_error_a_proposer_begins_anew(name: str) -> None:
    def work(proposer: Any) -> None:
        driver, extend = Driver(proposer, 2), proposer.extend
        driver.open("0")
        driver.rest()
        proposer.extend = None
        runner = DraftRunner("d", proposer)
        assert not len(runner.run(driver.by_name.view, driver.by_name.rows)) and len(runner.failures) == 1
        assert driver.by_name.view.lost == {0} and not driver.tails()["0"]
        driver.by_name.view.lost.clear()
        proposer.extend, driver.requests["0"].sent = extend, 0
        driver.feed("0")
        driver.open("1")
        driver.commit(["0", "1"])
        driver.rest()
        for one in "01":
            driver.close(one, finished=True)
        assert proposer._places == 64

    run(name, work)


@pytest.mark.parametrize("guess", [[2**40], ["x"], None, [[1, 2]]])
def test_a_guess_that_makes_no_sense_is_none_and_costs_the_others_nothing(
    guess: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(RowProposer):
        method, vocab_size = "own", None

        def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Any:
            return guess if row == 1 else [7] * 99

    drafter = ByName(Own(), 4)
    for number in range(3):
        drafter.open(f"r{number}", [1], [], SamplingParams(), 4)
    assert drafter.extend() == ["r0", "r1", "r2"]
    assert [len(drafter.tail(f"r{number}")[1]) for number in range(3)] == [4, 0, 4]
    assert not drafter.extend() and "no draft for request r1" in caplog.text
