"""Middleware of all endpoints: checks token, number of requests, and sizes of head and body; counts requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from specactor_ray.serve.refusal import (
    FAILED,
    FORBIDDEN,
    HEAD_TOO_LARGE,
    OVERLOADED,
    TOO_LARGE,
    UNAUTHORIZED,
    Refusal,
    refusal_at_end,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from specactor_ray.serve.service import Limits

OPEN = ("/health", "/ping", "/health_generate")
"""Paths without a token: probes of load balancers."""


class Guard:
    """ASGI middleware.

    Args:
        app: The guarded application.
        limits: Limits of requests.
        token: Required bearer token; without one, the Host header, and the Origin of web pages, must be loopback names,
            so that no foreign web page can use the server.
        error_body: Maps path and refusal to the body of the answer.
        answered: Called with route (empty if there is none), status and seconds of each request.
        control: Paths that are answered regardless of the number of open requests.
        is_ending: Whether the server ends: requests that are cancelled then are answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        token: str | None,
        error_body: Callable[[str, Refusal], dict[str, Any]],
        answered: Callable[[str, int, float], None],
        control: Collection[str] = (),
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._limits, self._error_body, self._answered = app, limits, error_body, answered
        self._token = token.encode() if token else None
        self._control, self._is_ending, self._open = control, is_ending, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 0
        self._open += 1

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal = self._refused(scope)
            if refusal is not None:
                await self._answer(scope, noted, refusal)
            else:
                await self._app(scope, self._limited(receive), noted)
        except asyncio.CancelledError:
            if not self._is_ending():
                raise
            if not status:  # streams end themselves
                with contextlib.suppress(asyncio.CancelledError):
                    await self._answer(scope, noted, refusal_at_end())
        finally:
            self._open -= 1
            route = scope.get("route")
            self._answered(route.path if route else "", status or FAILED, time.monotonic() - begin)

    def _refused(self, scope: Scope) -> Refusal | None:
        if _head_bytes(scope) > self._limits.max_header_bytes:
            problem = f"the head of the request is too large; at most {self._limits.max_header_bytes} bytes are taken"
            return Refusal(problem, HEAD_TOO_LARGE)
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN and (refusal := self._unauthorized(headers)) is not None:
            return refusal
        if self._open > self._limits.max_requests and scope["path"] not in self._control:
            return Refusal(f"{self._limits.max_requests} requests are open already; try again later", OVERLOADED)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            return self._too_large()
        return None

    def _unauthorized(self, headers: dict[bytes, bytes]) -> Refusal | None:
        if self._token is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if not is_loopback(_without_port(host)):
                return Refusal(f"Host is {host[:200]!r}, no name of this machine", FORBIDDEN)
            origin = headers.get(b"origin", b"").decode("latin-1")
            if origin and not is_loopback(_without_port(origin.partition("://")[2])):
                return Refusal(f"Origin is {origin[:200]!r}, no name of this machine", FORBIDDEN)
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
            return None
        return Refusal(
            "the request has no valid bearer token; send the server's in the Authorization header", UNAUTHORIZED
        )

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes of a body without a Content-Length as they arrive."""
        left = self._limits.max_body_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(TOO_LARGE, self._too_large().message, {"Connection": "close"})
            return message

        return counted

    def _too_large(self) -> Refusal:
        return Refusal(f"the body is too large; at most {self._limits.max_body_bytes} bytes are taken", TOO_LARGE)

    async def _answer(self, scope: Scope, send: Send, refusal: Refusal) -> None:
        body = json.dumps(self._error_body(scope["path"], refusal)).encode()
        headers = {**refusal.headers, "content-type": "application/json", "content-length": str(len(body))}
        if refusal.status == TOO_LARGE:
            headers["connection"] = "close"  # the rest of the body is not read
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})


@functools.lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: `localhost` or a loopback address."""
    host = host.strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _head_bytes(scope: Scope) -> int:
    """Bytes of target and headers of a request, each header with its colon, space and end of line."""
    target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _without_port(host: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`."""
    if host.startswith("["):
        return host.partition("]")[0]
    return host.rpartition(":")[0] or host
