#!/usr/bin/env python3
"""What our own Python costs in the driver, without Ray: a look at all verifiers, progress of requests, the journal.

Calls are answered at once. Medians, in one process on one thread.

    python scripts/bench_driver.py
"""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from specactor_ray.actors.specs import ClusterView
from specactor_ray.bench.micro import run_figures
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.dispatch import Dispatcher
from specactor_ray.rollout.journal import Journal, JournalEntry
from specactor_ray.target.base import TargetRequest
from specactor_ray.transport.messages import Progress, ToRollout

LENGTH = 1 << 14
VERIFIERS, REQUESTS = 256, 16_384


class HandClock:
    """Time that moves by calls only; `on_wait` is called in place of a wait for an event."""

    def __init__(self) -> None:
        self._now = 0.0
        self.on_wait: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def event(self) -> HandClock:
        return self

    def wait(self, timeout: float | None = None) -> None:
        self.on_wait()

    def set(self) -> None: ...

    def clear(self) -> None: ...


class InstantCluster:
    """Answers calls of the driver, and times what it does between two waits.

    Args:
        rows: Requests of each verifier that make progress in each answered poll; 0 never answers a poll.
        passes: Waits after which the driver is stopped.
    """

    def __init__(self, clock: HandClock, rows: int, passes: int) -> None:
        self._clock, self._rows, self._passes = clock, rows, passes
        clock.on_wait = self._end_of_pass
        self._answers: dict[object, Any] = {}
        self._pending: dict[object, str] = {}
        self._running: dict[str, list[TargetRequest]] = {f"verifier-{n}#1": [] for n in range(VERIFIERS)}
        self._ends: dict[str, int] = {}
        self._numbers = dict.fromkeys(self._running, 0)
        self.spent: list[float] = []
        self._begin: float | None = None
        self._all_out = False

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> object:
        reference = object()
        if method == "view":
            self._answers[reference] = ClusterView(verifiers={name: name for name in self._running})
        elif method == "submit":
            self._running[actor].extend(arguments[0])
            self._answers[reference] = None
        elif method == "poll":
            self._pending[reference] = actor
        else:
            self._answers[reference] = None
        return reference

    def delivery(self, reference: object) -> InstantCluster:
        return self

    def add_done_callback(self, done: Callable[[Any], None]) -> None: ...

    def wait(self, references: Sequence[object], timeout_s: float) -> set[object]:
        return {one for one in references if one in self._answers}

    def take(self, reference: object, what: str = "the call") -> Any:
        return self._answers.pop(reference)

    def _end_of_pass(self) -> None:
        now = time.perf_counter()
        if self._begin is not None and self._all_out:
            self.spent.append(now - self._begin)
        if len(self.spent) >= self._passes:
            raise KeyboardInterrupt
        self._clock.sleep(0.3)  # longer than the driver waits, so the next pass has begun
        self._all_out = sum(map(len, self._running.values())) == REQUESTS
        if self._all_out and self._rows:
            for reference, actor in self._pending.items():
                self._answers[reference] = self._progress(actor)
            self._pending.clear()
        self._begin = time.perf_counter()

    def _progress(self, actor: str) -> tuple[int, list[ToRollout], dict[str, Any]]:
        running = self._running[actor][: self._rows]
        start, count = self._ends.get(actor, 0), len(running)
        self._ends[actor] = start + 3
        events: list[ToRollout] = [
            Progress(
                tuple((request.request_id, request.attempt) for request in running),
                np.full(count, start, np.int32),
                np.full(count, 3, np.int32),
                np.arange(3 * count, dtype=np.int32),
                np.zeros(3 * count, np.float32),
            )
        ]
        first = self._numbers[actor]
        self._numbers[actor] += len(events)
        return first, events, {}


def driver_pass_ms(rows: int, passes: int) -> float:
    """Milliseconds between two waits of the driver, with all requests handed out."""
    clock = HandClock()
    cluster = InstantCluster(clock, rows, passes)
    dispatcher = Dispatcher("controller", Calls(cluster, clock), REQUESTS // VERIFIERS, 1e6)  # type: ignore[arg-type]
    entries = [JournalEntry(f"request-{n}", (1, 2, 3), SamplingParams(max_tokens=LENGTH)) for n in range(REQUESTS)]
    dispatcher.admit(entries)
    with contextlib.suppress(KeyboardInterrupt):
        while not dispatcher.step():
            pass
    return 1e3 * median(cluster.spent[2:])


def driver_us_per_row() -> float:
    """Microseconds of the driver for the progress of one request, journaling included, looking around not."""
    return 1e3 * (driver_pass_ms(REQUESTS // VERIFIERS, 6) - driver_pass_ms(0, 6)) / REQUESTS


def journal_bytes_per_token() -> float:
    """Memory of journaled tokens."""
    journal, tokens_each, count = Journal(), 2000, 2000
    rng = np.random.default_rng(0)
    for n in range(count):
        journal.add(JournalEntry(f"request-{n}", (1,), SamplingParams(max_tokens=LENGTH)))
        journal.hand_to(f"request-{n}", "v")
    requests = tuple((f"request-{n}", 1) for n in range(count))
    tracemalloc.start()
    for start in range(0, tokens_each, 4):
        tokens, logprobs = rng.integers(0, 150_000, 4 * count), rng.random(4 * count)
        starts, lengths = np.full(count, start, np.int32), np.full(count, 4, np.int32)
        journal.progress(Progress(requests, starts, lengths, tokens.astype(np.int32), logprobs.astype(np.float32)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / (tokens_each * count)


GROUPS = {
    "driver": {
        "driver_look_ms_256_verifiers_16384_requests": lambda: driver_pass_ms(0, 12),
        "driver_us_per_progress_row": driver_us_per_row,
        "journal_bytes_per_token": journal_bytes_per_token,
    },
}


if __name__ == "__main__":
    run_figures(GROUPS)
