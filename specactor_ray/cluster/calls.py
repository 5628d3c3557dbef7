"""Calls to actors: every one has a deadline, a retry rule and an error of this package.

The only module that waits for Ray's answers. A `Transport` carries the calls: Ray, or the network of the
simulator.

An actor that is out of reach (`ActorUnavailableError`) may or may not have carried out a call. Methods of actors
are idempotent, so a call is sent again until its deadline, except with `retry=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import ray
from ray import exceptions as ray_errors

from specactor_ray.cluster.metrics import RayMetrics
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import (
    ActorLostError,
    ActorUnavailableError,
    CallError,
    CallTimeoutError,
    RemoteError,
    SpecActorError,
)
from specactor_ray.core.metrics import Row
from specactor_ray.transport.link import Delivery

_RETRY_S, _RETRY_MAX_S = 0.1, 2.0
"""Seconds before a call to an unavailable actor is sent again: doubles from the first to the second value."""


class Answer(Delivery, Protocol):
    """The answer to one attempt of a call; can be hashed."""

    def result(self, what: str) -> Any:
        """The result, once it has arrived; `what` names the call in errors. Raises as `Call.result`."""


class Transport(Protocol):
    """Carries calls and objects. References to objects are opaque."""

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Answer:
        """Begin a call; returns at once."""

    def wait(self, answers: Sequence[Any], timeout_s: float) -> set[Any]:
        """Those of these distinct answers that have arrived; waits up to `timeout_s` seconds for the first."""

    def put(self, value: Any) -> Any:
        """Store an object; it lives as long as its owner and a reference to it."""

    def fetch(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """The objects of these references; CallError if they do not arrive within `timeout_s` seconds."""

    def export(self, rows: Callable[[], Iterable[Row]], run: str = "") -> None:
        """Export metrics of this process, at most once a second. `run`: its run; default: that of this actor."""


class Call:
    """A call in flight. Made by `Calls.start`; used by one thread.

    Attributes:
        done: Whether there is a result or an error; updated by `poll` and `Calls.wait`.
        error: Error of the call; None while it is in flight or when it succeeded.
        answer: Answer to the current attempt; None between two attempts and at the end.
    """

    def __init__(
        self,
        calls: Calls,
        target: tuple[Any, str, Sequence[Any]],
        end: float,
        retry: bool,
        wake: Callable[[], None] | None,
    ) -> None:
        self._calls, self._target, self._method = calls, target, target[1]
        self._end, self._retry, self._wake = end, retry, wake
        self._delay_s, self._again_at = _RETRY_S, 0.0
        self._value: Any = None
        self._unavailable: CallError | None = None
        self.done = False
        self.error: SpecActorError | None = None
        self.answer: Answer | None = None
        self._send()

    def poll(self) -> bool:
        """Take an answer that has arrived, or send again when due. Never blocks. Returns whether the call is done."""
        self._calls.wait([self], 0.0)
        return self.done

    def result(self) -> Any:
        """Wait for the answer until the deadline. Raises the actor's SpecActorError, or a `CallError`."""
        self._calls.wait([self], float("inf"))
        if self.error is not None:
            raise self.error
        return self._value

    def next_at(self) -> float:
        """Time of the next action (a repeat, or the deadline) if no answer arrives."""
        return self._end if self.answer is not None else min(self._end, self._again_at)

    def advance(self, arrived: bool, now: float) -> None:
        """Process the current attempt; `arrived`: whether it has an answer."""
        answer = self.answer
        if arrived and answer is not None:
            self.answer = None
            try:
                self._value = answer.result(self._method)
                self.done = True
            except ActorUnavailableError as error:
                self._unavailable, self._again_at = error, now + self._delay_s
                self._delay_s = min(2.0 * self._delay_s, _RETRY_MAX_S)
                if not self._retry or self._again_at >= self._end:
                    self._fail(error)
            except SpecActorError as error:
                self._fail(error)
        elif now >= self._end:
            self._fail(self._unavailable or CallTimeoutError(f"{self._method}: no answer in time"))
        elif answer is None and now >= self._again_at:
            self._send()

    def _send(self) -> None:
        try:
            self.answer = self._calls.transport.send(*self._target)
        except SpecActorError as error:
            self._fail(error)
            return
        if (wake := self._wake) is not None:
            self.answer.add_done_callback(lambda _answer: wake())

    def _fail(self, error: SpecActorError) -> None:
        self.error, self.done, self.answer = error, True, None


class Calls:
    """Starts calls and waits for them; by default over Ray."""

    def __init__(self, transport: Transport | None = None, clock: Clock = SYSTEM) -> None:
        self.transport: Transport = transport if transport is not None else RayTransport()
        self.clock = clock

    def start(
        self,
        actor: Any,
        method: str,
        *arguments: Any,
        deadline_s: float,
        retry: bool = True,
        wake: Callable[[], None] | None = None,
    ) -> Call:
        """Begin a call, which fails with a `CallTimeoutError` after `deadline_s` seconds; returns at once. `retry`:
        send it again while the actor is unavailable, only for idempotent methods; `wake` is called in any thread when
        an answer has arrived."""
        return Call(self, (actor, method, arguments), self.clock.now() + deadline_s, retry, wake)

    def ask(self, actor: Any, method: str, *arguments: Any, deadline_s: float) -> Any:
        """Call and wait for the answer; arguments and errors as in `start` and `Call.result`."""
        return self.start(actor, method, *arguments, deadline_s=deadline_s).result()

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Wait until one of the calls is done, at most `timeout_s` seconds. Returns those that are done."""
        now = self.clock.now()
        end, left_s = now + timeout_s, 0.0
        while True:
            flying, arrived = [call.answer for call in calls if call.answer is not None], set[Any]()
            if flying:
                arrived = self.transport.wait(flying, left_s)
            elif left_s:
                self.clock.sleep(left_s)
            now = self.clock.now()
            for call in calls:
                if not call.done:
                    call.advance(call.answer in arrived, now)
            done = [call for call in calls if call.done]
            if done or now >= end:
                return done
            left_s = max(0.0, min([end, *(call.next_at() for call in calls)]) - now)

    def sender(self, actor: Any, method: str) -> Callable[[Any], Delivery]:
        """A `send` for `Link`: the method takes a message; its result is ignored."""
        return lambda message: self.transport.send(actor, method, [message])


class RayAnswer:
    """The `Answer` of a call that Ray carries."""

    __slots__ = ("_future", "reference")

    def __init__(self, reference: ray.ObjectRef[Any]) -> None:
        self.reference = reference
        self._future: Future[Any] | None = None
        """Made for callbacks only: it deserializes the result."""

    def add_done_callback(self, done: Callable[[RayAnswer], None]) -> None:
        self._future = self.reference.future()
        self._future.add_done_callback(lambda _future: done(self))

    def exception(self) -> SpecActorError | None:
        assert self._future is not None  # callbacks ask
        error = self._future.exception()
        return None if error is None else translate_ray_error(error, "delivery")

    def result(self, what: str) -> Any:
        try:
            if self._future is not None and self._future.done():
                return self._future.result()
            return ray.get(self.reference, timeout=_FETCH_S)
        except ray_errors.RayError as error:
            if isinstance(error, _ANSWER_LOST) and not isinstance(error, _GONE):
                raise ActorUnavailableError(f"{what}: its answer was lost: {_first_line(error)}") from None
            raise translate_ray_error(error, what) from None


class RayTransport:
    def __init__(self) -> None:
        self._metrics = RayMetrics()

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> RayAnswer:
        try:
            return RayAnswer(getattr(actor, method).remote(*arguments))
        except ray_errors.RayError as error:
            raise translate_ray_error(error, method) from None

    def wait(self, answers: Sequence[Any], timeout_s: float) -> set[Any]:
        by_reference = {answer.reference: answer for answer in answers}
        limit = None if timeout_s == float("inf") else timeout_s
        done, waiting = ray.wait(list(by_reference), num_returns=1, timeout=limit, fetch_local=False)
        if done and waiting:  # others that arrived at the same time
            done += ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)[0]
        return {by_reference[reference] for reference in done}

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def fetch(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        try:
            found: list[Any] = ray.get(list(references), timeout=timeout_s)
        except ray_errors.RayError as error:
            raise translate_ray_error(error, "fetching an object") from None
        return found

    def export(self, rows: Callable[[], Iterable[Row]], run: str = "") -> None:
        self._metrics.export(rows, run)


_FETCH_S = 60.0
"""Longest time in seconds for the transfer of a finished answer."""


def translate_ray_error(error: BaseException, what: str) -> SpecActorError:
    """The error of this package for an error of Ray: the actor's own error, except a `CallError`; else a `CallError`
    with Ray's message. `what` names the call in it."""
    if isinstance(error, ray_errors.RayTaskError):  # first: Ray raises a class that also derives from the cause's
        cause = error.cause
        if isinstance(cause, SpecActorError) and not isinstance(cause, CallError):
            return cause
        concerns_another = isinstance(cause, CallError)  # an actor that this actor called
        kind = type(cause).__name__ if cause else "error"
        return RemoteError(f"{what}: {kind}: {cause if concerns_another else error}")
    if isinstance(error, SpecActorError):
        return error
    if isinstance(error, ray_errors.ActorUnavailableError):
        return ActorUnavailableError(f"{what}: out of reach: {_first_line(error)}")
    if isinstance(error, _GONE):
        node_lost = _is_node_loss(error)
        hint = "its node is gone" if node_lost else "killed, out of memory, or crashed"
        reason = _memory_report(error) or f"its process ended ({hint}): {_first_line(error)}"
        return ActorLostError(f"{what}: {reason}", node_lost)
    if isinstance(error, ray_errors.GetTimeoutError):
        return CallTimeoutError(f"{what}: no answer in time")
    return CallError(f"{what}: {_memory_report(error) or f'{type(error).__name__}: {_first_line(error)}'}")


_ANSWER_LOST = (ray_errors.ObjectLostError, ray_errors.ObjectReconstructionFailedError)
_NODE_GONE = (ray_errors.NodeDiedError, ray_errors.LocalRayletDiedError)
_GONE = (
    *_NODE_GONE,
    ray_errors.RayActorError,
    ray_errors.OutOfMemoryError,
    ray_errors.WorkerCrashedError,
    ray_errors.OwnerDiedError,
    ray_errors.RuntimeEnvSetupError,
    ray_errors.ActorUnschedulableError,
    ray_errors.ActorPlacementGroupRemoved,
    ray_errors.TaskPlacementGroupRemoved,
)
"""Errors that Ray raises for a process that has ended for good, or will never start; they have no common base."""


def _memory_report(error: BaseException) -> str:
    """One line in place of Ray's page about a process that it ended for lack of memory; empty for other errors."""
    if "low on memory" not in str(error):
        return ""
    return (
        "Ray ended its process because the machine ran out of memory. Fix: end what else runs there, or lower "
        "target.kv_cache_gb, target.max_batch or trainer.micro_batch_tokens; resume=auto continues the run"
    )


def _is_node_loss(error: BaseException) -> bool:
    """Whether a node was lost. Ray reports the cause of an actor's death as text, and preemption by a flag."""
    return isinstance(error, _NODE_GONE) or getattr(error, "preempted", False) or "its node has died" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
