"""Supervision: silence, stalls and deaths are told apart; nothing blocks; at most one call of a kind is in flight."""

from __future__ import annotations

from typing import Any

import pytest

from specactor_ray.actors.specs import VERIFIER, Phase
from specactor_ray.cluster.backend import ProcessFacts
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.supply import Demand
from specactor_ray.controller.members import Channel, Member, stop_in_order
from specactor_ray.controller.seating import Gang, Seat
from specactor_ray.core.errors import (
    ActorLostError,
    ActorUnavailableError,
    CallTimeoutError,
    ModelLoadError,
    RemoteError,
    SpecActorError,
)
from tests.fakes.clocks import HandClock
from tests.fakes.hand_transport import HandTransport, Sent
from tests.fakes.virtual import Bench

INTERVAL_S = 2.0
FACTS = ProcessFacts(7, 0, "node")


def make_member(name: str, handle: Any, calls: Calls) -> Member:
    member = Member(name, VERIFIER, seat=Seat("v-0", VERIFIER, 0, Demand("v-0", 1), Gang("v-0")), calls=calls)
    member.launched(handle, 30.0, 0.0)
    return member


class Watch:
    """One supervised actor whose calls are answered by hand; time moves by hand too."""

    def __init__(self, started: bool = True) -> None:
        self.clock, self.transport = HandClock(), HandTransport()
        self.calls = Calls(self.transport, self.clock)
        self.actor = make_member("v-0#1", "v", self.calls)
        if started:
            self.one("__ray_call__").answer(FACTS)
            self.one("start").answer({"pid": 7})
            self.look()
            assert self.actor.phase is Phase.READY and self.actor.facts == FACTS

    def look(self, seconds: float = 0.0) -> None:
        """Time passes, and the supervisor comes round."""
        self.clock.seconds += seconds
        self.actor.poll(self.clock.seconds, INTERVAL_S)

    def one(self, method: str) -> Sent:
        (sent,) = self.transport.open("v", method)
        return sent

    def pings(self) -> int:
        return sum(sent.method == "ping" for sent in self.transport.sent)

    @property
    def silent_s(self) -> float:
        return float(self.actor.silent_s(self.clock.seconds))


def test_health_is_asked_at_the_interval_once_at_a_time_and_of_a_suspect_at_once() -> None:
    watch = Watch()
    for number in range(1, 4):
        for _ in range(5):
            assert watch.pings() == number, "the last one is not answered"
            watch.look(0.1)
        watch.one("ping").answer({"steps": number, "busy_s": 40.0})
        watch.look(0.1)
        assert watch.actor.counters["steps"] == number and watch.silent_s == 0.0 and watch.actor.stalled_s == 40.0
        watch.look(INTERVAL_S)
    watch.one("ping").answer({})
    watch.look(0.1)
    watch.actor.hurry()
    watch.look(0.1)
    assert watch.pings() == 5


def test_silence_counts_from_the_oldest_check_without_an_answer() -> None:
    watch = Watch()
    for _ in range(30):
        watch.look(1.0)
    assert watch.silent_s == 30.0 and watch.actor.error is None
    assert watch.pings() > 5, "a check that was lost silenced those after it"
    watch.actor.forgive(watch.clock.seconds)
    watch.clock.seconds += 3.0
    assert watch.silent_s == pytest.approx(3.0), "a delay of the controller does not count"
    watch.transport.open("v", "ping")[-1].answer({})
    watch.look()
    assert watch.silent_s == 0.0


@pytest.mark.parametrize("error", [ActorUnavailableError("network"), CallTimeoutError("slow")])
def test_one_that_is_out_of_reach_is_silent_and_not_dead(error: SpecActorError) -> None:
    watch = Watch()
    for _ in range(4):
        watch.one("ping").answer(error=error)
        watch.look(INTERVAL_S)
    assert watch.silent_s == 4 * INTERVAL_S and watch.actor.error is None and watch.pings() == 5


@pytest.mark.parametrize("cause", [ActorLostError("ended", True), RemoteError("x")])
def test_one_that_is_gone_or_whose_loop_has_failed_is_dead(cause: SpecActorError) -> None:
    watch = Watch()
    watch.one("ping").answer(error=cause)
    watch.look()
    error = watch.actor.error
    assert watch.actor.phase is Phase.DEAD and str(error) == f"v-0#1 failed its health check: {cause}"
    assert getattr(error, "node_lost", None) == getattr(cause, "node_lost", None)
    watch.look(INTERVAL_S)
    assert watch.pings() == 1


@pytest.mark.parametrize("order", [("__ray_call__", "start"), ("start", "__ray_call__")])
def test_an_error_of_the_start_counts_more_than_the_end_of_the_process(order: tuple[str, str]) -> None:
    watch = Watch(started=False)
    errors = {"__ray_call__": ActorLostError("gone"), "start": ModelLoadError("there is no model m")}
    for method in order:
        watch.one(method).answer(error=errors[method])
        watch.look()
    assert isinstance(watch.actor.error, ModelLoadError)


def test_a_version_is_sent_until_it_was_taken() -> None:
    watch, channel = Watch(), Channel("v-0#1")

    def update(seconds: float = 0.0) -> None:
        watch.clock.seconds += seconds
        channel.update(1, watch.clock.seconds, lambda: watch.actor.call("set_drafters", 1, ()))

    for seconds in (0.0, 2.0, 2.0):
        update(seconds)
        watch.one("set_drafters").answer(error=RemoteError("a bug"))
        update(1.9)
        assert str(channel.error) == "v-0#1 failed an update: a bug" and channel.acked == 0
        assert not watch.transport.open("v", "set_drafters")
    update(2.0)
    watch.one("set_drafters").answer()
    update()
    assert channel.acked == 1 and channel.error is None and not watch.transport.open("v", "set_drafters")


class Stops:
    """An actor that takes a while to end its loop."""

    def __init__(self, bench: Bench, stop_s: float) -> None:
        self._bench, self._stop_s = bench, stop_s

    def start(self) -> dict[str, Any]:
        return {}

    def ping(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        self._bench.clock.sleep(self._stop_s)


@pytest.mark.parametrize(
    ("stop_s", "fault", "least_s", "most_s"),
    [(3.0, "", 3.0, 3.5), (1000.0, "", 12.0, 12.5), (1000.0, "freeze", 3.9, 7.0)],
    ids=["in order", "too slow", "silent"],
)
def test_all_are_asked_to_stop_and_waited_for_as_long_as_it_helps(
    stop_s: float, fault: str, least_s: float, most_s: float
) -> None:
    bench = Bench()
    handles = [bench.start(Stops(bench, seconds), f"a{seconds}") for seconds in (0.5, stop_s)]
    actors = [make_member(handle.name, handle, bench.calls) for handle in handles]

    def body() -> float:
        while not all(actor.has_started for actor in actors):
            bench.clock.sleep(0.1)
            for actor in actors:
                actor.poll(bench.clock.now(), INTERVAL_S)
        if fault:
            bench.kernel.freeze(handles[1].process)
        begin = bench.clock.now()
        stop_in_order(actors, bench.calls, 12.0, INTERVAL_S)
        return bench.clock.now() - begin

    assert least_s <= bench.run(body) <= most_s
