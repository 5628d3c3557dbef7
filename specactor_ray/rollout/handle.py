"""Handle of a submitted request: its output as a future, as an iterator, or awaited."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from specactor_ray.core.clock import Clock
from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.rollout.trajectory import Trajectory


class Token(NamedTuple):
    """A committed token."""

    token_id: int
    logprob: float
    """Log-probability under softmax(logits / T), before top-k and top-p."""
    top: tuple[tuple[int, float], ...] = ()
    """The `sampling.logprobs` most probable tokens at its position with their log-probabilities."""


class Generates(abc.ABC):
    """An engine: submits requests from any thread and event loop."""

    clock: Clock

    @abc.abstractmethod
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        session: str | None = None,
        priority: int = 0,
        prefix: Sequence[int] = (),
        place: tuple[int, int] | None = None,
    ) -> Handle:
        """Begin a request; returns at once.

        Args:
            prompt: Text, chat messages or token ids.
            sampling: Default: the configuration's. Without a `place` its seed is used unchanged.
            request_id: Name, unique among running requests. Default: a new one.
            session: Name of a conversation, whose turns run on one verifier while that lives.
            priority: Requests with a smaller number begin first.
            prefix: Existing output tokens. The output holds the tokens after them; `max_tokens` counts them.
            place: Index of a prompt and number of a sample, from which `Rollout.generate` would derive the seed.

        Raises:
            InputError: The prompt, the sampling or the name cannot be used, or the rollout is closed.
            OverloadedError: Too many requests wait already. In another process the handle raises these two.
        """

    def submit_samples(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt_index: int = 0,
        **options: Any,
    ) -> list[Handle]:
        """Begin `n` samples of a prompt, named `{request_id}-0` and so on, with the seeds that `Rollout.generate` uses
        for the prompt at `prompt_index`. All or none begin; other arguments and errors as in `submit`."""
        if not isinstance(n, int) or n < 1:
            raise InputError(f"n is {n!r}; it must be a whole number of 1 or more")
        handles: list[Handle] = []
        try:
            for sample in range(n):
                name = None if request_id is None else f"{request_id}-{sample}"
                place = (prompt_index, sample)
                handles.append(self.submit(prompt, sampling, request_id=name, place=place, **options))
        except BaseException:
            for handle in handles:
                self.drop(handle)
            raise
        return handles

    @abc.abstractmethod
    def handle(self, request_id: str) -> Handle:
        """The request with this name; InputError if none runs."""

    @abc.abstractmethod
    def drop(self, handle: Handle) -> None:
        """Abort the request, unless it has ended."""

    @abc.abstractmethod
    def watch(self, handle: Handle) -> None:
        """Push committed tokens to the handle from now on."""

    def trajectory(self, ended: Any) -> Trajectory:
        """Output of a request that has ended; `ended` is the result of its future."""
        output: Trajectory = ended
        return output

    def abort(self, request_id: str) -> Trajectory:
        """End a request; returns its committed tokens, with `finish_reason` `abort` if it had not ended."""
        return self.handle(request_id).abort()

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Trajectory:
        """Submit a request and await its output; it is aborted if this is cancelled. Arguments as in `submit`."""
        handle = self.submit(prompt, sampling, **options)
        try:
            return await handle
        finally:
            self.drop(handle)

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Token]:
        """Submit a request and yield its tokens as they are committed; it is aborted if this is closed."""
        handle = self.submit(prompt, sampling, **options)
        try:
            async for token in handle:
                yield token
        finally:
            self.drop(handle)


class Handle:
    """One submitted request; for any thread, and with `await` and `async for` for any event loop."""

    def __init__(self, owner: Generates, request_id: str, key: Any = None) -> None:
        self.request_id = request_id
        self.key = key
        """Name of the request within its engine."""
        self.future: Future[Any] = Future()
        """Done when the request has ended, with the argument of `Generates.trajectory`, or the error."""
        self.future.set_running_or_notify_cancel()  # cannot be cancelled by a caller: that would not end the request
        self.pushed: list[Token] = []
        """Committed tokens pushed so far."""
        self._owner, self._wakers = owner, list[Callable[[], None]]()
        self._output: Trajectory | None = None

    def result(self, timeout: float | None = None) -> Trajectory:
        """Wait until the request has ended. A failed request is returned as a trajectory with its `error`.

        Raises:
            TimeoutError: The request has not ended within `timeout` seconds.
            ActorLostError: The run ended before the request.
        """
        return self._read(self._owner.clock.result(self.future, float("inf") if timeout is None else timeout))

    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def abort(self) -> Trajectory:
        """End the request with its committed tokens (`finish_reason` `abort`), unless it has ended already."""
        self._owner.drop(self)
        return self.result()

    def tokens(self) -> Iterator[Token]:
        """Yield the committed tokens one by one as they arrive. Raises as `result`."""
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
        # A cancelled caller does not cancel the request.
        ended = yield from asyncio.shield(asyncio.wrap_future(self.future)).__await__()
        return self._read(ended)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yield the committed tokens one by one as they arrive."""
        async for tokens in self.batches():
            for token in tokens:
                yield token

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Yield the committed tokens as they arrive; tokens that arrived together are one list."""
        loop, ready, at = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ready.set)

        with self._woken(wake):
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

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each further `push`."""
        self._wakers.append(wake)
        self._owner.watch(self)

    def push(self, tokens: Sequence[tuple[Any, ...]]) -> None:
        """Append committed tokens, given as the fields of `Token`s."""
        self.pushed.extend(itertools.starmap(Token, tokens))
        for wake in list(self._wakers):
            wake()

    def end(self, ended: Any) -> None:
        """Mark the request as ended, with the argument of `Generates.trajectory` or with an exception."""
        if isinstance(ended, BaseException):
            self.future.set_exception(ended)
        else:
            self.future.set_result(ended)

    def _read(self, ended: Any) -> Trajectory:
        """The output, decoded once."""
        if self._output is None:
            self._output = self._owner.trajectory(ended)
        return self._output

    @contextlib.contextmanager
    def _woken(self, wake: Callable[[], None]) -> Iterator[None]:
        self.future.add_done_callback(lambda _future: wake())
        self.listen(wake)
        try:
            yield
        finally:
            self._wakers.remove(wake)

    def _fresh(self, at: int) -> tuple[list[Token], bool]:
        """Tokens from number `at` on, and whether they are the last."""
        if not self.future.done():
            return self.pushed[at:], False
        output = self.result(0.0)
        pairs = zip(output.token_ids[at:], output.logprobs[at:], strict=True)
        if output.top_logprobs is None:
            return list(itertools.starmap(Token, pairs)), True
        return [Token(*pair, top) for pair, top in zip(pairs, output.top_logprobs[at:], strict=True)], True
