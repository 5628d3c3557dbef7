"""Links: one delivery in flight, the newest state, retries, the end. Events: nothing is lost or given out twice."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from specactor_ray.core.errors import ActorLostError, ActorUnavailableError, CallTimeoutError, RemoteError
from specactor_ray.transport.link import EventQueue, Link, direct_sender
from tests.fakes.clocks import HandClock

# ---- links ----


CALM = {"failed": "", "retries": 0, "rejected": 0}


class Wire:
    """A transport whose deliveries end when the test says so."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.futures: list[Future[None]] = []
        self.clock, self.freed = HandClock(), 0
        self.link: Link[str] = Link(self._send, self._free, clock=self.clock)

    def _send(self, message: str) -> Future[None]:
        self.sent.append(message)
        self.futures.append(Future())
        return self.futures[-1]

    def _free(self) -> None:
        self.freed += 1

    def offer(self, message: str | None) -> bool:
        return self.link.offer(lambda: message)


def unasked() -> str:
    raise AssertionError("it was asked for a message that cannot be sent now")


def test_one_delivery_in_flight_and_then_what_is_so_by_then() -> None:
    wire = Wire()
    assert wire.link.is_free and wire.offer("one")
    assert not wire.link.is_free and not wire.link.offer(unasked)
    assert wire.sent == ["one"] and not wire.freed
    wire.futures[0].set_result(None)
    assert wire.freed == 1 and wire.link.is_free, "the loop is told that it may offer again"
    assert not wire.offer(None) and wire.link.is_free, "nothing to say"
    assert wire.offer("all since") and wire.sent == ["one", "all since"]
    assert wire.link.snapshot() == CALM


@pytest.mark.parametrize(("text", "shown"), [("it died", "it died"), ("", "ActorLostError")])
def test_a_consumer_that_is_gone_for_good_is_sent_nothing_more(text: str, shown: str) -> None:
    wire, error = Wire(), ActorLostError(text)
    wire.offer("one")
    wire.futures[0].set_exception(error)
    wire.clock.seconds = 1000.0
    assert wire.link.failed is error and not wire.link.is_free and not wire.link.offer(unasked)
    assert wire.freed == 1 and wire.link.snapshot() == {**CALM, "failed": shown}


@pytest.mark.parametrize("error", [ActorUnavailableError("away"), CallTimeoutError("late")])
def test_what_did_not_arrive_is_sent_again_as_it_was_after_a_pause(error: Exception) -> None:
    wire = Wire()
    wire.offer("one")
    for _ in range(8):
        wire.futures[-1].set_exception(error)
        wire.clock.seconds += 0.99
        assert wire.link.failed is None and not wire.link.is_free and not wire.link.offer(unasked)
        wire.clock.seconds += 0.02
        assert wire.link.is_free and wire.link.offer(unasked)
    assert wire.sent == ["one"] * 9 and wire.freed == 8
    wire.futures[-1].set_result(None)
    assert wire.offer("two") and wire.link.snapshot() == {**CALM, "retries": 8}


def test_a_delivery_past_its_deadline_is_given_up_and_its_late_end_disturbs_nothing() -> None:
    wire = Wire()
    wire.offer("one")
    wire.clock.seconds = 9.9
    assert not wire.link.is_free and not wire.link.offer(unasked)
    wire.clock.seconds = 10.0
    assert wire.link.is_free and wire.link.offer(unasked) and wire.sent == ["one", "one"]
    wire.futures[0].set_exception(ActorLostError("that was about an earlier one"))
    assert wire.link.failed is None and not wire.freed
    assert not wire.link.offer(unasked), "the end of the first says nothing about the second"
    wire.futures[1].set_result(None)
    assert wire.offer("two") and wire.link.snapshot()["retries"] == 1
    wire.clock.seconds = 30.0
    wire.futures[2].set_result(None)
    assert wire.offer("three") and wire.link.snapshot()["retries"] == 1, "late, but before it was sent again"


def test_a_message_that_the_consumer_rejects_is_dropped_and_the_link_stays(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    wire.offer("bad")
    wire.futures[0].set_exception(RemoteError("it raised"))
    assert wire.offer("two"), "without a pause: the message was the cause"
    wire.futures[1].cancel()
    assert wire.offer("three") and wire.link.failed is None
    assert wire.link.snapshot() == {**CALM, "rejected": 2}
    assert [record.getMessage().endswith("it raised") for record in caplog.records] == [True], (
        "the rest is only counted"
    )


def test_a_send_that_raises_is_a_delivery_that_failed() -> None:
    errors: list[Exception] = [ActorUnavailableError("away"), ValueError("a bug"), ActorLostError("gone")]
    clock = HandClock()

    def broken(message: str) -> Future[None]:
        raise errors.pop(0)

    link = Link(broken, clock=clock)
    assert link.offer(lambda: "one") and not link.offer(unasked)
    clock.seconds = 1.1
    assert link.offer(unasked) and link.snapshot() == {**CALM, "retries": 1, "rejected": 1}
    assert link.offer(lambda: "two") and isinstance(link.failed, ActorLostError)


def test_within_a_process_a_message_is_there_when_offer_returns() -> None:
    taken: list[str] = []
    link: Link[str] = Link(direct_sender(taken.append), lambda: taken.append("free"))
    assert link.offer(lambda: "one") and link.offer(lambda: "two")
    assert taken == ["one", "free", "two", "free"] and link.snapshot() == CALM


def test_deliveries_never_overlap_and_the_newest_state_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries of four threads, some of which fail: the consumer gets all parts, one after the other."""
    lock, overlaps, heard, told = threading.Lock(), [], [0], 0
    total, arrived = 2000, threading.Semaphore(0)
    monkeypatch.setattr("specactor_ray.transport.link._DEADLINE_S", 1e12)
    clock = HandClock(tick_s=10.0)  # longer than a pause: what failed is sent again by the next offer

    def deliver(part: tuple[int, int]) -> None:
        overlaps.append(not lock.acquire(blocking=False))
        try:
            if part[0] % 7 == 3 and len(overlaps) % 2:
                raise ActorUnavailableError("away")
            assert part[0] <= heard[0], "a part is missing"
            heard[0] = max(heard[0], part[1])
        finally:
            lock.release()

    def make(known: int) -> tuple[int, int] | None:
        nonlocal told
        part, told = (told, known), known
        return part if part[0] < part[1] else None

    with ThreadPoolExecutor(max_workers=4) as pool:
        link: Link[tuple[int, int]] = Link(lambda part: pool.submit(deliver, part), arrived.release, clock=clock)
        for known in range(1, total + 1):
            link.offer(functools.partial(make, known))
        while heard[0] < total:
            link.offer(lambda: make(total))
            assert arrived.acquire(timeout=60.0)
    assert not any(overlaps) and link.failed is None and link.snapshot()["rejected"] == 0


# ---- events ----


def woken(wait: Callable[[], object], wake: Callable[[], None]) -> object:
    """What `wait`, running in a thread, returns after `wake`; fails if it does not wake up."""
    results: list[object] = []
    sleeper = threading.Thread(target=lambda: results.append(wait()), daemon=True)
    sleeper.start()
    sleeper.join(0.02)
    assert sleeper.is_alive(), "it did not wait"
    wake()
    sleeper.join(10.0)
    assert results, "it slept on"
    return results[0]


def test_events_are_kept_until_the_reader_has_them() -> None:
    queue: EventQueue[int] = EventQueue()
    queue.put([1, 2])
    queue.put([2, 3])
    assert queue.read(0) == queue.read(0) == (0, [1, 2, 2, 3]), "an answer that was lost can be had again"
    assert queue.read(1) == (1, [2, 2, 3])
    assert len(queue) == 3
    assert queue.read(4) == (4, [])
    assert queue.read(1) == (4, []), "a late repetition of an older call brings nothing back"
    assert woken(lambda: queue.read(4, timeout_s=600.0), lambda: queue.put([4])) == (4, [4])
    assert queue.read(4, timeout_s=600.0) == (4, [4]), "what is there is not waited for"
    with pytest.raises(ValueError, match="next one is number 5"):
        queue.read(6)
    assert queue.read(4) == (4, [4]), "and nothing was lost by the nonsense"


def test_an_event_read_by_a_repeated_call_is_not_given_out_twice() -> None:
    """Two polls with one number wait; the reader has the events and goes on before the second returns."""
    queue: EventQueue[int] = EventQueue()

    def read_on() -> None:
        queue.put([1, 2])
        assert queue.read(2) == (2, [])

    assert woken(lambda: queue.read(0, timeout_s=600.0), read_on) in [(0, [1, 2]), (2, [])]


def test_the_next_call_ends_the_waits_of_the_one_before() -> None:
    queue: EventQueue[int] = EventQueue()
    assert woken(lambda: queue.read(0, 600.0, 600.0), lambda: queue.read(0)) == (0, [])
    queue.put([1], urgent=False)
    assert woken(lambda: queue.read(0, 600.0, 600.0), lambda: queue.read(0)) == (0, [1])
