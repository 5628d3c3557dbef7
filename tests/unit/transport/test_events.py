"""The event queue: nothing is lost or given out twice, whatever answers are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from specactor_ray.transport.link import EventQueue


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
