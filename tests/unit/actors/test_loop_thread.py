"""The thread that makes and runs a loop."""

from __future__ import annotations

import threading

import pytest

from specactor_ray.actors.process import LoopThread


class Recorder:
    def __init__(self) -> None:
        self.made_in = threading.get_ident()
        self.ran_in: int | None = None
        self._stop = threading.Event()

    def run(self) -> None:
        self.ran_in = threading.get_ident()
        self._stop.wait()

    def stop(self) -> None:
        self._stop.set()


def test_a_loop_is_made_in_the_thread_that_runs_it() -> None:
    thread = LoopThread(Recorder, "recorder")
    loop = thread.loop()
    assert thread.alive
    assert thread.stop(10.0) and not thread.alive
    assert loop.made_in == loop.ran_in != threading.get_ident()


def test_what_making_the_loop_raised_reaches_who_asks_for_it() -> None:
    def fail() -> Recorder:
        raise ValueError("no such model")

    thread = LoopThread(fail, "recorder")
    with pytest.raises(ValueError, match="no such model"):
        thread.loop()
    assert thread.stop(10.0)
