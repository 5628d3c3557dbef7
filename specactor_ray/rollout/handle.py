"""What the submission of a request returns: its output as a future, as an iterator, or awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from specactor_ray.clock import Clock
from specactor_ray.rollout.trajectory import Trajectory


class Token(NamedTuple):
    """A committed token."""

    token_id: int
    logprob: float
    """Of softmax(logits / T), before top-k and top-p."""


class Owner(Protocol):
    """What a handle asks of its engine; for any thread."""

    clock: Clock

    def watch(self, handle: Handle) -> None:
        """Push committed tokens to the handle from now on."""

    def trajectory(self, handle: Handle, ended: Any) -> Trajectory:
        """The output of a request that has ended; `ended` is the result of its future."""

    def drop(self, handle: Handle) -> None:
        """Abort the request, unless it has ended."""


class Handle:
    """One submitted request; for any thread, and with `await` and `async for` for any event loop."""

    def __init__(self, owner: Owner, request_id: str) -> None:
        self.request_id = request_id
        self.future: Future[Any] = Future()
        """Done when the request has ended. It holds what `Owner.trajectory` takes, or why there is no output."""
        self.pushed: list[Token] = []
        """Committed tokens, as far as they were pushed."""
        self._owner, self._wakers = owner, list[Callable[[], None]]()

    def result(self, timeout: float | None = None) -> Trajectory:
        """Wait until the request has ended. A request that failed is a trajectory with its `error`.

        Raises:
            TimeoutError: It has not ended within `timeout` seconds.
            ActorLostError: The run has ended before it.
        """
        ended = self._owner.clock.result(self.future, float("inf") if timeout is None else timeout)
        return self._owner.trajectory(self, ended)

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def abort(self) -> Trajectory:
        """End the request with what is committed (`finish_reason` `abort`), unless it has ended already."""
        self._owner.drop(self)
        return self.result()

    def tokens(self) -> Iterator[Token]:
        """The committed tokens one after the other, as they come. Raises as `result`."""
        ready, at = self._owner.clock.event(), 0
        with self._woken(ready.set):
            while True:
                ready.clear()
                fresh, ended = self._fresh(at)
                yield from fresh
                at += len(fresh)
                if ended:
                    return
                if not fresh:
                    ready.wait()

    def __await__(self) -> Generator[Any, None, Trajectory]:
        return self._result().__await__()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """The committed tokens one after the other, as they come."""
        loop, ready, at = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ready.set)

        with self._woken(wake):
            while True:
                ready.clear()
                fresh, ended = self._fresh(at)
                for token in fresh:
                    yield token
                at += len(fresh)
                if ended:
                    return
                if not fresh:
                    await ready.wait()

    # ---- for the engine ----

    def push(self, tokens: list[tuple[int, float]]) -> None:
        """These were committed."""
        self.pushed.extend(map(Token._make, tokens))
        for wake in list(self._wakers):
            wake()

    # ---- inner parts ----

    async def _result(self) -> Trajectory:
        ended = await asyncio.shield(asyncio.wrap_future(self.future))  # a cancelled caller does not cancel the request
        return self._owner.trajectory(self, ended)

    @contextlib.contextmanager
    def _woken(self, wake: Callable[[], None]) -> Iterator[None]:
        self._wakers.append(wake)
        self.future.add_done_callback(lambda _future: wake())
        self._owner.watch(self)
        try:
            yield
        finally:
            self._wakers.remove(wake)

    def _fresh(self, at: int) -> tuple[list[Token], bool]:
        """Tokens from number `at` on, and whether they are the last."""
        if not self.future.done():
            return self.pushed[at:], False
        output = self.result(0.0)
        return list(map(Token, output.token_ids[at:], output.logprobs[at:])), True
