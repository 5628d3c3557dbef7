"""Trainer ranks without processes, on a clock of their own: calls take as long as they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.core.errors import SpecActorError
from tests.fakes.clocks import HandClock
from tests.fakes.hand_transport import LocalObjects

NEVER = float("inf")


class FakeRank:
    """Answers `(after how many seconds, with what)`; an error is raised. Counts progress until a moment."""

    def __init__(self, clock: HandClock, progress_until: float = NEVER, **answers: tuple[float, Any]) -> None:
        self.clock, self.progress_until, self.answers = clock, progress_until, answers
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def answer(self, method: str, arguments: Sequence[Any]) -> tuple[float, Any]:
        self.called.append((method, tuple(arguments)))
        if method == "heartbeat":
            return 0.0, int(min(self.clock.seconds, self.progress_until))
        return self.answers.get(method, (0.0, None))


@dataclass(eq=False)
class Due:
    """The answer to a call, and when it is due."""

    time: float
    answer: Any

    def result(self, what: str) -> Any:
        if isinstance(self.answer, SpecActorError):
            raise self.answer
        return self.answer


class FakeTransport(LocalObjects):
    """Carries calls to fake ranks at once; their answers come when they are due."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock

    def send(self, actor: FakeRank, method: str, arguments: Sequence[Any]) -> Due:
        delay, answer = actor.answer(method, arguments)
        return Due(self._clock.seconds + delay, answer)

    def wait(self, answers: Sequence[Due], timeout_s: float) -> set[Due]:
        first, end = min(answer.time for answer in answers), self._clock.seconds + timeout_s
        self._clock.seconds = max(self._clock.seconds, min(first, end))
        return {answer for answer in answers if answer.time <= self._clock.seconds}
