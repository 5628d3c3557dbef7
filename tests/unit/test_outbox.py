"""The producer's side: one delivery in flight, conflation meanwhile, failure."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from specactor_ray.messages import Commit, DraftTail, Progress
from specactor_ray.queues.conflation import for_drafter, for_rollout, for_verifier
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.outbox import Outbox, ray_sender
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


def test_one_delivery_in_flight_and_the_rest_conflates() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter(), clock=wire.clock)
    outbox.post([commit(0, 1)])
    outbox.post([commit(1, 2)])
    outbox.post([commit(2, 4)])
    assert wire.batches == [[commit(0, 1)]]
    assert outbox.in_flight
    assert outbox.in_flight_since == 0.0
    assert len(outbox) == 1
    wire.clock.seconds = 1.5
    wire.futures[0].set_result(None)
    assert wire.batches == [[commit(0, 1)], [commit(1, 4)]]
    wire.clock.seconds = 2.0
    wire.futures[1].set_result(None)
    stats = outbox.stats()
    assert (stats.deliveries, stats.messages, stats.conflated, stats.dropped) == (2, 2, 1, 0)
    assert stats.in_flight_s == 2.0
    assert not outbox.in_flight
    assert outbox.in_flight_since is None
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


def test_a_failed_delivery_drops_what_waits_and_stays_failed() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter())
    outbox.post([commit(0, 1)])
    outbox.post([commit(1, 2)])
    error = RuntimeError("actor died")
    wire.futures[0].set_exception(error)
    assert outbox.failed is error
    assert len(outbox) == 0
    outbox.post([commit(2, 3)])
    assert len(wire.batches) == 1
    assert outbox.stats().dropped == 2


def test_a_send_that_raises_or_is_cancelled_is_a_failure() -> None:
    def broken(batch: list[object]) -> Future[None]:
        raise ConnectionError("gone")

    outbox = Outbox(broken, for_drafter())
    outbox.post([commit(0, 1)])
    assert isinstance(outbox.failed, ConnectionError)
    assert not outbox.in_flight

    wire = Wire()
    outbox = Outbox(wire.send, for_drafter())
    outbox.post([commit(0, 1)])
    wire.futures[0].cancel()
    assert outbox.failed is not None


def test_discard_keeps_what_is_in_flight() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_drafter())
    outbox.post([commit(0, 1)])
    outbox.post([commit(1, 2)])
    assert outbox.discard() == 1
    wire.futures[0].set_result(None)
    assert len(wire.batches) == 1


def test_what_waits_is_bounded_when_the_consumer_never_answers() -> None:
    wire = Wire()
    outbox = Outbox(wire.send, for_verifier(), max_keys=8)
    for number in range(1000):
        outbox.post([DraftTail(str(number % 20), "d", number, (1,))])
    assert len(wire.batches) == 1
    assert len(outbox) == 8
    stats = outbox.stats()
    assert stats.messages + stats.conflated + stats.dropped + len(outbox) == 1000


def test_journal_events_arrive_once_and_in_order_through_a_slow_wire() -> None:
    received: list[object] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        outbox = Outbox(lambda batch: pool.submit(received.extend, batch), for_rollout(), max_keys=2)
        events = [Progress("r", number, (number,), (0.0,)) for number in range(500)]
        for event in events:
            outbox.post([event])
        await_delivery(outbox)
    assert received == events


def test_ray_sender_hands_the_batch_to_the_method_as_its_one_argument() -> None:
    class Reference:
        def __init__(self, batch: list[object]) -> None:
            self.batch = batch

        def future(self) -> Future[object]:
            done: Future[object] = Future()
            done.set_result(self.batch)
            return done

    class Method:
        remote = Reference

    received = ray_sender(Method())([1, 2]).result()
    assert received == [1, 2]
    outbox = Outbox(ray_sender(Method()), for_drafter())
    outbox.post([commit(0, 1)])
    assert not outbox.in_flight, "a delivery that is done at once is noticed at once"


def test_deliveries_never_overlap_and_the_newest_arrives() -> None:
    mailbox = Mailbox(for_verifier())
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
