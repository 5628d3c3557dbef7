"""What the verifier's loop promises its callers: attempts, versions, polls that can be repeated, a heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup.proposer import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.target.base import TargetRequest
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, Finished, Progress, Refused, ToRollout
from specactor_ray.verify.drafting import Drafting
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.requests import Attempts
from specactor_ray.verify.seat import DrafterLink
from tests.batches import news, opening
from tests.fakes import virtual
from tests.fakes.clocks import HandClock
from tests.tiny import tiny_target
from tests.unit.engine_conformance import requests
from tests.unit.verify.test_loops import engine, ragged, truth_of

torch.set_num_threads(1)


class Verifier:
    """A verify loop that is stepped by hand, and a reader that notes what comes out of it."""

    def __init__(self) -> None:
        self.clock, self.engine = HandClock(), engine()
        drafting = Drafting("v0", False, SpeculationConfig(), self.engine.vocab_size)
        self.loop = VerifyLoop(self.engine, drafting, clock=self.clock)
        self.events: list[ToRollout] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.run_once()
            self.poll()

    def poll(self) -> None:
        first, events = self.loop.poll(len(self.events), 0.0)
        assert first == len(self.events)
        self.events += events

    def finish(self) -> None:
        self.step()
        for _ in range(1000):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("it did not finish")

    def ends(self) -> list[tuple[str, int]]:
        return [(e.request_id, e.attempt) for e in self.events if isinstance(e, Finished)]

    def tokens(self, request_id: str, attempt: int) -> list[int]:
        progress = (event for event in self.events if isinstance(event, Progress))
        rows = (row for event in progress for row in zip(event.requests, event.rows(), strict=True))
        return [token for one, (_, tokens, _, _) in rows if one == (request_id, attempt) for token in tokens]


@pytest.fixture
def verifier() -> Verifier:
    return Verifier()


def one(attempt: int = 0, committed: Sequence[int] = ()) -> TargetRequest:
    return replace(requests(1, 1.0)[0], attempt=attempt, committed_token_ids=tuple(committed))


def test_a_request_that_is_submitted_twice_runs_once(verifier: Verifier) -> None:
    verifier.loop.submit([one(), one()])
    verifier.step(3)
    verifier.loop.submit([one()])
    verifier.finish()
    verifier.loop.submit([one()])
    verifier.finish()
    assert verifier.ends() == [("r0", 0)]
    assert verifier.tokens("r0", 0) == truth_of([one()])["r0"]


def test_a_newer_attempt_replaces_the_older_and_an_older_one_does_not_come_back(verifier: Verifier) -> None:
    truth = truth_of([one()])["r0"]
    verifier.loop.submit([one()])
    verifier.step(4)
    begun = verifier.tokens("r0", 0)
    assert begun and verifier.engine.has_work()
    verifier.loop.submit([one(2, begun[:1]), one(1)])
    verifier.finish()
    assert verifier.ends() == [("r0", 2)], "nothing is said of an attempt that was replaced"
    assert begun[:1] + verifier.tokens("r0", 2) == truth
    assert not verifier.tokens("r0", 1)
    for late in (0, 1, 2):
        verifier.loop.submit([one(late)])
    verifier.finish()
    assert verifier.ends() == [("r0", 2)]


def test_a_cancellation_that_overtakes_its_submission_still_holds(verifier: Verifier) -> None:
    verifier.loop.cancel([("r0", 1)])
    verifier.loop.submit([one(1), one(0)])
    verifier.step(3)
    assert not verifier.engine.has_work() and not verifier.events
    verifier.loop.submit([one(2)])
    verifier.finish()
    assert verifier.ends() == [("r0", 2)]


def test_a_cancellation_ends_this_attempt_or_an_older_one_and_no_newer(verifier: Verifier) -> None:
    verifier.loop.submit([one(3)])
    verifier.step(2)
    verifier.loop.cancel([("r0", 2)])
    verifier.step()
    assert verifier.engine.has_work(), "that was about an earlier attempt"
    verifier.loop.cancel([("r0", 4), ("nobody", 0)])
    verifier.step()
    assert not verifier.engine.has_work() and verifier.loop.snapshot()["running"] == 0
    verifier.loop.submit([one(4)])
    verifier.finish()
    assert verifier.ends() == []


@pytest.mark.parametrize("has_ended", [False, True])
def test_drafters_learn_from_an_output_that_is_cancelled_since_it_has_ended(
    verifier: Verifier, has_ended: bool
) -> None:
    heard: list[CommitBatch] = []
    link = Link(direct_sender(heard.append), clock=verifier.clock)
    verifier.loop.set_drafters({"d": DrafterLink(DrafterSpec("draft_model"), link)})
    verifier.loop.submit([one()])
    verifier.step(4)
    verifier.loop.cancel([("r0", 0)], has_ended)
    verifier.step()
    assert not verifier.engine.has_work() and verifier.ends() == []
    assert [ended for batch in heard for _row, _generation, ended in batch.closed] == [has_ended]


def test_a_request_for_other_weights_is_refused_once_and_makes_no_token(verifier: Verifier) -> None:
    from transformers import AutoModelForCausalLM

    other = replace(one(), weight_version=1)
    verifier.loop.submit([other, other])
    verifier.finish()
    (refused,) = verifier.events
    assert isinstance(refused, Refused) and (refused.request_id, refused.attempt) == ("r0", 0)
    assert "version 1" in refused.reason and "version 0" in refused.reason
    loaded = verifier.loop.load_weights(1, AutoModelForCausalLM.from_pretrained(tiny_target()).state_dict())
    verifier.loop.submit([one(1), replace(one(2), weight_version=1)])
    verifier.finish()
    loaded.result(0)
    assert [type(event) for event in verifier.events[:2]] == [Refused, Refused]
    assert verifier.ends() == [("r0", 2)]


def test_a_request_that_can_never_run_says_so_once(verifier: Verifier) -> None:
    bad = TargetRequest("bad", (10**6,), SamplingParams(), attempt=5)
    verifier.loop.submit([bad, bad])
    verifier.finish()
    (finished,) = verifier.events
    assert isinstance(finished, Finished) and (finished.finish_reason, finished.attempt) == ("error", 5)


@pytest.mark.parametrize(("name", "value"), [("top_k", 2**63), ("temperature", 10**400), ("seed", -1), ("top_p", "1")])
def test_parameters_out_of_bounds_end_their_request_alone(verifier: Verifier, name: str, value: Any) -> None:
    sampling = SamplingParams()
    object.__setattr__(sampling, name, value)  # as it may come out of a pickle
    verifier.loop.submit([replace(one(), request_id="bad", sampling=sampling), one()])
    verifier.finish()
    (failed,) = [event for event in verifier.events if isinstance(event, Finished) and event.request_id == "bad"]
    assert failed.finish_reason == "error" and f"sampling.{name} is " in failed.error
    assert verifier.tokens("r0", 0) == truth_of([one()])["r0"]


def test_attempts_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specactor_ray.verify.requests._REMEMBERED", 2)
    attempts = Attempts()
    attempts.note("a", 3)
    attempts.note("b", 0)
    attempts.note("a", 1)
    assert attempts.newest("a") == 3, "an older one does not hide a newer"
    attempts.note("c", 0)
    assert attempts.newest("b") == -1, "the one that was noted longest ago is forgotten"
    assert (attempts.newest("a"), attempts.newest("c")) == (3, 0)


def test_a_poll_that_is_repeated_brings_the_same_events(verifier: Verifier) -> None:
    verifier.loop.submit([one()])
    for _ in range(5):
        verifier.loop.run_once()
    lost = verifier.loop.poll(0, 0.0)
    assert lost[1] and verifier.loop.poll(0, 600.0, linger_s=0.0) == lost
    verifier.finish()
    assert verifier.tokens("r0", 0) == truth_of([one()])["r0"]
    verifier.poll()
    assert verifier.loop.poll(0, 600.0) == (len(verifier.events), []), "they were acknowledged by a later poll"


def test_a_poll_does_not_linger_behind_an_end(verifier: Verifier) -> None:
    """With what has ended in its answer it returns at once: the wait below would outlast the test."""
    verifier.loop.submit([one()])
    while verifier.loop.run_once() or not len(verifier.loop._requests.events):
        pass
    for _ in range(2):
        _, events = verifier.loop.poll(0, 600.0, linger_s=600.0)
        assert isinstance(events[-1], Finished)


def test_the_heartbeat_tells_since_when_a_step_has_been_under_way(verifier: Verifier) -> None:
    step, seen = verifier.engine.step, list[float]()

    def slow(tails: object) -> object:
        seen.append(verifier.loop.snapshot()["busy_s"])
        verifier.clock.seconds += 60.0
        seen.append(verifier.loop.snapshot()["busy_s"])
        return step(tails)  # type: ignore[arg-type]

    verifier.engine.step = slow  # type: ignore[method-assign, assignment]
    verifier.loop.submit([one()])
    verifier.step()
    assert seen == [0.0, 60.0]
    verifier.clock.seconds += 60.0
    assert verifier.loop.snapshot()["busy_s"] == 0.0, "between two steps"


def test_a_command_that_does_not_come_back_shows_too(verifier: Verifier) -> None:
    def hang() -> None:
        verifier.clock.seconds += 30.0
        hung.append(verifier.loop.snapshot()["busy_s"])

    hung = list[float]()
    verifier.engine.sleep = verifier.engine.wake = hang  # type: ignore[method-assign]
    verifier.loop.sleep()
    verifier.loop.wake()
    verifier.step()
    assert hung == [30.0, 30.0], "each counts from its own beginning"
    assert verifier.loop.snapshot()["busy_s"] == 0.0


def test_a_failed_step_leaves_no_heartbeat(verifier: Verifier) -> None:
    verifier.engine.step = None  # type: ignore[method-assign, assignment]
    verifier.loop.submit([one()])
    with pytest.raises(TypeError):
        verifier.loop.run_once()
    verifier.clock.seconds += 30.0
    assert verifier.loop.snapshot()["busy_s"] == 0.0


def test_a_command_is_no_part_of_the_step_after_it(verifier: Verifier) -> None:
    """New weights of a head that take long would look like the price of having drafts."""

    def teach() -> None:
        verifier.clock.seconds += 30.0

    verifier.loop.submit([one()])
    verifier.loop.put(teach)
    verifier.loop.run_once()
    assert verifier.loop.metrics.steps == 1 and verifier.loop.metrics.protocol_s < 1.0


def test_a_draft_loop_has_a_heartbeat_too() -> None:
    clock, seen = HandClock(), list[float]()

    class Slow(NgramProposer):
        def extend(self) -> np.ndarray:
            clock.seconds += 45.0
            seen.append(loop.snapshot()["busy_s"])
            return super().extend()

    loop = DraftLoop("d", Slow(1, 4, 0, 8), clock)
    assert not loop.run_guarded() and loop.snapshot()["extends"] == 0
    loop.deliver(news([opening(0)]))
    assert loop.run_guarded()
    assert seen == [45.0, 45.0]
    clock.seconds += 5.0
    assert (loop.snapshot()["busy_s"], loop.snapshot()["extends"]) == (0.0, 1)


# ---- waits for drafters in other processes, on virtual time ----

LINK_S, STEP_S = 0.01, 0.001
"""A message takes so long in either direction, and a step; models take no time."""


def decode(deaf: bool = False, **speculation: Any) -> dict[str, Any]:
    """Counters after one request, with the target as its own drafter, which may hear nothing."""
    bench, target = virtual.Bench(), engine()
    kernel, clock = bench.kernel, bench.clock
    drafting = Drafting("v0", False, SpeculationConfig(**speculation), target.vocab_size)
    loop = VerifyLoop(target, drafting, clock=clock)
    twin = DraftLoop("twin", DraftModelProposer(ragged(tiny_target())), clock)

    def link(deliver: Callable[[Any], None]) -> Link[Any]:
        def send(message: object) -> Future[None]:
            sent = Future[None]()

            def arrive() -> None:
                deliver(message)
                sent.set_result(None)

            kernel.at(kernel.now + LINK_S, arrive)
            return sent

        return Link(send, clock=clock)

    def body() -> None:
        clock.spawn(twin.run, "draft")
        loop.submit([one()])
        loop.run_once()
        while target.has_work():
            clock.sleep(STEP_S)
            loop.run_once()

    loop.set_drafters({"twin": DrafterLink(DrafterSpec("draft_model"), link(deaf_ear if deaf else twin.deliver))})
    twin.set_verifiers({"v0": link(loop.deliver)})
    bench.run(body)
    events = loop.poll(0, 0.0)[1]
    assert [token for event in events if isinstance(event, Progress) for token in event.tokens] == truth_of([one()])[
        "r0"
    ]
    return loop.snapshot()


def deaf_ear(message: object) -> None:
    """What arrives here is not heard."""


def test_by_default_nobody_waits_for_a_drafter_of_another_process() -> None:
    counters = decode()
    assert counters["waiting_s"] == counters["drafted_tokens"] == 0, "its drafts always come too late"


def test_a_step_waits_for_first_tokens_if_it_is_told_how_long() -> None:
    counters = decode(draft_wait_s=0.5, verify=VerifyPolicy.all)
    assert counters["accepted_tokens"] > 0.5 * counters["committed_tokens"]
    assert 2 * LINK_S <= counters["waiting_s"] <= 2 * LINK_S * counters["steps"], "no longer than for an answer"


def test_a_drafter_that_is_silent_is_waited_for_as_long_as_that() -> None:
    counters = decode(deaf=True, draft_wait_s=0.5, verify=VerifyPolicy.all)
    assert counters["steps"] == counters["committed_tokens"] > 1
    assert counters["waiting_s"] == pytest.approx(0.5 * (counters["steps"] - 1)), "the first step reads the prompt"


def test_drafts_that_are_waited_for_in_vain_are_left_alone() -> None:
    counters = decode(deaf=True, draft_wait_s=0.5)
    assert 0 < counters["suspended_steps"] < counters["steps"]
    assert counters["waiting_s"] <= 0.5 * (counters["steps"] - counters["suspended_steps"])


def test_a_suspension_ends_with_the_requests_that_it_was_for(verifier: Verifier) -> None:
    suspension = verifier.loop._drafting.policy.suspension
    for _ in range(3000):  # drafts never pay, so suspensions are long by now
        suspension.record(1, accepted=0, seconds=2.0, drafting_s=1.0, own_s=0.0)
    while suspension.is_on:
        suspension.record(1, accepted=0, seconds=2.0, drafting_s=1.0, own_s=0.0)
    while not suspension.is_on:
        suspension.record(1, accepted=0, seconds=2.0, drafting_s=1.0, own_s=0.0)
    verifier.loop.submit([one()])
    verifier.finish()
    assert suspension.is_on and verifier.ends()
    verifier.step()
    assert not suspension.is_on
