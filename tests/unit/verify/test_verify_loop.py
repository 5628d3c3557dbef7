"""What the verifier's loop promises its callers: attempts, versions, polls that can be repeated, a heartbeat."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.core.errors import WeightsError
from specactor_ray.core.types import Probe, SamplingParams
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.probe import eager_logprobs, probe_tokens
from specactor_ray.table.requests import TargetRequest
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, Finished, Progress, Refused, ToRollout, WeightSet
from specactor_ray.verify.drafting import DrafterLink, Drafting
from specactor_ray.verify.loop import VerifyLoop
from tests.fakes import virtual
from tests.fakes.clocks import HandClock
from tests.fakes.loops import engine, ragged, truth_of
from tests.tiny import tiny_target
from tests.unit.engine_conformance import requests

torch.set_num_threads(1)
PROBED = probe_tokens(400)


class Verifier:
    """A verify loop that is stepped by hand, and a reader that notes what comes out of it."""

    def __init__(self) -> None:
        self.clock, self.engine = HandClock(), engine()
        drafting = Drafting("v0", False, SpeculationConfig(), self.engine.table)
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


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("submit0 submit0 step submit0 finish submit0 finish", [0]),  # it runs once
        ("submit0 step submit2 submit1 finish submit0 submit1 submit2 finish", [2]),  # a newer one replaces the older
        ("cancel1 submit1 submit0 step idle submit2 finish", [2]),  # a cancellation may overtake its submission
        ("submit3 step cancel2 step cancel4 step idle submit4 finish", []),  # it ends this attempt, or an older one
        ("submit3 cancel2 finish", [3]),
    ],
)
def test_attempts(verifier: Verifier, script: str, ended: list[int]) -> None:
    for action, number in re.findall(r"([a-z]+)(\d?)", script):
        match action:
            case "submit":
                verifier.loop.submit([one(int(number))])
            case "cancel":
                verifier.loop.cancel([("r0", int(number)), ("nobody", 0)])
            case "step":
                verifier.step(3)
            case "finish":
                verifier.finish()
            case "idle":
                assert not verifier.engine.has_work() and verifier.loop.snapshot()["running"] == 0
    assert verifier.ends() == [("r0", attempt) for attempt in ended]
    for attempt in ended:
        assert verifier.tokens("r0", attempt) == truth_of([one()])["r0"]


def test_a_newer_attempt_goes_on_from_committed_tokens(verifier: Verifier) -> None:
    truth = truth_of([one()])["r0"]
    verifier.loop.submit([one(2, truth[:1])])
    verifier.finish()
    assert truth[:1] + verifier.tokens("r0", 2) == truth


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
    changed = AutoModelForCausalLM.from_pretrained(tiny_target()).state_dict()
    loaded = verifier.loop.load_weights(WeightSet(1, ()), changed)
    verifier.loop.submit([one(1), replace(one(2), weight_version=1)])
    verifier.finish()
    loaded.result(0)
    assert [type(event) for event in verifier.events[:2]] == [Refused, Refused]
    assert verifier.ends() == [("r0", 2)]


@pytest.mark.parametrize("asleep", [False, True])
def test_weights_that_did_not_arrive_generate_no_token(verifier: Verifier, asleep: bool) -> None:
    """While the engine sleeps it has no memory for a forward: the proof waits until it wakes."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(tiny_target())
    right = WeightSet(2, (), probe=Probe(PROBED, eager_logprobs(original, PROBED), 1e-3))
    wrong = WeightSet(1, (), probe=Probe(PROBED, np.zeros(len(PROBED) - 1, np.float32), 1e-3))

    def load(weights: WeightSet) -> list[Future[None]]:
        steps = [verifier.loop.sleep()] if asleep else []
        steps.append(verifier.loop.load_weights(weights, original.state_dict()))
        steps += [verifier.loop.wake()] if asleep else []
        verifier.step()
        return steps

    *before, last = load(wrong)
    assert not any(done.exception(0) for done in before)
    with pytest.raises(WeightsError, match=r"version 1 did not arrive: .* differ by \d.* nats"):
        last.result(0)
    verifier.loop.submit([one(), replace(one(1), weight_version=1)])
    verifier.finish()
    assert [type(event) for event in verifier.events] == [Refused, Refused]
    assert isinstance(verifier.loop.error, WeightsError) == asleep, "else the load itself has failed"
    assert not any(done.exception(0) for done in load(right))
    verifier.loop.submit([replace(one(2), weight_version=2)])
    verifier.finish()
    assert verifier.ends() == [("r0", 2)]


def test_weights_that_fail_half_way_are_tried_again_and_nothing_runs_meanwhile(verifier: Verifier) -> None:
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(tiny_target()).state_dict()
    load = verifier.engine.load_weights

    def fail(version: int, state_dict: Any) -> None:
        verifier.engine.load_weights = load  # type: ignore[method-assign]
        raise ValueError("experts")

    verifier.engine.load_weights = fail  # type: ignore[method-assign]
    first = verifier.loop.load_weights(WeightSet(1, ()), weights)
    verifier.step()
    assert isinstance(first.exception(0), ValueError)
    verifier.loop.submit([one(), replace(one(1), weight_version=1)])
    again = verifier.loop.load_weights(WeightSet(1, ()), weights)
    verifier.loop.submit([replace(one(2), weight_version=1)])
    verifier.finish()
    again.result(0)
    assert [type(event) for event in verifier.events[:2]] == [Refused, Refused] and verifier.ends() == [("r0", 2)]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("top_k", 2**63, "sampling.top_k is "),
        ("temperature", 10**400, "sampling.temperature is "),
        ("seed", -1, "sampling.seed is "),
        ("top_p", "1", "sampling.top_p is "),
        ("max_tokens", 9, "token id 1000000"),
    ],
)
def test_a_request_that_can_never_run_fails_once_and_alone(
    verifier: Verifier, name: str, value: Any, problem: str
) -> None:
    sampling, prompt = SamplingParams(), (10**6,) if name == "max_tokens" else (1,)
    object.__setattr__(sampling, name, value)  # as it may come out of a pickle
    bad = TargetRequest("bad", prompt, sampling, attempt=5)
    verifier.loop.submit([bad, bad, one()])
    verifier.finish()
    (failed,) = [event for event in verifier.events if isinstance(event, Finished) and event.request_id == "bad"]
    assert (failed.finish_reason, failed.attempt) == ("error", 5) and problem in failed.error
    assert verifier.tokens("r0", 0) == truth_of([one()])["r0"]


def test_attempts_are_remembered_within_a_bound(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specactor_ray.verify.requests._REMEMBERED", 2)
    for name, attempt in (("r0", 3), ("b", 0), ("r0", 1), ("c", 0)):
        verifier.loop.cancel([(name, attempt)])
    verifier.loop.submit([one(3), replace(one(), request_id="b"), replace(one(), request_id="c")])
    verifier.finish()
    assert verifier.ends() == [("b", 0)], "an older one hides no newer; the one noted longest ago is forgotten"


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

    def slow(*arguments: Any) -> object:
        seen.append(verifier.loop.snapshot()["busy_s"])
        verifier.clock.seconds += 60.0
        seen.append(verifier.loop.snapshot()["busy_s"])
        return step(*arguments)

    verifier.engine.step = slow  # type: ignore[method-assign, assignment]
    verifier.loop.submit([one()])
    verifier.step()
    assert seen == [0.0, 60.0]
    verifier.clock.seconds += 60.0
    assert verifier.loop.snapshot()["busy_s"] == 0.0, "between two steps"


def test_a_command_is_no_part_of_the_step_after_it(verifier: Verifier) -> None:
    """New weights of a head that take long would look like the price of having drafts."""

    def teach() -> None:
        verifier.clock.seconds += 30.0

    verifier.loop.submit([one()])
    verifier.loop.put(teach)
    verifier.loop.run_once()
    assert verifier.loop.metrics.steps == 1 and verifier.loop.metrics.protocol_s < 1.0


# ---- waits for drafters in other processes, on virtual time ----

LINK_S, STEP_S = 0.01, 0.001
"""A message takes so long in either direction, and a step; models take no time."""


def decode(deaf: bool = False, **speculation: Any) -> dict[str, Any]:
    """Counters after one request, with the target as its own drafter, which may hear nothing."""
    bench, target = virtual.Bench(), engine()
    kernel, clock = bench.kernel, bench.clock
    drafting = Drafting("v0", False, SpeculationConfig(**speculation), target.table)
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
