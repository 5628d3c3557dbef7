"""Handle of a submitted request: its output as a future, as an iterator, or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from specactor_ray.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from specactor_ray.rollout.engine import Engine


class Token(NamedTuple):
    """A committed token."""

    token_id: int
    logprob: float
    """Log-probability under softmax(logits / T), before top-k and top-p."""
    top: tuple[tuple[int, float], ...] = ()
    """The `sampling.logprobs` most probable tokens at its position with their log-probabilities."""


Reader = tuple[asyncio.AbstractEventLoop | None, Any]
"""Event that a reader of tokens waits for, and its event loop, if it has one."""


def wake(readers: Iterable[Reader]) -> None:
    """Wake readers, those of an event loop by one call: each call is a system call, and may give up Python's lock."""
    by_loop = dict[asyncio.AbstractEventLoop | None, list[Any]]()
    for loop, ready in readers:
        by_loop.setdefault(loop, []).append(ready)
    for loop, events in by_loop.items():
        if loop is None:
            _set(events)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set, events)


def _set(events: Iterable[Any]) -> None:
    for event in events:
        event.set()


class Handle:
    """One submitted request; for any thread, and with `await` and `batches` for any event loop."""

    def __init__(self, engine: Engine, key: str, request_id: str | None = None) -> None:
        self.request_id = key if request_id is None else request_id
        """Name that the caller gave; several requests may have it."""
        self.key = key
        """Name of this request alone."""
        self.future: Future[Any] = Future()
        """Done when the request has ended, with the argument of `Engine.trajectory`, or the error."""
        self.future.set_running_or_notify_cancel()  # cannot be cancelled by a caller: that would not end the request
        self.pushed: list[Token] = []
        """Committed tokens pushed so far."""
        self._engine, self._readers = engine, list[Reader]()
        self._output: Trajectory | None = None

    def result(self, timeout: float | None = None) -> Trajectory:
        """Wait until the request has ended. A failed request is returned as a trajectory with its `error`.

        Raises:
            TimeoutError: The request has not ended within `timeout` seconds.
            ActorLostError: The run ended before the request.
        """
        return self._read(self._engine.clock.result(self.future, float("inf") if timeout is None else timeout))

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def abort(self) -> Trajectory:
        """End the request with its committed tokens (`finish_reason` `abort`), unless it has ended already."""
        self._engine.drop(self)
        return self.result()

    def tokens(self) -> Iterator[Token]:
        """Yield the committed tokens one by one as they arrive. Raises as `result`."""
        ready, at = self._engine.clock.event(), 0
        with self._read_by((None, ready)):
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
        # A cancelled caller does not cancel the request.
        ended = yield from asyncio.shield(asyncio.wrap_future(self.future)).__await__()
        return self._read(ended)

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Yield the committed tokens as they arrive; tokens that arrived together are one list."""
        ready, at = asyncio.Event(), 0
        with self._read_by((asyncio.get_running_loop(), ready)):
            while True:
                ready.clear()
                fresh, ended = self._fresh(at)
                if fresh:
                    yield fresh
                at += len(fresh)
                if ended:
                    return
                if not fresh:
                    await ready.wait()

    def push(self, tokens: Sequence[tuple[Any, ...]]) -> list[Reader]:
        """Append committed tokens, given as the fields of `Token`s. Returns the readers, which the caller wakes."""
        self.pushed.extend(itertools.starmap(Token, tokens))
        return self._readers.copy()

    def end(self, ended: Any) -> None:
        """Mark the request as ended, with the argument of `Engine.trajectory` or with an exception."""
        if isinstance(ended, BaseException):
            self.future.set_exception(ended)
        else:
            self.future.set_result(ended)

    def _read(self, ended: Any) -> Trajectory:
        """The output, decoded once."""
        if self._output is None:
            self._output = self._engine.trajectory(ended)
        return self._output

    @contextlib.contextmanager
    def _read_by(self, reader: Reader) -> Iterator[None]:
        self.future.add_done_callback(lambda _future: wake([reader]))
        self._readers.append(reader)
        self._engine.watch(self)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def _fresh(self, at: int) -> tuple[list[Token], bool]:
        """Tokens from number `at` on, and whether they are the last."""
        if not self.future.done():
            return self.pushed[at:], False
        output = self.result(0.0)
        pairs = zip(output.token_ids[at:], output.logprobs[at:], strict=True)
        if output.top_logprobs is None:
            return list(itertools.starmap(Token, pairs)), True
        return [Token(*pair, top) for pair, top in zip(pairs, output.top_logprobs[at:], strict=True)], True
