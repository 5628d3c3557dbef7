"""OpenAI's endpoints, with vLLM's fields."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from fastapi import APIRouter, Request, Response

from specactor_ray.rollout.handle import Token
from specactor_ray.rollout.prompts import encode_chat
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.serve.outputs import Form, Part, answer, finite, prompt_report, spans_of
from specactor_ray.serve.requests import (
    Integer,
    JsonObject,
    JsonRoute,
    Messages,
    Refusal,
    SamplingBody,
    TemplateBody,
    Text,
    TokenId,
    Wanted,
)
from specactor_ray.serve.service import Service, Serving
from specactor_ray.serve.tool_calls import CALL, opens_thought, parsed_calls
from specactor_ray.target.rows import refuse_unknown

_CHOOSABLE = ("add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that requests set; all others of its names are no template variables."""
_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""

router = APIRouter(route_class=JsonRoute)


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: Any
    """Text, texts, token ids, or several lists of token ids."""
    logprobs: Integer | None = None


class ChatBody(SamplingBody, TemplateBody):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeBody(TemplateBody):
    """Body of `/tokenize`: a prompt, or chat messages."""

    model: Text = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(JsonObject):
    """Body of `/detokenize`."""

    model: Text = None
    tokens: list[TokenId]


@router.get("/health")
async def health() -> dict[str, Any]:
    """The server answers."""
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(service: Serving) -> Response:
    """Metrics for Prometheus."""
    return Response(await service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models")
async def models(service: Serving) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{name:path}")
async def model(service: Serving, name: str) -> dict[str, Any]:
    """One model."""
    service.require_model(name)
    return _card(service)


def _card(service: Service) -> dict[str, Any]:
    card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "specactor"}
    return card | {"root": service.model, "parent": None, "max_model_len": service.context}


@router.post("/tokenize")
async def tokenize(service: Serving, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of text, or of chat messages."""
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal("send either prompt or messages")
    if body.add_special_tokens is False and body.prompt is not None:
        raise Refusal("add_special_tokens must be true", param="add_special_tokens")
    tokens = await (_encoded(service, body) if body.prompt is None else service.encode(body.prompt))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}


@router.post("/detokenize")
async def detokenize(service: Serving, body: DetokenizeBody) -> dict[str, str]:
    """Text of token ids, special tokens included."""
    service.require_model(body.model)
    refuse_unknown(body.tokens, service.vocabulary)
    return {"prompt": service.tokenizer.decode(body.tokens)}


@router.post("/v1/completions")
async def completions(service: Serving, body: CompletionBody, request: Request) -> Response:
    """Outputs of one or several prompts: plain text, without a chat template, or token ids."""
    service.require_model(body.model)
    given = body.given()
    prompts = await service.prompts(given.pop("prompt"), "prompt")
    return await _answered(request, body, CompletionForm(service, body, prompts, service.wanted(given)))


@router.post("/v1/chat/completions")
async def chat(service: Serving, body: ChatBody, request: Request) -> Response:
    """Outputs of a conversation, in the model's chat template."""
    service.require_model(body.model)
    if body.tool_choice not in (None, "auto", "none"):
        raise Refusal("tool_choice must be auto or none: outputs are not forced into a form", param="tool_choice")
    prompt = await _encoded(service, body)
    of_chat = ChatBody.model_fields.keys() - SamplingBody.model_fields.keys()
    given = {name: value for name, value in body.given().items() if name not in of_chat}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    if given.get("max_tokens") is None:  # as in OpenAI and vLLM: the rest of the context
        given["max_tokens"] = max(1, service.context - len(prompt))
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise Refusal("top_logprobs needs logprobs=true", param="top_logprobs")
    return await _answered(request, body, ChatForm(service, body, [prompt], service.wanted(given)))


async def _answered(request: Request, body: SamplingBody, form: OpenAIForm) -> Response:
    name = body.request_id or request.headers.get("x-request-id") or form.id
    return await answer(request, form, stream=body.stream, name=name, session=body.session, priority=body.priority)


# ---- chat messages ----


async def _encoded(service: Service, body: TemplateBody) -> tuple[int, ...]:
    """Token ids of the messages, in the model's chat template."""
    more = dict(body.chat_template_kwargs or {})
    arguments = {*signature(encode_chat).parameters, *signature(service.tokenizer.apply_chat_template).parameters}
    if reserved := [name for name in more if name in arguments.difference(_CHOOSABLE)]:
        raise Refusal(f"chat_template_kwargs may not hold {reserved[0]}", param="chat_template_kwargs")
    more |= {name: value for name in _CHOOSABLE if (value := getattr(body, name)) is not None}
    more.setdefault("add_generation_prompt", not more.get("continue_final_message"))
    if body.tools:
        more["tools"] = body.tools
    messages = [_with_parsed_arguments(one) for one in body.messages or ()]
    return await service.encoded(partial(encode_chat, service.tokenizer, messages, **more), "messages")


def _with_parsed_arguments(message: Any) -> Any:
    """Parse the arguments of earlier tool calls: templates expect objects; OpenAI's clients send JSON text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        try:
            arguments = json.loads(function["arguments"])  # type: ignore[index]
            parsed.append({**call, "function": {**function, "arguments": arguments}})  # type: ignore[dict-item]
        except (TypeError, KeyError, ValueError, RecursionError):
            parsed.append(call)
    return {**message, "tool_calls": parsed}


# ---- answers ----


class OpenAIForm(Form):
    """Fields of both endpoints' answers."""

    prefix = kind = chunk_kind = ""

    def __init__(self, service: Service, body: SamplingBody, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        super().__init__(service, prompts, wanted)
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.with_ids = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._created = int(time.time())

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        outputs = [part.output for part in parts if part.output is not None]
        choices = [self.choice(part) for part in parts]
        return {**self._head(self.kind), "choices": choices, **self._end(outputs)}

    def event(self, part: Part) -> dict[str, Any]:
        event = {**self._head(self.chunk_kind), "choices": [self.choice(part, is_event=True)]}
        return event if part.output is None else event | {"system_fingerprint": _fingerprint([part.output])}

    def last_events(self, outputs: Sequence[Trajectory]) -> Iterable[Any]:
        if self._with_usage:
            yield {**self._head(self.chunk_kind), "choices": [], **self._end(outputs)}

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        """A choice, or its new content."""
        raise NotImplementedError

    def name(self, token_id: int) -> str:
        """Name of a token in reports."""
        return f"token_id:{token_id}" if self._as_ids else self.service.token_text(token_id)

    def frame(self, part: Part) -> dict[str, Any]:
        """Fields of a choice besides its content."""
        output = part.output
        choice: dict[str, Any] = {"index": part.index, "logprobs": None, "finish_reason": None}
        if self.with_ids:
            choice["token_ids"] = part.token_ids
        if output is not None:
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            choice |= {"seed": output.sampling.seed, "weight_versions": spans_of(output, int)}
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_report(self.service, output)
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.service.model}

    def _end(self, outputs: Sequence[Trajectory]) -> dict[str, Any]:
        return {"usage": self.usage(outputs), "system_fingerprint": _fingerprint(outputs)}


class CompletionForm(OpenAIForm):
    """Answers of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        choice = {**self.frame(part), "text": part.text}
        if self.wanted.logprobs is not None:
            choice["logprobs"] = self._report(part.tokens)
        if self.with_ids and part.output is not None:
            choice["prompt_token_ids"] = self.prompts[part.index // self.wanted.n]
        return choice

    def _report(self, tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self.name(token.token_id) for token in tokens]
        values = [finite(token.logprob) for token in tokens]
        tops = [
            {name: value} | {self.name(other): finite(theirs) for other, theirs in token.top}
            for name, value, token in zip(names, values, tokens, strict=True)
        ]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}


class ChatForm(OpenAIForm):
    """Answers of `/v1/chat/completions`; tool calls are parsed from the outputs if the request has tools."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        super().__init__(service, body, prompts, wanted)
        self.until = CALL if body.tools and body.tool_choice != "none" else ""
        end = service.tokenizer.decode(prompts[0][-_END:]) if self.until else ""
        self._in_thought = opens_thought(end)

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        answer = super().whole(parts)
        if (report := prompt_report(self.service, parts[0].output)) is not None:
            answer["prompt_logprobs"] = report
        return answer | ({"prompt_token_ids": self.prompts[0]} if self.with_ids else {})

    def first_events(self, choices: int) -> Iterable[Any]:
        for index in range(choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._head(self.chunk_kind), "choices": [choice]}

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        content, calls = part.text, list[dict[str, Any]]()
        if self.until and part.output is not None:
            whole = self.text(part.output)
            content, calls = parsed_calls(whole, self._in_thought)
            content = content[len(whole) - len(part.text) :]
        choice = self.frame(part)
        if calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        if self.wanted.logprobs is not None:
            choice["logprobs"] = {"content": list(map(self._reported, part.tokens))}
        if not is_event:
            message = {"role": "assistant", "content": content or None if calls else content}
            return choice | {"message": message | ({"tool_calls": calls} if calls else {})}
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        if self.with_ids and part.output is not None:
            choice["prompt_token_ids"] = self.prompts[0]
        return choice | {"delta": delta}

    def _reported(self, token: Token) -> dict[str, Any]:
        others = [self._named(*other) for other in token.top]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": others}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        utf8 = list(self.service.token_text(token_id).encode())
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": utf8}


def _fingerprint(outputs: Sequence[Trajectory]) -> str:
    """Identifies the weights: a request with the same seed and weights has the same output."""
    return f"weights-{max(output.weight_version for output in outputs)}"
