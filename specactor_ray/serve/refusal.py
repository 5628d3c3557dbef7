"""Reasons why a request has no output, in one form; each dialect converts it into the format of its clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specactor_ray.core.errors import (
    CallError,
    InputError,
    OverloadedError,
    RangeError,
    SpecActorError,
    UnavailableError,
)

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LARGE, HEAD_TOO_LARGE = 400, 401, 403, 404, 413, 431
OVERLOADED, CLIENT_GONE, FAILED, UNAVAILABLE = 429, 499, 500, 503
RETRY_AFTER_S = 1
"""Seconds after which a client that was refused because of load should retry."""
_KINDS = {
    UNAUTHORIZED: "authentication_error",
    FORBIDDEN: "permission_error",
    NOT_FOUND: "not_found_error",
    OVERLOADED: "rate_limit_error",
}


class Refusal(Exception):
    """A request that is not served.

    Args:
        message: The value, the allowed values and the remedy; ends without a full stop.
        status: HTTP status.
        param: Request field at fault.
    """

    def __init__(self, message: str, status: int = BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers besides those of the content."""
        if self.status == UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (OVERLOADED, UNAVAILABLE) else {}

    @property
    def kind(self) -> str:
        """OpenAI's name for the class of error."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < FAILED else "server_error")


def refusal_at_end() -> Refusal:
    """Refusal of a request that is cut off when the server ends."""
    return Refusal("the server ends; the request was cut off", UNAVAILABLE)


def refusal_of(error: SpecActorError) -> Refusal:
    """Refusal for an error that this package raised."""
    if isinstance(error, RangeError):
        return Refusal(str(error).removeprefix("sampling."), param=error.key.removeprefix("sampling."))
    if isinstance(error, UnavailableError):
        return Refusal(str(error), param=error.option)
    if isinstance(error, InputError):
        return Refusal(str(error))
    if isinstance(error, OverloadedError):
        return Refusal(str(error), OVERLOADED)
    return Refusal(str(error), UNAVAILABLE if isinstance(error, CallError) else FAILED)


def refusal_of_fields(problems: Iterable[Mapping[str, Any]]) -> Refusal:
    """Refusal for validation errors of pydantic; values of the body are not repeated."""
    for problem in problems:
        place = [str(one) for one in problem["loc"] if one != "body"]
        if problem["type"] == "json_invalid":
            return Refusal(f"the body is not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
        name = ".".join(place)
        if not name and problem["type"] != "missing":
            return Refusal("the body must be a JSON object, sent with Content-Type: application/json")
        return Refusal(f"{name or 'the body'}: {problem['msg']}", param=name or None)
    return Refusal("the body is not what this endpoint takes")


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Error body in the form of OpenAI and vLLM."""
    what = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": refusal.status}
    return {"error": what}
