"""Looks at a rollout a few times a second: when is a fault noticed, when is all as it was, does anything still move?"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.core.errors import SpecActorError
from tests.chaos.record import Fault

LOOK_S = 0.1


@dataclass(eq=False)
class Open:
    """A fault that is being watched."""

    fault: Fault
    since: float
    targets: Sequence[str] = ()
    fatal: bool = False
    """Its targets are dead: they must leave the status."""
    over_at: float | None = None
    tokens: int = 0
    """Committed when the fault was over."""
    recovered: threading.Event = field(default_factory=threading.Event)


class Watch:
    """A thread that compares the status with what is desired.

    Args:
        status: Rows of the run's actors; may block.
        tokens: Output tokens committed so far.
        verifiers: How many there should be.
        drafters: Draft method → how many there should be; changed by whoever scales.
    """

    def __init__(
        self,
        status: Callable[[], list[dict[str, Any]]],
        tokens: Callable[[], int],
        verifiers: int,
        drafters: Mapping[str, int],
    ) -> None:
        self.wanted = dict(drafters)
        self.rows: list[dict[str, Any]] = []
        self.settled = False
        self.incarnations: set[str] = set()
        """Ids of all actors there have been."""
        self.moved_at = time.monotonic()
        """When the last token was committed."""
        self._status, self._tokens, self._verifiers = status, tokens, verifiers
        self._last_tokens = -1
        self._open: list[Open] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30.0)

    def begin(self, fault: Fault, targets: Sequence[str] = (), fatal: bool = False) -> Open:
        """A fault strikes now."""
        opened = Open(fault, time.monotonic(), targets, fatal)
        with self._lock:
            self._open.append(opened)
        return opened

    def over(self, opened: Open) -> None:
        """From now on everything should get well again."""
        opened.tokens, opened.over_at = self._tokens(), time.monotonic()
        opened.fault.lasted_s = round(opened.over_at - opened.since, 2)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                asked = time.monotonic()
                self._take(self._status(), asked)
            except SpecActorError:  # the controller is out of reach; asked again
                continue

    def _take(self, rows: list[dict[str, Any]], asked: float) -> None:
        now, tokens = time.monotonic(), self._tokens()
        if tokens != self._last_tokens:
            self._last_tokens, self.moved_at = tokens, now
        self.rows = rows
        self.incarnations |= {row["id"] for row in rows if row["pid"]}
        self.settled = not unsettled(rows, self._verifiers, self.wanted)
        by_id = {row["id"]: row for row in rows if row["phase"] == "ready"}
        with self._lock:
            for opened in list(self._open):
                self._look(opened, by_id, now, asked, tokens)

    def _look(self, opened: Open, by_id: Mapping[str, Any], now: float, asked: float, tokens: int) -> None:
        fault, targets = opened.fault, [by_id[name] for name in opened.targets if name in by_id]
        noticed = len(targets) < len(opened.targets) or any(row["silent_s"] > 0.5 for row in targets)
        if noticed and fault.detected_s is None:
            fault.detected_s = round(now - opened.since, 2)
        if opened.over_at is None or asked < opened.over_at:
            return
        ill = bool(targets) if opened.fatal else any(row["silent_s"] > 0.5 for row in targets)
        if self.settled and not ill and tokens != opened.tokens:
            fault.recovered_s = round(now - opened.since, 2)
            opened.recovered.set()
            self._open.remove(opened)


def unsettled(rows: Sequence[Mapping[str, Any]], verifiers: int, drafters: Mapping[str, int]) -> list[str]:
    """What the actors lack of the desired state."""
    serving = [row for row in rows if row["phase"] == "ready"]
    found = Counter(row["method"] for row in serving if row["kind"] == "drafter")
    there = sum(row["kind"] == "verifier" for row in serving)
    problems = [f"{there} verifiers instead of {verifiers}"] if there != verifiers else []
    return problems + [f"{found[name]} of {name} instead of {n}" for name, n in drafters.items() if found[name] != n]
