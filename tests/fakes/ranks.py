"""Trainer ranks without processes, on a clock of their own: calls take as long as they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.core.clock import SystemClock
from specactor_ray.core.errors import SpecActorError
from tests.fakes.hand_transport import LocalObjects

NEVER = float("inf")


class JumpingClock(SystemClock):
    """Time passes only in waits."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:  # type: ignore[override]
        return self.time

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.time += seconds


class FakeRank:
    """Answers `(after how many seconds, with what)`; an error is raised. Counts progress until a moment."""

    def __init__(self, clock: JumpingClock, progress_until: float = NEVER, **answers: tuple[float, Any]) -> None:
        self.clock, self.progress_until, self.answers = clock, progress_until, answers
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def answer(self, method: str, arguments: Sequence[Any]) -> tuple[float, Any]:
        self.called.append((method, tuple(arguments)))
        if method == "heartbeat":
            return 0.0, int(min(self.clock.time, self.progress_until))
        return self.answers.get(method, (0.0, None))


class FakeTransport(LocalObjects):
    """Carries calls to fake ranks at once; their answers come when they are due."""

    def __init__(self, clock: JumpingClock) -> None:
        self._clock = clock
        self._flying: dict[int, tuple[float, Any]] = {}
        self._sent = 0

    def send(self, actor: FakeRank, method: str, arguments: Sequence[Any]) -> int:
        delay, result = actor.answer(method, arguments)
        self._sent += 1
        self._flying[self._sent] = (self._clock.time + delay, result)
        return self._sent

    def wait(self, references: Sequence[int], timeout_s: float) -> set[int]:
        end = self._clock.time + timeout_s
        first = min(self._flying[reference][0] for reference in references)
        self._clock.time = max(self._clock.time, min(first, end))
        return {reference for reference in references if self._flying[reference][0] <= self._clock.time}

    def take(self, reference: int, what: str = "the call") -> Any:
        result = self._flying.pop(reference)[1]
        if isinstance(result, SpecActorError):
            raise result
        return result
