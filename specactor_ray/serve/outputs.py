"""Growing outputs of a request, in parts and as a streamed response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.responses import Response

from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.handle import Handle, Token
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.serve.refusal import Refusal, refusal_at_end, refusal_of
from specactor_ray.serve.text import Detokenizer

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from specactor_ray.serve.service import Service

_BUFFERED = 64
"""Most buffered parts of a stream of several choices with a slow client."""


@dataclass(slots=True)
class Part:
    """New content of an output since the previous part."""

    index: int
    """Number of the choice."""
    text: str
    tokens: list[Token] = field(default_factory=list)
    output: Trajectory | None = None
    """The complete output, set in the last part."""


async def parts_of(
    service: Service, handle: Handle, index: int = 0, stop: Sequence[str] = (), until: str | None = None
) -> AsyncIterator[Part]:
    """Yield an output in parts; tokens that arrive together, or that form one character, are one part.

    Args:
        service, handle, index: Service, handle and number of the choice.
        stop: Texts that end the output.
        until: The last part has this text and all that follows it.

    Raises:
        Refusal: The request failed.
    """
    came, count, text = time.monotonic(), 0, ""
    detokenizer, tokens = Detokenizer(service.tokenizer, (*stop, *([until] if until else ()))), list[Token]()
    try:
        async for fresh in handle.batches():
            now = time.monotonic()
            service.metrics.arrived(now - came, len(fresh), not count)
            came, count, tokens = now, count + len(fresh), tokens + fresh
            text += detokenizer.add([token.token_id for token in fresh])
            if text and not handle.done():
                yield Part(index, text, tokens)
                text, tokens = "", []
        output = service.checked(await handle)
    except SpecActorError as error:
        raise refusal_of(error) from None
    yield Part(index, text + detokenizer.rest(output.text), tokens, output)


async def merged(streams: Sequence[AsyncIterator[Part]]) -> AsyncIterator[Part]:
    """Yield the parts of several outputs as they arrive.

    Raises:
        Refusal: One of them failed.
    """
    if len(streams) == 1:
        async for part in streams[0]:
            yield part
        return
    queue: asyncio.Queue[Part | Exception] = asyncio.Queue(_BUFFERED)

    async def read(stream: AsyncIterator[Part]) -> None:
        try:
            async for part in stream:
                await queue.put(part)
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            await queue.put(error)

    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    left = len(streams)
    try:
        while left:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            yield got
            left -= got.output is not None
    finally:
        for reader in readers:
            reader.cancel()


class EventStream(Response):
    """Server-sent events.

    Args:
        events: Data of each event.
        error_body: Refusal → data of the event that ends a stream that failed.
        at_end: Called at the end, also when the client has left. A stream whose task is cancelled ends with an error.
        last: Data of the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        error_body: Callable[[Refusal], str],
        at_end: Callable[[], None],
        last: str = "[DONE]",
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._error_body, self._at_end, self._last = events, error_body, at_end, last
        self._is_open = False
        """The head was sent, the end was not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, leaving = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except asyncio.CancelledError:
            await _ended(writing)
            if self._is_open:
                await self._send(send, self._error_body(refusal_at_end()))
                await self._send(send, self._last, more=False)
            raise
        finally:
            leaving.cancel()
            await _ended(writing)
            self._at_end()

    async def _send(self, send: Send, data: str, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._is_open = True
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await self._send(send, event)
            except Refusal as refusal:
                await self._send(send, self._error_body(refusal))
        self._is_open = False
        await self._send(send, self._last, more=False)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task, and return when it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(task, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
