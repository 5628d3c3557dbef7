"""HTTP connections with limits of number, and of time for heads, bodies and readers: clients that send or read
nothing take no room from others.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from specactor_ray.serve.service import Limits

MOST_HEAD_BYTES = 32 << 10
KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle: longer than clients allow, or they would send into a closing connection."""
_SPARE = 64
"""Connections above the limit of requests, so that probes and refusals have room."""
_OTHER_FILES = 512
"""Descriptors that the process needs besides connections."""
_TOO_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 33\r\n"
    b"connection: close\r\n\r\nThe request arrived too slowly.\r\n"
)
_FIRST, _IDLE, _HEAD, _BODY, _BUSY, _WRITING, _CLOSING = range(7)
"""Phases of a connection: before its first request, between two (uvicorn limits it to `KEEP_ALIVE_S`), in a head, in a
body, in the work on a request, while the client does not read, and while it closes."""
_LIMITS = {_FIRST: "head_s", _HEAD: "head_s", _BODY: "body_s", _WRITING: "reader_s", _CLOSING: "close_s"}
"""Phase → longest time in it, a field of `Limits`."""


def most_connections(limits: Limits) -> int:
    """Number of connections at a time. Raises the limit of open files of this process if they need it."""
    wanted = limits.max_connections + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted + _OTHER_FILES:
        soft = min(hard, wanted + _OTHER_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(_SPARE, min(wanted, soft - _OTHER_FILES))


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of time and number. A head has at most `MOST_HEAD_BYTES` and one read of the
    socket."""

    limits: Limits
    most: int
    """Number of connections at a time."""
    in_body = False
    """The end of a request's body has not arrived."""
    head_bytes: int | None = None
    """Bytes received of the present head; None outside a head."""
    reads = 0
    """How often the client began to read again."""
    head_after: Any = _FIRST
    """The last request before the head of which a part has arrived."""
    cycle: Any
    flow: Any
    transport: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.state: tuple[Any, ...] = ()
        self.since = self.loop.time()
        if len(self.connections) > self.most:
            _make_room(self)

    def data_received(self, data: bytes) -> None:
        if not self.in_body and (self.cycle is None or self.cycle.response_complete):
            self.head_after = self.cycle
        if self.head_bytes is not None:
            self.head_bytes += len(data)
            if self.head_bytes > MOST_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_bytes = 0

    def on_headers_complete(self) -> None:
        self.head_bytes = None
        self.in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.in_body = False
        super().on_message_complete()

    def resume_writing(self) -> None:
        self.reads += 1
        super().resume_writing()

    def phase(self) -> int:
        """What the connection waits for."""
        if self.transport.is_closing():
            return _CLOSING
        if self.flow.write_paused:
            return _WRITING
        if self.in_body:
            return _BODY
        if self.cycle is None:
            return _FIRST
        if not self.cycle.response_complete:
            return _BUSY
        return _HEAD if self.head_after is self.cycle else _IDLE

    def check(self, now: float) -> None:
        """End the connection if it has been in its phase for too long."""
        phase = self.phase()
        state = (phase, self.cycle, self.reads)
        if state != self.state:
            if (phase, self.state) != (_FIRST, ()):
                self.since = now
            self.state = state
        elif phase in _LIMITS and now - self.since > getattr(self.limits, _LIMITS[phase]):
            self._end(phase)

    def _end(self, phase: int) -> None:
        if phase in (_WRITING, _CLOSING):
            self.transport.abort()
            return
        has_begun = phase == _BODY or self.head_after is self.cycle
        if has_begun and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
            self.transport.write(_TOO_LATE)
        self.transport.close()


def http_protocol(limits: Limits) -> type[Protocol]:
    """Value of uvicorn's `http` option."""
    return type("LimitedProtocol", (Protocol,), {"limits": limits, "most": most_connections(limits)})


def _make_room(new: Any) -> None:
    """End the connection that has waited longest for a request; the new one if all serve requests."""
    waiting = [(one.phase(), one.since, id(one), one) for one in new.connections if one is not new]
    candidates = [one for one in waiting if one[0] in (_FIRST, _IDLE, _HEAD, _BODY, _CLOSING)]
    (min(candidates)[-1] if candidates else new).transport.abort()
