"""The producer's side: one delivery in flight, conflation meanwhile, failure."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from specactor_ray.errors import ActorLostError, ActorUnavailableError, CallTimeoutError, RemoteError
from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftTail, SamplingParams
from specactor_ray.queues.conflation import for_drafter, for_verifier
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.outbox import Outbox
from specactor_ray.queues.screening import verifier_screen
from tests.clocks import HandClock


class Wire:
    """A transport whose deliveries end when the test says so."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.futures: list[Future[None]] = []
        self.clock = HandClock()

    def send(self, batch: list[object]) -> Future[None]:
        self.batches.append(batch)
        self.futures.append(Future())
        return self.futures[-1]


def await_delivery(outbox: Outbox[Any]) -> None:
    """Until nothing waits or is on its way."""
    deadline = time.monotonic() + 10.0
    while outbox.in_flight or len(outbox):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def commit(start: int, end: int) -> Commit:
    return Commit("r", "v", start, tuple(range(start, end)), 4)


def other(end: int) -> Commit:
    return Commit("other", "v", 0, tuple(range(end)), 4)


def test_one_delivery_in_flight_and_the_rest_conflates() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1)])
    outbox.post([commit(1, 2)])
    outbox.post([commit(2, 4)])
    assert wire.batches == [[commit(0, 1)]]
    assert outbox.in_flight
    assert len(outbox) == 1
    wire.futures[0].set_result(None)
    assert wire.batches == [[commit(0, 1)], [commit(1, 4)]]
    wire.futures[1].set_result(None)
    assert outbox.conflated == 1
    assert outbox.snapshot() == {"failed": "", "retries": 0, "rejected": 0, "dropped": 0}
    assert not outbox.in_flight
    assert outbox.flush() is False
    assert len(wire.batches) == 2


def test_queue_alone_sends_nothing() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter())
    outbox.queue([commit(0, 1)])
    assert wire.batches == []
    outbox.queue([commit(1, 2)])
    assert outbox.flush() is True
    assert wire.batches == [[commit(0, 2)]]


def test_a_consumer_that_is_gone_for_good_is_sent_nothing_more() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1)])
    outbox.post([commit(1, 2)])
    error = ActorLostError("it died")
    wire.futures[0].set_exception(error)
    assert outbox.failed is error
    assert len(outbox) == 0
    outbox.post([commit(2, 3)])
    wire.clock.seconds = 1000.0
    assert outbox.flush() is False
    assert len(wire.batches) == 1
    assert outbox.snapshot() == {"failed": "it died", "retries": 0, "rejected": 0, "dropped": 3}


@pytest.mark.parametrize("error", [ActorUnavailableError("away"), CallTimeoutError("late")])
def test_what_did_not_arrive_goes_out_again_under_what_came_since(error: Exception) -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1), other(5)])
    outbox.post([commit(1, 3)])
    wire.futures[0].set_exception(error)
    assert outbox.failed is None and not outbox.in_flight
    assert len(wire.batches) == 1, "a pause is kept"
    wire.clock.seconds = 0.09
    outbox.post([commit(3, 4)])
    assert len(wire.batches) == 1
    wire.clock.seconds = 0.1
    assert outbox.flush()
    assert wire.batches[1] == [commit(0, 4), other(5)], "nothing is missing, and the order of slots is that of arrival"
    wire.futures[1].set_result(None)
    assert outbox.snapshot()["retries"] == 1 and not len(outbox)


def test_what_did_not_arrive_counts_as_older_than_what_waits() -> None:
    wire = Wire()
    to_drafter = Outbox(wire.send, for_drafter(), clock=wire.clock)
    again = DraftOpen("r", "v", (1,), (), SamplingParams(), 4)
    to_drafter.post([DraftClose("r", "v")])
    to_drafter.post([again])
    wire.futures[0].set_exception(ActorUnavailableError("away"))
    to_verifier = Outbox(wire.send, for_verifier(), clock=wire.clock)
    to_verifier.post([DraftTail("r", "d", 1, (1,))])
    to_verifier.post([DraftTail("r", "d", 2, (2,))])
    wire.futures[1].set_exception(ActorUnavailableError("away"))
    wire.clock.seconds = 1.0
    assert to_drafter.flush() and to_verifier.flush()
    assert wire.batches[2:] == [[again], [DraftTail("r", "d", 2, (2,))]]


def test_pauses_double_up_to_a_bound_and_begin_again_after_an_arrival() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1)])

    def pauses(number: int) -> list[float]:
        found = []
        for _ in range(number):
            wire.futures[-1].set_exception(ActorUnavailableError("away"))
            began = wire.clock.seconds
            while not outbox.flush():
                wire.clock.seconds += 0.01
            found.append(wire.clock.seconds - began)
        return found

    assert pauses(8) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.015)
    wire.futures[-1].set_result(None)
    outbox.post([commit(1, 2)])
    assert pauses(2) == pytest.approx([0.1, 0.2], abs=0.015)


def test_a_delivery_past_its_deadline_is_given_up_and_its_late_end_disturbs_nothing() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1)])
    wire.clock.seconds = 9.9
    assert not outbox.flush() and outbox.in_flight
    wire.clock.seconds = 10.0
    assert not outbox.flush() and not outbox.in_flight and len(outbox) == 1
    wire.clock.seconds = 10.1
    assert outbox.flush()
    wire.futures[0].set_result(None)
    assert outbox.in_flight, "the end of the first says nothing about the second"
    outbox.post([commit(1, 2)])
    assert len(wire.batches) == 2
    wire.futures[1].set_result(None)
    assert wire.batches[2] == [commit(1, 2)]
    outbox.post([commit(2, 3)])
    wire.clock.seconds = 30.0
    assert not outbox.flush()
    wire.futures[2].set_exception(ActorLostError("that was about an earlier one"))
    assert outbox.failed is None and len(outbox) == 1


def test_a_batch_that_the_consumer_rejects_is_dropped_and_the_link_stays() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1), other(5)])
    outbox.post([commit(1, 2)])
    wire.futures[0].set_exception(RemoteError("it raised"))
    assert wire.batches[1] == [commit(1, 2)], "without a pause: the batch was the cause"
    wire.futures[1].cancel()
    assert outbox.failed is None and not outbox.in_flight
    assert outbox.snapshot()["rejected"] == 3


def test_a_send_that_raises_is_a_delivery_that_failed() -> None:
    errors: list[Exception] = [ActorUnavailableError("away"), ValueError("a bug"), ActorLostError("gone")]
    clock = HandClock()

    def broken(batch: list[object]) -> Future[None]:
        raise errors.pop(0)

    outbox = Outbox(broken, for_drafter(), clock=clock)
    outbox.post([commit(0, 1)])
    assert len(outbox) == 1 and not outbox.in_flight
    clock.seconds = 1.0
    outbox.flush()
    assert outbox.snapshot()["rejected"] == 1 and outbox.failed is None
    outbox.post([commit(1, 2)])
    assert isinstance(outbox.failed, ActorLostError)


def test_what_waits_is_bounded_when_the_consumer_never_answers() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_verifier(), max_keys=8)
    for number in range(1000):
        outbox.post([DraftTail(str(number % 20), "d", number, (1,))])
    assert len(wire.batches) == 1
    assert len(outbox) == 8
    assert outbox.snapshot()["dropped"] + outbox.conflated + len(outbox) + len(wire.batches[0]) == 1000


def test_deliveries_never_overlap_and_the_newest_arrives() -> None:
    mailbox = Mailbox(for_verifier(), verifier_screen(1000))
    lock, overlaps = threading.Lock(), []

    def deliver(batch: list[DraftTail]) -> None:
        overlaps.append(not lock.acquire(blocking=False))
        mailbox.put(batch)
        lock.release()

    with ThreadPoolExecutor(max_workers=4) as pool:
        outbox = Outbox(lambda batch: pool.submit(deliver, batch), for_verifier())

        def produce(drafter: int) -> None:
            for number in range(200):
                outbox.post([DraftTail("r", f"d{drafter}", number, (number,))])

        threads = [threading.Thread(target=produce, args=(drafter,)) for drafter in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        await_delivery(outbox)
    assert not any(overlaps)
    assert {(tail.drafter_id, tail.base_len) for tail in mailbox.drain()} == {(f"d{d}", 199) for d in range(3)}
