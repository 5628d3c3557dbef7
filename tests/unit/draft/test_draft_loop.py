"""The draft loop: whose requests it follows, that a failure costs one request alone, and what a draft token costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.methods import Checkpoint, Traits
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.rows import RowProposer
from specactor_ray.draft.runner import ENOUGH, Health, checksum
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.view import TableView
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, States, TailBatch
from tests.batches import news, opening
from tests.fakes.clocks import HandClock
from tests.tiny import tiny_draft

# ---- costs ----


def loop_of(proposer: Proposer, **arguments: Any) -> tuple[DraftLoop, list[TailBatch]]:
    """A loop, and what it tells its verifier."""
    loop, told = DraftLoop("d", proposer, **arguments), list[TailBatch]()
    loop.set_verifiers({"v0": Link(direct_sender(told.append))})
    return loop, told


def hear(loop: DraftLoop, message: CommitBatch) -> None:
    """One step of the loop with this message."""
    loop.deliver(message)
    loop.run_once()


def tiny_model() -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32), 4 << 20)


def test_an_outlier_does_not_count_and_an_old_measurement_is_forgotten() -> None:
    class Uneven(DraftModelProposer):
        """Every third answer takes it nine seconds."""

        def extend(self) -> np.ndarray:
            changed = super().extend()
            if len(changed):
                clock.seconds += next(durations)
            return changed

    clock, durations = HandClock(), itertools.chain([0.01, 0.01, 9.0] * 20, itertools.repeat(0.02))
    (loop, _), costs = loop_of(Uneven(tiny_model()), clock=clock), list[float]()
    for number in range(100):
        hear(loop, news([opening(0, f"r{number}", window=1)]))
        costs.append(loop.snapshot()["token_s"])
    assert costs[:60] == pytest.approx([0.01] * 60) and costs[-1] == pytest.approx(0.02)


# ---- rows of a forward ----


@pytest.mark.parametrize(("forward_s", "row_s"), [(0.05, 1e-4), (0.001, 0.05)])
def test_a_loop_learns_what_forwards_cost_and_comes_to_rest(forward_s: float, row_s: float) -> None:
    rows, budgets, clock = list[int](), list[int](), HandClock()

    class Timed(DraftModelProposer):
        def extend(self) -> np.ndarray:
            changed = super().extend()
            clock.seconds += forward_s + row_s * (self.rows_drafted or 50)
            rows.append(self.rows_drafted)
            budgets.append(self.budget)
            assert len(self.forward_s) == self.budget + 1 and (np.diff(self.forward_s) >= 0).all()
            return changed

    loop, told = loop_of(Timed(tiny_model(), branches=8), clock=clock)
    loop.deliver(news([opening(row, window=6) for row in range(2)]))
    while loop.run_once():
        pass
    assert budgets[0] == 0 < budgets[-1], "the price of a forward is known"
    for start in range(20):
        table, ours = loop.requests.table, np.arange(2, dtype=np.int32)
        assert table.committed[ours].tolist() == [start] * 2 and table.length[0, ours, 0].tolist() == [6] * 2
        wrong = ((table.tail[0, ours, 0, 0] + 1) % 500).tolist()
        loop.deliver(news(commits=[(row, start, wrong[row : row + 1]) for row in range(2)]))
        end = len(rows) + 100
        while loop.run_once():
            assert len(rows) < end, "it never comes to rest"
        assert not loop.run_once()
    many = sum(count > 4 for count in rows)
    if row_s > forward_s:
        assert 0 < many < 0.1 * len(rows), "a row costs as much as it brings, and more is tried once in a while"
    else:
        assert many > 0.3 * len(rows), "further rows are nearly free"
        assert any(len(batch.rows) > len(set(batch.rows.tolist())) for batch in told), "branches are sent"


# ---- requests ----


class Picky(RowProposer):
    """Repeats the last token. What it does for the request `bad` fails, where `fails` names it."""

    method, vocab_size = "picky", None
    traits = Traits(looks_up=True, reads_features=True, keeps_history=True)

    def __init__(self, fails: str = "") -> None:
        super().__init__(8)
        self._fails = fails

    def _break(self, what: str, request_id: str) -> None:
        if (what, request_id) == (self._fails, "bad"):
            raise RuntimeError("a proposer's bug")

    def add_features(self, rows: np.ndarray, *states: Any) -> None:
        for row in rows.tolist():
            self._break("features", self.view.request_id(row))

    def guess(self, row: int, prompt: np.ndarray, output: np.ndarray, room: int) -> list[int]:
        self._break("guess", self.view.request_id(row))
        return [int([*prompt, *output][-1])] * room

    def learn(self, outputs: Any) -> None:
        for one in outputs:
            self._break("learn", one.request_id)

    def forget_history(self) -> None:
        pass


@pytest.mark.parametrize("traits", [Traits(), Traits(checkpoint=Checkpoint.MODEL)], ids=["lookup", "model"])
@pytest.mark.parametrize("right", [False, True])
def test_an_alarm_is_raised_while_weights_are_never_right(
    right: bool, traits: Traits, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = Picky()
    proposer.traits = replace(traits, looks_up=True)
    loop, told = loop_of(proposer)
    loop.deliver(news([opening(0, window=1, max_tokens=ENOUGH + 1)]))
    for position in range(ENOUGH):
        loop.run_once()
        assert not loop.snapshot()["health"]["alarm"]
        hear(loop, news(commits=[(0, position, [int(told[-1].tokens[0]) + (not right)])]))
    health, alarm = loop.snapshot()["health"], not right and traits.checkpoint is Checkpoint.MODEL
    assert health["tried"] == ENOUGH and health["right"] == ENOUGH * right and health["alarm"] is alarm
    assert ("none of its last" in caplog.text) is alarm


def test_an_alarm_is_logged_at_its_begin_and_its_end() -> None:
    health = Health("eagle-0#1a2b", "eagle", Traits(checkpoint=Checkpoint.MODEL))
    assert health.observe(500, 300) == ""
    health.renew(7, "00c0ffee")
    assert health.to_dict()["tried"] == 0 and health.observe(500 + ENOUGH - 1, 300) == ""
    warning = health.observe(500 + ENOUGH, 300)
    for words in ("eagle-0#1a2b (eagle)", f"last {ENOUGH} draft tokens", "version 7", "00c0ffee", "Fix: "):
        assert words in warning
    assert health.observe(900, 300) == "" and health.observe(900, 300) == ""
    assert health.to_dict() == {
        "method": "eagle", "version": 7, "checksum": "00c0ffee", "tried": 400, "right": 0, "missed": 400, "alarm": True
    }  # fmt: skip
    health.renew(8, "0badcafe")
    assert health.to_dict()["alarm"], "nothing says that these weights are better"
    assert health.observe(910 + ENOUGH, 300) == "" and health.to_dict()["alarm"]
    ended = health.observe(1200, 301)
    assert "right again" in ended and "version 8" in ended and not health.to_dict()["alarm"]


def test_a_checksum_tells_weights_apart() -> None:
    weights = {"a": torch.arange(6000.0).reshape(60, 100), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(0)}
    first = checksum(weights)
    assert len(first) == 8 and checksum(dict(reversed(weights.items()))) == first
    others = [{**weights, "a": weights["a"] + 1}, {**weights, "b": -weights["b"]}, {**weights, "d": weights["b"]}]
    assert len({first, *map(checksum, others)}) == 4
    assert checksum({}) == ""


FIRST = np.zeros(1, np.int32)
"""The slot of the request that was opened first."""


def open_at(loop: DraftLoop) -> int:
    """Requests that are open after a round."""
    loop.run_once()
    return int(loop.snapshot()["open_requests"])


@pytest.mark.parametrize(("fails", "lost"), [("guess", 0), ("learn", 0), ("features", 2)])
def test_what_fails_costs_a_guess_or_a_new_beginning(fails: str, lost: int, caplog: pytest.LogCaptureFixture) -> None:
    """A guess and an output fail alone; after any other error the proposer's state is unknown, so it begins anew."""
    loop, told = loop_of(Picky(fails))
    ones = np.ones(2, np.int32)
    states = States(np.arange(2, dtype=np.int32), 5 * ones, ones, np.zeros((2, 2), np.float32))
    hear(loop, news([opening(0, "good"), opening(1, "bad")]))
    hear(loop, news(commits=[(0, 0, [2]), (1, 0, [2])], states=states))
    assert loop.snapshot()["open_requests"] == 2 - lost
    assert {handle for batch in told for handle in batch.lost} == ({(0, 1), (1, 1)} if lost else set())
    hear(loop, news([replace(opening(0, "good"), committed_token_ids=(2,))] if lost else [], closed=[(1, True)]))
    assert loop.snapshot()["open_requests"] == 1 and loop.requests.view.tail(0).tolist() == [2] * 4
    assert loop.snapshot()["failures"] == (2 if fails == "guess" else 1) and "a proposer's bug" in caplog.text


def test_a_message_that_cannot_be_applied_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    loop, told = loop_of(Picky())
    loop.deliver(news([replace(opening(0, "bad"), prompt_token_ids=())]))
    loop.deliver(news([replace(opening(1, "huge"), prompt_token_ids=(1, 2**40))]))
    loop.deliver(news([opening(2, "good")]))
    assert open_at(loop) == 1 and told[-1].rows.tolist() == [2] and loop.snapshot()["failures"] == 2


def test_reported_rows_that_are_not_open_are_passed_over() -> None:
    class Confused(NgramProposer):
        def extend(self) -> np.ndarray:
            return np.concatenate([super().extend(), [1, 10**6, -1]]).astype(np.int32)

    loop, told = loop_of(Confused(1, 4, 100, 8))
    hear(loop, news([opening(0), opening(1)], closed=[(1, True)]))
    hear(loop, news(closed=[(1, True)]))
    hear(loop, news(commits=[(0, 0, [2])]))
    assert [batch.rows.tolist() for batch in told] == [[0, 1], [0]] and loop.snapshot()["failures"] == 3


@pytest.mark.parametrize("answer", [None, 3, [True], [[1]], ["x"], [0.5]])
def test_an_answer_without_rows_is_named(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(NgramProposer):
        def propose(self, view: TableView, rows: np.ndarray) -> Any:
            super().propose(view, rows)
            return answer

    loop, _ = loop_of(Wrong(1, 4, 100, 8))
    hear(loop, news([opening(0)]))
    assert loop.snapshot()["open_requests"] == 0 and "return the rows, int32" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("no luck")])
def test_a_method_that_leaves_its_process_loses_its_requests_and_the_loop_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaves(NgramProposer):
        def extend(self) -> np.ndarray:
            raise error

    loop, _ = loop_of(Leaves(1, 4, 100, 8))
    for _ in range(12):
        loop.deliver(news([opening(0, "a")]))
        loop.run_once()
        assert loop.snapshot()["open_requests"] == 0
    assert loop.snapshot()["failures"] == 12
    assert caplog.text.count("Traceback") == 1 and "10 failures with" in caplog.text


def test_what_is_unknown_or_has_a_gap_is_asked_for_again() -> None:
    loop, told = loop_of(NgramProposer(1, 4, 100, 8))
    hear(loop, news([opening(0)], commits=[(7, 0, [2])]))
    hear(loop, news(commits=[(0, 3, [2])]))
    assert [batch.lost for batch in told] == [((7, 1),), ((0, 1),)] and loop.snapshot()["resyncs"] == 2
    hear(loop, news([opening(0)]))
    assert told[-1].lost == () and told[-1].rows.tolist() == [0]
    loop.deliver(news([opening(0, "other")], verifier_id="v1"))
    assert open_at(loop) == 1, "that verifier is not listed"
    loop.set_verifiers({"v1": Link(direct_sender(told.append))})
    loop.deliver(news(commits=[(0, 0, [2])], verifier_id="v1"))
    assert open_at(loop) == 0 and told[-1].lost == ((0, 1),)


def test_a_row_or_a_request_that_is_used_again_replaces_what_was_there() -> None:
    """And a late message about the last request of a row does not reach the new one."""
    loop, told = loop_of(NgramProposer(1, 4, 100, 8))
    loop.set_verifiers({name: Link(direct_sender(told.append)) for name in ("v0", "v1")})
    loop.deliver(news([opening(0, "a"), opening(1, "b")]))
    assert open_at(loop) == 2
    loop.deliver(news([replace(opening(0, "c", (7, 8, 9)), generation=2)]))
    loop.deliver(news(commits=[(0, 0, [2])], closed=[(0, True)]))
    assert open_at(loop) == 2 and told[-1].lost == ((0, 1),)
    assert told[-1].generations.tolist() == [2] and told[-1].lengths.tolist() == [0]
    loop.deliver(news([opening(4, "c")], verifier_id="v1"))
    loop.deliver(news(closed=[(0, True)]))
    assert open_at(loop) == 2, "it has moved to another verifier; what the first says of it is over"


def test_a_newer_session_closes_all_requests_of_its_verifier_and_older_ones_are_ignored() -> None:
    loop, told = loop_of(NgramProposer(1, 4, 100, 8))
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
