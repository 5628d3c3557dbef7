"""Calls that are answered when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.core.errors import SpecActorError


@dataclass(eq=False)
class Sent:
    """One call on its way, and its answer."""

    actor: Any
    method: str
    arguments: tuple[Any, ...]
    done: bool = False
    value: Any = None
    error: SpecActorError | None = None

    def answer(self, value: Any = None, error: SpecActorError | None = None) -> None:
        self.done, self.value, self.error = True, value, error

    def result(self, what: str) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class LocalObjects:
    """The rest of a `Transport`: stored objects are the values themselves."""

    def put(self, value: Any) -> Any:
        return value

    def fetch(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        return list(references)


class HandTransport(LocalObjects):
    """A `Transport` that keeps what was sent. Never waits: time is the clock's."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def open(self, actor: Any, method: str) -> list[Sent]:
        """Calls of this method that have no answer."""
        return [one for one in self.sent if one.actor == actor and one.method == method and not one.done]

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Sent:
        self.sent.append(Sent(actor, method, tuple(arguments)))
        return self.sent[-1]

    def wait(self, answers: Sequence[Any], timeout_s: float) -> set[Any]:
        return {answer for answer in answers if answer.done}
