"""What a draft loop follows: whose requests, for how long, and that what fails costs one request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specactor_ray.config.methods import Traits
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.slots import RowProposer
from specactor_ray.transport.inbox import MOST_MALFORMED
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import Features, TailBatch
from tests.batches import news, opening
from tests.fakes.clocks import HandClock
from tests.tiny import tiny_draft
from tests.unit.verify.test_loops import eagle, ragged


class Picky(RowProposer):
    """Repeats the last token. Whatever it is to do for the request `bad` fails, where `fails` names it."""

    method, vocab_size = "picky", None
    traits = Traits(looks_up=True, reads_features=True)

    def __init__(self, fails: str) -> None:
        super().__init__(8)
        self._fails = fails

    def _break(self, what: str, slot: int) -> None:
        if (what, self.request_ids.get(slot)) == (self._fails, "bad"):
            raise RuntimeError("a proposer's bug")

    def open(self, slot: int, *arguments: Any) -> None:
        super().open(slot, *arguments)
        self._break("open", slot)

    def commit(self, slots: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        for slot in slots.tolist():
            self._break("commit", slot)
        return super().commit(slots, *arrays)[self._fails == "answer" :]

    def add_features(self, slot: int, features: Sequence[Features]) -> None:
        self._break("features", slot)

    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> list[int]:
        self._break("guess", slot)
        return [int([*prompt, *output][-1])] * room

    def close(self, slot: int, finished: bool) -> None:
        if finished:
            self._break("close", slot)
        super().close(slot, finished)


FIRST = np.zeros(1, np.int32)
"""The slot of the request that was opened first."""


def loop_of(proposer: Proposer) -> tuple[DraftLoop, HandClock, list[TailBatch]]:
    """A loop with one verifier, and what that is told."""
    clock, told = HandClock(), list[TailBatch]()
    loop = DraftLoop("d", proposer, clock)
    loop.set_verifiers({"v0": Link(direct_sender(told.append), clock=clock)})
    return loop, clock, told


def open_at(loop: DraftLoop) -> int:
    """Requests that are open after a round."""
    loop.run_once()
    return int(loop.snapshot()["open_requests"])


@pytest.mark.parametrize(("fails", "lost"), [("open", True), ("commit", True), ("features", True), ("close", False)])
def test_what_fails_costs_one_request(fails: str, lost: bool, caplog: pytest.LogCaptureFixture) -> None:
    loop, _, told = loop_of(Picky(fails))
    features = tuple((row, (Features(5, np.zeros((1, 2), np.float32)),)) for row in range(2))
    loop.deliver(news([opening(0, "good"), opening(1, "bad")]))
    loop.run_once()
    loop.deliver(news(commits=[(0, 0, [2]), (1, 0, [2])], features=features))
    loop.run_once()
    assert loop.snapshot()["open_requests"] == (1 if lost else 2)
    loop.deliver(news(closed=[(1, True)]))
    loop.run_once()
    assert loop.snapshot()["open_requests"] == 1 and loop.proposer.tails(FIRST).bases.tolist() == [1]
    asked = {handle for batch in told for handle in batch.lost}
    assert asked == ({(1, 1)} if lost else set()) and loop.snapshot()["failures"] == 1
    assert "request bad has failed" in caplog.text


def test_an_answer_that_does_not_fit_costs_the_requests_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    loop, _, told = loop_of(Picky("answer"))
    loop.deliver(news([opening(0), opening(1)]))
    loop.deliver(news(commits=[(0, 0, [2]), (1, 0, [2])]))
    assert open_at(loop) == 0 and loop.snapshot()["failures"] == 2
    assert told[-1].lost == ((0, 1), (1, 1))
    assert "1 commits were answered by an array of shape (0,)" in caplog.text


def test_reported_slots_that_are_not_open_are_passed_over() -> None:
    class Confused(NgramProposer):
        def extend(self) -> np.ndarray:
            return np.concatenate([super().extend(), [1, 10**6, -1]])

    loop, _, told = loop_of(Confused(1, 4, 100, 8))
    loop.deliver(news([opening(0), opening(1)], closed=[(1, True)]))
    loop.run_once()
    loop.deliver(news(closed=[(1, True)]))
    loop.run_once()
    loop.deliver(news(commits=[(0, 0, [2])]))
    loop.run_once()
    assert [batch.rows.tolist() for batch in told] == [[0, 1], [0]] and loop.snapshot()["failures"] == 0


def test_a_slot_that_is_used_again_brings_nothing_of_its_last_request() -> None:
    """Nor does a late message about that one reach the new one."""
    loop, _, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.deliver(news([opening(0, "a")]))
    loop.run_once()
    loop.deliver(news(closed=[(0, True)]))
    loop.deliver(news([replace(opening(0, "b", (7, 8, 9)), generation=2)]))
    loop.deliver(news(commits=[(0, 0, [2])], closed=[(0, True)]))
    assert open_at(loop) == 1 and told[-1].lost == ((0, 1),)
    assert told[-1].generations.tolist() == [2] and told[-1].lengths.tolist() == [0]


def test_a_request_without_a_guess_for_a_failure_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop, _, told = loop_of(Picky("guess"))
    loop.deliver(news([opening(0, "bad", (1, 3, 1, 3, 1)), opening(1, "good")]))
    assert loop.run_guarded() and loop.snapshot()["open_requests"] == 2
    assert told[-1].rows.tolist() == [0, 1] and told[-1].lengths.tolist() == [0, 4]
    assert "no draft for request bad" in caplog.text and loop.snapshot()["failures"] == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("no luck")])
def test_a_method_that_leaves_its_process_loses_its_requests_and_the_loop_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaves(NgramProposer):
        def extend(self) -> np.ndarray:
            raise error

    loop, _, _told = loop_of(Leaves(1, 4, 100, 8))
    for _ in range(12):
        loop.deliver(news([opening(0, "a")]))
        assert not loop.run_guarded() and loop.snapshot()["open_requests"] == 0
    assert loop.snapshot()["failures"] == 12
    assert caplog.text.count("Traceback") == 1 and "10 failures with" in caplog.text


def unchecked(**values: Any) -> SamplingParams:
    """Parameters as they may come out of a pickle."""
    sampling = SamplingParams()
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    return sampling


STATES = Features(0, np.zeros((4, 192), np.float32))
BAD = replace(opening(1, "bad"), features=(STATES,))
HARMFUL = {
    "no tokens": news([replace(BAD, prompt_token_ids=())], verifier_id="v1"),
    "top_k": news([replace(BAD, sampling=unchecked(top_k=2**63))], verifier_id="v1"),
    "temperature": news([replace(BAD, sampling=unchecked(temperature=10**400))], verifier_id="v1"),
    "states": news([replace(BAD, features=(Features(0, np.zeros((4, 192), np.longdouble)),))], verifier_id="v1"),
    "far away": news(commits=[(1, 2**31 - 1, [2])], verifier_id="v1"),
}


@pytest.mark.parametrize("harm", HARMFUL)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_a_message_that_makes_no_sense_costs_other_verifiers_nothing(method: str, harm: str) -> None:
    """Of two requests one has no place."""
    proposer: Proposer = NgramProposer(1, 4, 100, 1)
    if method == "draft_model":
        proposer = DraftModelProposer(ragged(tiny_draft()), 2)
    elif method == "eagle":
        proposer = eagle()
    loop, _, told = loop_of(proposer)
    loop.set_verifiers({name: Link(direct_sender(told.append)) for name in ("v0", "v1")})
    loop.deliver(news([replace(opening(0, "good"), features=(STATES,))]))
    loop.deliver(news([opening(1, "other")], verifier_id="v1"))
    assert loop.run_guarded()
    loop.deliver(HARMFUL[harm])
    loop.deliver(news(commits=[(0, 0, [2])], features=[(0, (replace(STATES, begin=4, states=STATES.states[:1]),))]))
    while loop.run_guarded():
        pass
    assert loop.snapshot()["failures"] == 0
    assert not any(batch.lost for batch in told)
    assert proposer.tails(FIRST).bases.tolist() == [1] and proposer.tails(FIRST).lengths.tolist() == [4]


def test_what_is_unknown_or_has_a_gap_is_asked_for_again() -> None:
    loop, _, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.deliver(news([opening(0)], commits=[(7, 0, [2])]))
    loop.run_once()
    loop.deliver(news(commits=[(0, 3, [2])]))
    loop.run_once()
    assert [batch.lost for batch in told] == [((7, 1),), ((0, 1),)] and loop.snapshot()["resyncs"] == 2
    loop.deliver(news([opening(0)]))
    loop.run_once()
    assert told[-1].lost == () and told[-1].rows.tolist() == [0]


def test_a_row_or_a_request_that_is_used_again_replaces_what_was_there() -> None:
    loop, _, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.set_verifiers({name: Link(direct_sender(told.append)) for name in ("v0", "v1")})
    loop.deliver(news([opening(0, "a"), opening(1, "b")]))
    assert open_at(loop) == 2
    loop.deliver(news([opening(0, "c")]))
    assert open_at(loop) == 2 and told[-1].rows.tolist() == [0]
    loop.deliver(news([opening(4, "c")], verifier_id="v1"))
    loop.deliver(news(closed=[(0, True)]))
    assert open_at(loop) == 2, "it has moved to another verifier; what the first says of it is over"


def test_what_a_verifier_says_before_it_is_listed_is_asked_for_again() -> None:
    loop, _, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.deliver(news([opening(0)], verifier_id="v1"))
    assert open_at(loop) == 0
    loop.set_verifiers({"v1": Link(direct_sender(told.append))})
    loop.deliver(news(commits=[(0, 0, [2])], verifier_id="v1"))
    assert open_at(loop) == 0 and told[0].lost == ((0, 1),)


def test_a_newer_session_closes_all_requests_of_its_verifier_and_older_ones_are_ignored() -> None:
    loop, _, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.set_verifiers({name: Link(direct_sender(told.append)) for name in ("v0", "v1")})
    loop.deliver(news([opening(0, "kept")], verifier_id="v1", session=1))
    loop.deliver(news([opening(0, "a"), opening(1, "b")], session=1))
    assert open_at(loop) == 3
    loop.deliver(news([opening(2, "c")], commits=[(1, 0, [2])], session=3))
    assert open_at(loop) == 2 and told[-1].lost == ((1, 1),)
    loop.deliver(news([opening(3, "d")], commits=[(0, 0, [2])], closed=[(2, True)], session=2))
    assert open_at(loop) == 2 and loop.snapshot()["resyncs"] == 1
    loop.deliver(news(session=4))
    assert open_at(loop) == 1


def test_requests_of_a_verifier_that_is_cut_off_are_dropped() -> None:
    loop, _, _ = loop_of(NgramProposer(1, 4, 100, 8))
    loop.deliver(news([opening(0)]))
    assert open_at(loop) == 1
    for _ in range(MOST_MALFORMED + 1):
        loop.deliver(news(commits=[(0, -1, [2])]))
    assert open_at(loop) == 0
