"""Requests of every dialect: the error of a refused one, JSON bodies, and the sampling options in their fields.

Functions of this package raise `Refusal` or `SpecActorError` for what cannot be served; the application answers both.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from specactor_ray.core.errors import (
    CallError,
    OverloadedError,
    RangeError,
    SpecActorError,
    UnavailableError,
    UserError,
    clipped,
    clipped_text,
)
from specactor_ray.core.files import parse_json
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.dialect import FIELDS, Dialect, requests_nothing

logger = logging.getLogger(__name__)

MOST_CHOICES = 1024
"""Most outputs of a request."""
_MOST_CHARACTERS = 4096
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_HALVES, _HALF = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
"""Escape sequence in JSON of a half of a surrogate pair, and a half that belongs to no pair in text."""
_LONGEST_REASON = 300
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class Refusal(HTTPException):
    """A request that is not served. The message has the value, the allowed values and the remedy, and no full stop at
    its end; `param` is the field at fault."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.param = param


def refusal_of(error: Exception) -> HTTPException:
    """Refusal for what an endpoint raised; a defect is logged, and not shown."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, RequestValidationError):
        return _refusal_of_fields(error.errors())
    if isinstance(error, ClientDisconnect):
        return Refusal("the client has left", 499)
    if not isinstance(error, SpecActorError):
        logger.error("a request failed", exc_info=error)
        return Refusal("the server failed; its log has the reason", 500)
    if isinstance(error, RangeError):
        return Refusal(str(error).removeprefix("sampling."), param=error.key.removeprefix("sampling."))
    if isinstance(error, UnavailableError):
        return Refusal(str(error), param=error.option[:64])
    if isinstance(error, UserError):
        return Refusal(str(error))
    if isinstance(error, OverloadedError):
        return Refusal(str(error), 429)
    return Refusal(str(error), 503 if isinstance(error, CallError) else 500)


def _refusal_of_fields(problems: Iterable[Mapping[str, Any]]) -> Refusal:
    """Refusal for validation errors of pydantic; values of the body are not repeated."""
    (name, problem), *others = [(_field_of(one["loc"]), one) for one in problems]
    if problem["type"] == "json_invalid":
        return Refusal(f"the body is not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if not name and problem["type"] != "missing":
        return Refusal("the body must be a JSON object, sent with Content-Type: application/json")
    reasons = dict.fromkeys(one["msg"] for other, one in [(name, problem), *others] if other == name)
    return Refusal(f"{name or 'the body'}: {' or '.join(reasons)}", param=name or None)


def _field_of(place: Sequence[str | int]) -> str:
    """The field of a body or query, and a number in its list; types of a union are left out."""
    name, *inner = place[1:] or ("",)
    return ".".join(map(str, [name, *(one for one in inner if isinstance(one, int))]))


def error_body(error: HTTPException) -> dict[str, Any]:
    """JSON of an error: the form of OpenAI and vLLM, with the fields that SGLang's clients read beside it."""
    status = error.status_code
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    what = {"message": error.detail, "type": kind, "param": getattr(error, "param", None), "code": status}
    return {"error": what, "success": False, "message": error.detail}


def note_failure(path: str, error: HTTPException) -> None:
    """Log a failed request as one line, unless its client has left."""
    if error.status_code != 499:
        reason = clipped_text(str(error.detail), _LONGEST_REASON)
        logger.warning("%s: %d %s", clipped_text(path), error.status_code, reason)


def as_json(value: Any) -> bytes:
    """JSON of an answer. Half a surrogate pair, which UTF-8 cannot represent, becomes its escape sequence of JSON."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


# ---- bodies ----


class JsonRequest(Request):
    """A request with a body in UTF-8 without half a surrogate pair, so that each of its texts can be encoded."""

    async def json(self) -> Any:
        """Value of the body. Raises Refusal for text that cannot be encoded, JSONDecodeError for what is not JSON."""
        try:
            text = (await self.body()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Refusal(f"the body is not UTF-8 text (byte {error.start})") from None
        value = parse_json(text)
        if _HALVES.search(text) and (path := _path_of_half(value)) is not None:
            problem = "is not valid Unicode: it has half a surrogate pair"
            raise Refusal(f"{path or 'the body'} {problem}", param=path or None)
        return value


class JsonRoute(APIRoute):
    """Route of endpoints that read a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_checked


def _path_of_half(value: Any) -> str | None:
    """Names and numbers, joined by dots, that lead to a text with half a surrogate pair; None without one."""
    if isinstance(value, str):
        return "" if _HALF.search(value) else None
    found = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in found:
        if isinstance(name, str) and _HALF.search(name):
            return ""
        if (path := _path_of_half(one)) is not None:
            return f"{str(name)[:64]}.{path}".rstrip(".")
    return None


def _directory(path: str) -> str:
    if not 0 < len(path) <= _MOST_CHARACTERS or "\0" in path or path[0] == "~":
        raise ValueError("must be the directory of a Hugging Face checkpoint that this server can read")
    return path


def _label(value: Any) -> Any:
    return str(value) if type(value) is int and value >= 0 else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Integer = Annotated[int, BeforeValidator(_number)]
"""A whole number, or text of one, as in vLLM; no boolean."""
Real = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str | None, Field(max_length=_MOST_CHARACTERS)]
Directory = Annotated[str, AfterValidator(_directory)]
Label = Annotated[str, BeforeValidator(_label), Field(min_length=1, max_length=_MOST_CHARACTERS)]
"""A trainer's name for a version of the weights: text, or a number."""
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Messages = list[dict[str, Any]]
"""Messages of a conversation."""


class JsonObject(BaseModel):
    """A JSON object. Fields that are not listed are kept."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def given(self) -> dict[str, Any]:
        """The fields that were sent."""
        return {**{name: getattr(self, name) for name in self.model_fields_set}, **(self.model_extra or {})}

    def require_only(self, ignored: Collection[str], path: str) -> None:
        """Raises Refusal for a field that is neither listed nor ignored, unless it requests nothing."""
        for name, value in (self.model_extra or {}).items():
            if name not in ignored and not requests_nothing(value):
                raise Refusal(f"{name[:64]} is not available at {path}", param=name[:64])


class RequestBody(JsonObject):
    """Fields of OpenAI's and vLLM's requests that do not concern sampling."""

    model: Text = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    request_id: Text = None
    session: Text = None
    session_id: Text = None
    """vLLM's name of `session`."""
    priority: Annotated[Integer | None, Field(ge=-(2**31), lt=2**31)] = None
    # Those below have no effect: prefixes are never shared between versions of the weights, which every answer reports;
    # what has arrived is one chunk of a stream; prompts are of text.
    user: Text = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    stream_interval: Annotated[Integer | None, Field(ge=1)] = None
    parallel_tool_calls: bool | None = None
    return_weight_versions: bool | None = None
    return_token_offsets: bool | None = None
    return_mm_kwargs: bool | None = None
    mm_payload: Literal["tensors", "none"] | None = None

    def submission(self, headers: Mapping[str, str], name: str) -> dict[str, Any]:
        """Arguments of `Service.submit` from the body, or else from headers; `name` is used if none is given."""
        return {
            "name": self.request_id or headers.get("x-request-id") or name,
            "session": self.session or self.session_id or headers.get("x-session-id"),
            "priority": self.priority or 0,
        }


class SamplingBody(RequestBody):
    """Fields that concern sampling; `wanted_of` checks these and all others."""

    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Integer | None = None
    max_tokens: Integer | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    first_position: Integer | None = None
    prompt_logprobs: StrictInt | StrictBool | None = None
    return_tokens_as_token_ids: bool | None = None
    first_prompt: Integer | None = None


class TextBody(JsonObject):
    """How text becomes token ids, in vLLM's terms."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's BOS, unless the text begins with it. Default: true for plain text, false for messages."""
    split_special_tokens: bool | None = None
    """Read control tokens in plain text as text. Default: false; messages are always read so."""

    def text_options(self) -> dict[str, bool | None]:
        """Options of `encode_prompt`."""
        return {"add_special_tokens": self.add_special_tokens, "split_special_tokens": self.split_special_tokens}


class TemplateBody(TextBody):
    """Chat messages, and arguments of the chat template."""

    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody, TextBody):
    """Body of `/v1/completions`."""

    prompt: Any
    """Text, texts, token ids, or several lists of token ids."""
    logprobs: Integer | None = None
    echo: bool | None = None


class ChatBody(SamplingBody, TemplateBody):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: str | dict[str, Any] | None = None


# ---- sampling options ----

OPENAI = Dialect(
    known=(*FIELDS, "n", "skip_special_tokens", "first_prompt"),
    ignored=(
        *RequestBody.model_fields,
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("output_kind", "return_tokens_as_token_ids", "verbosity"),
    ),
    neutral={"seed": (-1,)},
    others=("model", "prompt", "messages", "tools", "stream", "stream_options", "session", "priority", "request_id"),
)
"""Fields of OpenAI's and vLLM's requests."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sampling options that a request sets."""

    sampling: SamplingParams
    """Its seed is that of the request; the seeds of several choices are derived from it."""
    n: int = 1
    """Number of choices of each prompt."""
    logprobs: int | None = None
    """Number of reported alternatives per token; None reports no log-probabilities."""
    special: bool = False
    """Whether texts have special tokens."""
    first_prompt: int | None = None
    """Number of the first prompt in the batch of which the request is a part; its seeds are those of that batch."""


def wanted_of(given: Mapping[str, Any], default: SamplingParams, seed: int, dialect: Dialect = OPENAI) -> Wanted:
    """Read the fields of a request that concern sampling. Values of other fields are those of `default`, and `seed`.
    Fields that might be meant to change the output are refused."""
    own = dialect.read(given)
    n = own.pop("n", 1)
    if type(n) is not int or not 1 <= n <= MOST_CHOICES:
        raise Refusal(f"n is {clipped(n)}; it must be a whole number from 1 to {MOST_CHOICES}", param="n")
    if (scores := own.get("prompt_logprobs")) is not None:  # in vLLM 0 requests those of the prompt's own tokens
        if scores not in (0, 1):
            problem = f"prompt_logprobs is {clipped(scores)}; it must be 0 or 1: prompts get no alternatives"
            raise Refusal(problem, param="prompt_logprobs")
        own["prompt_logprobs"] = scores is not False
    if type(own.get("max_tokens")) is int:  # any number beyond the context means no limit
        own["max_tokens"] = min(own["max_tokens"], 2**31 - 1)
    skip = own.pop("skip_special_tokens", True)
    if type(skip) is not bool:
        raise Refusal(f"skip_special_tokens is {clipped(skip)}; it must be true or false", param="skip_special_tokens")
    first = own.pop("first_prompt", None)
    if first is not None and (type(first) is not int or not 0 <= first < 2**32):
        problem = f"first_prompt is {clipped(first)}; it must be a whole number from 0 to 2**32 - 1"
        raise Refusal(problem, param="first_prompt")
    sampling = replace(default, **{"seed": seed, "logprobs": 0, **own})
    return Wanted(sampling, n, sampling.logprobs if "logprobs" in own else None, not skip, first)
