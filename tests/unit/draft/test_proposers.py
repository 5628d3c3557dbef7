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
from specactor_ray.draft.proposer import Proposer, packed
from specactor_ray.draft.slots import RowProposer, SlotProposer
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.proposers import SimulatedProposer
from specactor_ray.simulation.world import World
from tests.by_name import feed
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
        self.window = rng.randint(0, 6)
        self.sent = 0
        self.answered = False

    def states(self) -> tuple[int, np.ndarray]:
        begin, self.sent = self.sent, len(self.prompt) + len(self.committed) - 1
        return begin, STATES[begin : self.sent]


class Driver:
    """Drives a proposer and compares it with a list of requests after every call."""

    def __init__(self, proposer: Proposer, seed: int) -> None:
        self.proposer, self.rng = proposer, random.Random(seed)
        self.requests: dict[int, Request] = {}
        self.guessed = 0

    def open(self, slot: int) -> None:
        request = self.requests[slot] = Request(self.rng)
        sampling = SamplingParams(self.rng.choice([0.0, 1.0]), max_tokens=MAX_TOKENS, seed=slot)
        self.proposer.open(slot, str(slot), request.prompt, request.committed, sampling, request.window)
        self.feed(slot)
        assert self.tails()[slot] == []

    def close(self, slot: int, finished: bool) -> None:
        self.requests.pop(slot, None)
        self.proposer.close(slot, finished)

    def feed(self, slot: int) -> None:
        if self.proposer.traits.reads_features:
            feed(self.proposer, slot, *self.requests[slot].states())

    def tails(self) -> dict[int, list[int]]:
        """Of all open slots, in any order, after a look at their form."""
        slots = self.rng.sample(sorted(self.requests), len(self.requests))
        found = self.proposer.tails(np.array(slots, np.int32))
        assert {array.dtype for array in found} == {np.dtype(np.int32)}
        assert found.lengths.sum() == len(found.tokens)
        assert not len(found.tokens) or 0 <= found.tokens.min() <= found.tokens.max() < (
            self.proposer.vocab_size or 2**31
        )
        tails = {}
        for slot, (base, tail) in zip(slots, found.rows(), strict=True):
            assert base == len(self.requests[slot].committed) and len(tail) <= self.requests[slot].window
            tails[slot] = tail
        return tails

    def extend(self) -> list[int]:
        changed = self.proposer.extend()
        assert changed.dtype == np.int32 and changed.ndim == 1
        assert len(set(changed.tolist())) == len(changed) and set(changed.tolist()) <= self.requests.keys()
        for slot in changed.tolist():
            self.requests[slot].answered = True
        self.guessed += sum(map(len, self.tails().values()))
        return changed.tolist()

    def rest(self) -> None:
        """Until nothing is left to do; then everything has been answered."""
        for _ in range(200):
            if not self.extend():
                assert all(request.answered for request in self.requests.values())
                return
        raise AssertionError("extend never came to rest")

    def commit(self, slots: list[int]) -> None:
        """One call for all: new, repeated, late, overlapping and gapped commits, of closed slots too."""
        before, commits, expected, fresh = self.tails(), [], [], dict[int, list[int]]()
        for slot in slots:
            request = self.requests.get(slot)
            if request is None:
                commits.append((slot, self.rng.randrange(3), [1, 2]))
                expected.append(False)
                continue
            base, kind = len(request.committed), self.rng.choice(["new", "new", "new", "late", "gap", "other"])
            if kind == "other" and base:  # it contradicts the last token
                commits.append((slot, base - 1, [request.committed[-1] + 1, 1]))
            elif kind in ("gap", "other"):
                commits.append((slot, base + self.rng.randint(1, 5), [1]))
            elif kind == "late":
                start = self.rng.randint(0, base)
                commits.append((slot, start, request.committed[start : self.rng.randint(start, base)]))
            else:
                right = before[slot][: self.rng.randint(0, len(before[slot]))]
                wrong = [self.rng.randrange(4) for _ in range(self.rng.randint(0, 2))]
                fresh[slot] = (right + wrong)[: MAX_TOKENS - base]
                start = self.rng.randint(max(base - 3, 0), base)
                commits.append((slot, start, request.committed[start:] + fresh[slot]))
            expected.append(kind not in ("gap", "other"))
        assert self.proposer.commit(*packed(commits)).tolist() == expected
        for slot, tokens in fresh.items():
            self.requests[slot].committed += tokens
            self.requests[slot].answered &= not tokens
        self.compare_tails(before, fresh)
        for slot in fresh:
            self.feed(slot)

    def compare_tails(self, before: dict[int, list[int]], fresh: dict[int, list[int]]) -> None:
        for slot, tail in self.tails().items():
            old, new = before[slot], fresh.get(slot, [])
            agrees = old[: len(new)] == new[: len(old)]
            assert tail == (old[len(new) :] if agrees else [])


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
        rng = driver.rng
        for _ in range(60):
            slot = rng.randrange(8)
            match rng.choice(["open", "open", "close", "commit", "commit", "commit", "extend", "extend", "rest"]):
                case "open":
                    driver.open(slot)
                case "close":
                    driver.close(slot, rng.random() < 0.5)
                case "commit":
                    driver.commit(rng.sample(range(8), rng.randint(1, 8)))
                case "extend":
                    driver.extend()
                case "rest":
                    driver.rest()
        driver.rest()
        assert driver.guessed > 10, "nothing is compared with nothing"
        for slot in rng.sample(range(8), 8):
            driver.close(slot, finished=True)
            driver.rest()
        assert not len(proposer.commit(*packed([]))) and not len(proposer.tails(np.zeros(0, np.int32)).tokens)
        driver.open(3)
        driver.rest()

    run(name, work)


@every
def test_requests_beyond_the_places_are_answered_and_get_the_next_place(name: str) -> None:
    def work(proposer: Any) -> None:
        if not isinstance(proposer, SlotProposer):
            return
        proposer._places = 1
        driver = Driver(proposer, 5)
        for slot in range(3):
            driver.open(slot)
            driver.requests[slot].window = 6
        driver.rest()
        assert proposer._placed.tolist()[:3] == [True, False, False]
        driver.close(0, finished=True)
        for slot in (2, 1):
            taken = proposer.commit(*packed([(slot, len(driver.requests[slot].committed), [1])]))
            assert taken.tolist() == [slot == 1 or not proposer.traits.reads_features or name == "own reader"]
        assert proposer._placed.tolist()[:3] == [False, False, True] and proposer._places == 0
        for slot in (1, 2):
            driver.close(slot, finished=False)
        assert proposer._places == 1
        if isinstance(proposer, ModelProposer):
            assert proposer._cache.free_slots == proposer._cache.slots, "cache was leaked"

    run(name, work)


@every
def test_a_request_that_cannot_be_opened_leaves_its_slot_free(name: str) -> None:
    def work(proposer: Proposer) -> None:
        if not isinstance(proposer, SlotProposer):
            return
        driver = Driver(proposer, 2)
        driver.open(0)
        with pytest.raises(OverflowError):
            proposer.open(1, "1", [1, 2**40], [], SamplingParams(), 4)
        driver.close(1, finished=True)
        driver.rest()
        driver.open(1)
        driver.commit([0, 1])
        driver.rest()

    run(name, work)


@pytest.mark.parametrize("guess", [[2**40], ["x"], None, [[1, 2]]])
def test_a_guess_that_makes_no_sense_is_none_and_costs_the_others_nothing(
    guess: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(RowProposer):
        method, vocab_size = "own", None

        def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Any:
            return guess if slot == 1 else [7] * 99

    proposer = Own()
    for slot in range(3):
        proposer.open(slot, f"r{slot}", [1], [], SamplingParams(), 4)
    assert proposer.extend().tolist() == [0, 1, 2]
    assert proposer.tails(np.arange(3, dtype=np.int32)).lengths.tolist() == [4, 0, 4]
    assert not len(proposer.extend()) and "no draft for request r1" in caplog.text
