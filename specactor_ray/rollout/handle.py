"""Handle of a submitted request: its output as a future, as an iterator, or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from specactor_ray.rollout.dispatch_thread import DispatchThread, Reader, wake
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import Trajectory


class Token(NamedTuple):
    """A committed token."""

    token_id: int
    logprob: float
    """Log-probability under softmax(logits / T), before top-k and top-p."""
    top: tuple[tuple[int, float], ...] = ()
    """The `sampling.logprobs` most probable tokens at its position with their log-probabilities."""


class Handle:
    """One submitted request; for any thread, and with `await` and `batches` for any event loop. `read` makes its output
    from the journal's entry."""

    def __init__(
        self, thread: DispatchThread, read: Callable[[Any], Trajectory], key: str, request_id: str | None = None
    ) -> None:
        self.request_id = key if request_id is None else request_id
        """Name that the caller gave; several requests may have it."""
        self.key = key
        """Name of this request alone."""
        self.future: Future[Any] = Future()
        """Done when the request has ended, with the entry of the journal, or the error."""
        self.future.set_running_or_notify_cancel()  # cannot be cancelled by a caller: that would not end the request
        self.pushed: list[Token] = []
        """Committed tokens pushed so far."""
        self._thread, self._make, self._readers = thread, read, list[Reader]()
        self._output: Trajectory | None = None

    def result(self, timeout: float | None = None) -> Trajectory:
        """Wait until the request has ended. A failed request is returned as a trajectory with its `error`.

        Raises:
            TimeoutError: The request has not ended within `timeout` seconds.
            ActorLostError: The run ended before the request.
        """
        return self._read(self._thread.clock.result(self.future, float("inf") if timeout is None else timeout))

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def drop(self) -> None:
        """Abort the request, unless it has ended; returns at once."""
        if not self.done():
            self._thread.drop(self.key)

    def abort(self) -> Trajectory:
        """End the request with its committed tokens (`finish_reason` `abort`), unless it has ended already."""
        self.drop()
        return self.result()

    def tokens(self) -> Iterator[Token]:
        """Yield the committed tokens one by one as they arrive. Raises as `result`."""
        ready = self._thread.clock.event()
        with self._read_by((None, ready)):
            for fresh in self._parts(ready):
                if fresh:
                    yield from fresh
                else:
                    ready.wait()

    def __await__(self) -> Generator[Any, None, Trajectory]:
        # A cancelled caller does not cancel the request.
        ended = yield from asyncio.shield(asyncio.wrap_future(self.future)).__await__()
        return self._read(ended)

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Yield the committed tokens as they arrive; tokens that arrived together are one list."""
        ready = asyncio.Event()
        with self._read_by((asyncio.get_running_loop(), ready)):
            for fresh in self._parts(ready):
                if fresh:
                    yield fresh
                else:
                    await ready.wait()

    def push(self, entry: JournalEntry) -> Sequence[Reader]:
        """Append the new tokens of the entry, if there are any. Returns the readers, which the caller wakes."""
        if entry.num_tokens <= len(self.pushed):
            return ()
        self.pushed.extend(itertools.starmap(Token, entry.tokens_from(len(self.pushed))))
        return self._readers.copy()

    def end(self, ended: Any) -> None:
        """Mark the request as ended, with its entry or with an exception."""
        if isinstance(ended, BaseException):
            self.future.set_exception(ended)
        else:
            self.future.set_result(ended)

    def _read(self, ended: Any) -> Trajectory:
        """The output, decoded once."""
        if self._output is None:
            self._output = self._make(ended)
        return self._output

    @contextlib.contextmanager
    def _read_by(self, reader: Reader) -> Iterator[None]:
        self.future.add_done_callback(lambda _future: wake([reader]))
        self._readers.append(reader)
        if not self.done():
            self._thread.watch(self.key, self.push)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def _parts(self, ready: Any) -> Iterator[list[Token]]:
        """Yield the tokens that have arrived, up to the end; nothing when the reader must wait for the event."""
        at, ended = 0, False
        while not ended:
            ready.clear()
            fresh, ended = self._fresh(at)
            at += len(fresh)
            if fresh or not ended:
                yield fresh

    def _fresh(self, at: int) -> tuple[list[Token], bool]:
        """Tokens from number `at` on, and whether they are the last."""
        if not self.future.done():
            return self.pushed[at:], False
        output = self.result(0.0)
        pairs = zip(output.token_ids[at:], output.logprobs[at:], strict=True)
        if output.top_logprobs is None:
            return list(itertools.starmap(Token, pairs)), True
        return [Token(*pair, top) for pair, top in zip(pairs, output.top_logprobs[at:], strict=True)], True
