"""OpenAI's endpoints, with vLLM's fields."""

from __future__ import annotations

import json
from functools import partial
from inspect import signature
from typing import Any

from fastapi import APIRouter, Request, Response

from specactor_ray.core.types import MOST_LOGPROBS
from specactor_ray.rollout.prompts import encode_chat
from specactor_ray.serve.openai_answers import ChatForm, CompletionForm, EchoForm, OpenAIForm
from specactor_ray.serve.outputs import answer
from specactor_ray.serve.requests import (
    ChatBody,
    CompletionBody,
    JsonObject,
    JsonRoute,
    Refusal,
    SamplingBody,
    TemplateBody,
    Text,
    TextBody,
    TokenId,
)
from specactor_ray.serve.service import Service, Serving
from specactor_ray.table.requests import refuse_unknown

_CHOOSABLE = ("add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that requests set; all others of its names are no template variables."""
router = APIRouter(route_class=JsonRoute)


class TokenizeBody(TemplateBody):
    """Body of `/tokenize`: a prompt, or chat messages."""

    model: Text = None
    prompt: str | None = None


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
    if body.prompt is None:
        tokens = await _encoded(service, body)
    else:
        tokens = (await service.prompts(body.prompt, "prompt", **body.text_options()))[0]
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}


@router.post("/detokenize")
async def detokenize(service: Serving, body: DetokenizeBody) -> dict[str, str]:
    """Text of token ids, special tokens included."""
    service.require_model(body.model)
    refuse_unknown(body.tokens, service.num_ids)
    return {"prompt": service.tokenizer.decode(body.tokens)}


@router.post("/v1/completions")
async def completions(service: Serving, body: CompletionBody, request: Request) -> Response:
    """Outputs of one or several prompts: plain text, without a chat template, or token ids."""
    service.require_model(body.model)
    given = {name: value for name, value in body.given().items() if name not in TextBody.model_fields}
    prompts = await service.prompts(given.pop("prompt"), "prompt", **body.text_options())
    nothing = bool(given.pop("echo", False)) and body.max_tokens == 0
    if nothing:
        given["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = True
    form = (EchoForm if body.echo else CompletionForm)(service, body, prompts, service.wanted(given))
    form.only_prompts = nothing
    return await _answered(request, body, form)


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
        if not 0 <= (top := body.top_logprobs or 0) <= MOST_LOGPROBS:
            problem = f"top_logprobs is {top}; it must be a whole number from 0 to {MOST_LOGPROBS}"
            raise Refusal(problem, param="top_logprobs")
        given["logprobs"] = top
    elif body.top_logprobs:
        raise Refusal("top_logprobs needs logprobs=true", param="top_logprobs")
    return await _answered(request, body, ChatForm(service, body, [prompt], service.wanted(given)))


async def _answered(request: Request, body: SamplingBody, form: OpenAIForm) -> Response:
    return await answer(request, form, stream=body.stream, **body.submission(request.headers, form.id))


# ---- chat messages ----


async def _encoded(service: Service, body: TemplateBody) -> tuple[int, ...]:
    """Token ids of the messages, in the model's chat template."""
    if body.split_special_tokens is False:
        raise Refusal("messages are literal text: split_special_tokens must be true", param="split_special_tokens")
    more = dict(body.chat_template_kwargs or {})
    arguments = {*signature(encode_chat).parameters, *signature(service.tokenizer.apply_chat_template).parameters}
    if reserved := [name for name in more if name in arguments.difference(_CHOOSABLE)]:
        raise Refusal(f"chat_template_kwargs may not hold {reserved[0]}", param="chat_template_kwargs")
    more |= {name: value for name in _CHOOSABLE if (value := getattr(body, name)) is not None}
    more.setdefault("add_generation_prompt", not more.get("continue_final_message"))
    if body.tools:
        more["tools"] = body.tools
    messages = [_with_parsed_arguments(one) for one in body.messages or ()]
    options: dict[str, Any] = {"add_special_tokens": bool(body.add_special_tokens), "most": service.context}
    return await service.encoded(partial(encode_chat, service.tokenizer, messages, **options, **more), "messages")


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
