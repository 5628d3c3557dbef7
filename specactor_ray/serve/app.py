"""The FastAPI application: the dialects' endpoints, the form of errors, and the middleware in front."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specactor_ray.core.errors import SpecActorError
from specactor_ray.serve import openai, sglang, vllm_rl
from specactor_ray.serve.requests import Refusal, as_json, error_body, note_failure, refusal_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from specactor_ray.serve.service import Service

_OPEN = ("/health", "/health_generate", "/ping")
"""Paths without a token: probes of load balancers."""
_MOST_DISCARDED = 4
"""Most of a refused body that is read, in largest bodies."""


def make_app(service: Service, token: str | None = None) -> FastAPI:
    """The application. `token`: bearer token of all requests; None if only this machine can reach the server."""
    app = FastAPI(title="specactor", docs_url=None, redoc_url=None, default_response_class=JsonAnswer)
    app.state.service = service
    for dialect in (openai, vllm_rl, sglang):
        app.include_router(dialect.router)

    async def refuse(request: Request, error: Exception) -> Response:
        return _answer(refusal_of(error), request.scope)

    for kind in (RequestValidationError, SpecActorError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Guard, service=service, token=token)
    return app


class JsonAnswer(JSONResponse):
    """An answer in which every text can be encoded."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


def _answer(error: HTTPException, scope: MutableMapping[str, Any]) -> JsonAnswer:
    note_failure(scope["path"], error)
    return JsonAnswer(error_body(error), error.status_code, error.headers)


class Guard:
    """ASGI middleware: checks token, size and type of the body, and counts requests. Without a token, the Host header,
    and the Origin of web pages, must be loopback names, so that no foreign web page can use the server."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self._app, self._limits, self._metrics = app, service.limits, service.metrics
        self._token = token.encode() if token else None
        self._running = 0
        """Number of requests that have passed the check."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            self._running += 1
            try:
                await self._app(scope, self._limited(receive), noted)
            finally:
                self._running -= 1
        except Refusal as refusal:
            if b"expect" not in dict(scope["headers"]):  # such a client sends its body only when it is asked to
                await self._discard(receive, refusal)
            await _answer(refusal, scope)(scope, receive, noted)
        finally:
            route = scope.get("route")
            self._metrics.answered(route.path if route else "", status, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if scope["path"] not in _OPEN:
            self._check_access(headers)
            if self._running >= self._limits.max_connections:
                raise Refusal(f"the server works on {self._running} requests already; repeat it later", 503)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and (length != b"0" or b"transfer-encoding" in headers):
            raise Refusal("the body must be a JSON object, sent with Content-Type: application/json")

    def _check_access(self, headers: dict[bytes, bytes]) -> None:
        if self._token is None:
            host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
            if not _names_this_machine(f"//{host}"):
                raise Refusal(f"Host is {host[:200]!r}, no name of this machine", 403)
            if origin and not _names_this_machine(origin):
                raise Refusal(f"Origin is {origin[:200]!r}, no name of this machine", 403)
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise Refusal("the request has no valid bearer token; send the server's in the Authorization header", 401)

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes of a body without a Content-Length as they arrive."""
        left = self._limits.max_body_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                refusal = self._too_large()
                if message.get("more_body"):
                    await self._discard(receive, refusal)
                raise refusal
            return message

        return counted

    async def _discard(self, receive: Receive, refusal: Refusal) -> None:
        """Read the rest of a refused body: a client that cannot send it all might not read the answer. If that is too
        much, the connection ends with the answer."""
        left = _MOST_DISCARDED * self._limits.max_body_bytes
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return
        refusal.headers = {**(refusal.headers or {}), "Connection": "close"}

    def _too_large(self) -> Refusal:
        return Refusal(f"the body is too large; at most {self._limits.max_body_bytes} bytes are taken", 413)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(64)
def _names_this_machine(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
