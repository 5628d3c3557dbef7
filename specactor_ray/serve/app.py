"""The FastAPI application: every dialect's router, its form of errors, and the guard in front."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from specactor_ray.serve import openai, prime_rl, sglang, trl, vllm_rl
from specactor_ray.serve.guard import Guard
from specactor_ray.serve.refusal import FAILED, Refusal, openai_error, refusal_of_fields

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

logger = logging.getLogger(__name__)

DIALECTS: tuple[ModuleType, ...] = (openai, trl, vllm_rl, prime_rl, sglang)
"""Modules of the dialects. Each has `router(service)`. Optional: `error_body(refusal)`, if its clients expect another
error format than OpenAI's; `CONTROL`, its paths that must be answered even when the limit of open requests is
reached."""


def make_app(service: Service, token: str | None = None) -> FastAPI:
    """The application.

    Args:
        service: Serves the requests.
        token: Bearer token that requests must have; None if only this machine can reach the server.
    """
    app = FastAPI(title="specactor", docs_url=None, redoc_url=None)
    control = frozenset(path for dialect in DIALECTS for path in getattr(dialect, "CONTROL", ()))
    forms: dict[str, Callable[[Refusal], dict[str, Any]]] = {}
    for dialect in DIALECTS:
        router = dialect.router(service)
        app.include_router(router)
        for route in router.routes:
            forms[route.path] = getattr(dialect, "error_body", openai_error)

    def error_body(path: str, refusal: Refusal) -> dict[str, Any]:
        return forms.get(path, openai_error)(refusal)

    async def refuse(request: Request, refusal: Refusal) -> Response:
        body = json.dumps(error_body(request.scope["path"], refusal))
        return Response(body, refusal.status, refusal.headers, "application/json")

    async def refuse_fields(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, refusal_of_fields(error.errors()))

    async def refuse_http(request: Request, error: HTTPException) -> Response:
        answer = await refuse(request, Refusal(str(error.detail), error.status_code))
        answer.headers.update(error.headers or {})
        return answer

    async def fail(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        return await refuse(request, Refusal("the server failed; its log has the reason", FAILED))

    app.add_exception_handler(Refusal, refuse)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, refuse_fields)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, refuse_http)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, fail)
    app.add_middleware(
        Guard,
        limits=service.limits,
        token=token,
        error_body=error_body,
        answered=service.metrics.answered,
        control=control,
        is_ending=lambda: service.is_ending,
    )
    return app
