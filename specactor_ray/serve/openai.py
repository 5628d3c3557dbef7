"""OpenAI's endpoints, with vLLM's fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from specactor_ray.rollout.prompts import is_token_ids
from specactor_ray.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from specactor_ray.serve.chat import CALL, encode_messages
from specactor_ray.serve.forms import ChatForm, CompletionForm, Form, as_json
from specactor_ray.serve.outputs import EventStream, merged, parts_of
from specactor_ray.serve.parameters import Wanted
from specactor_ray.serve.refusal import Refusal, openai_error

if TYPE_CHECKING:
    from specactor_ray.rollout.handle import Handle
    from specactor_ray.serve.service import Service

_MOST_PROMPTS = 1024
_OF_CHAT = (
    *("messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("max_completion_tokens", "logprobs", "top_logprobs"),
)
"""Fields of a chat request that are not sampling parameters."""


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        """The server answers."""
        return {"status": "ok"}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_card(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        service.require_model(name)
        return _card(service)

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Outputs of one or several prompts: plain text, without a chat template, or token ids."""
        service.require_model(body.model)
        given = body.given()
        prompts = await _prompts(service, given.pop("prompt"))
        if given.pop("echo", None):
            if body.stream:
                raise Refusal("echo is not available in a stream; leave out one of them", param="echo")
            if body.logprobs is not None and not body.prompt_logprobs:
                given["prompt_logprobs"] = True
        wanted = service.wanted(given)
        return await _answer(service, request, body, prompts, wanted, CompletionForm(service, body, prompts, wanted))

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """Outputs of a conversation, in the model's chat template."""
        service.require_model(body.model)
        wants_calls = _wants_calls(body)
        prompt = await encode_messages(service, body)
        wanted = _chat_wanted(service, body, len(prompt))
        form = ChatForm(service, body, [prompt], wanted, wants_calls)
        return await _answer(service, request, body, [prompt], wanted, form)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of text, or of chat messages."""
        service.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("send either prompt or messages")
        if body.messages is not None:
            tokens = await encode_messages(service, ChatBody.model_construct(**body.given()))
        else:
            if body.add_special_tokens is False:
                raise Refusal("add_special_tokens must be true", param="add_special_tokens")
            tokens = await service.encode(body.prompt or "")
        texts = [service.token_texts[token].text for token in tokens] if body.return_token_strs else None
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context, "token_strs": texts}

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        service.require_model(body.model)
        service.require_known(body.tokens, "tokens")
        return {"prompt": service.tokenizer.decode(body.tokens)}

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


async def _answer(
    service: Service,
    request: Request,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    wanted: Wanted,
    form: Form,
) -> Response:
    name = body.request_id or request.headers.get("x-request-id") or form.id
    handles = service.submit(prompts, wanted, name=name, session=body.session, priority=body.priority or 0)
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(service, handles, wanted, form, with_usage)
        return EventStream(events, lambda refusal: as_json(openai_error(refusal)), lambda: service.drop(handles))
    return Response(as_json(form.whole(await service.outputs_for(request, handles))), media_type="application/json")


async def _events(
    service: Service, handles: Sequence[Handle], wanted: Wanted, form: Form, with_usage: bool
) -> AsyncIterator[str]:
    until = CALL if isinstance(form, ChatForm) and form.wants_calls else None
    streams = [parts_of(service, handle, index, wanted.sampling.stop, until) for index, handle in enumerate(handles)]
    for event in form.first_events(len(handles)):
        yield event
    outputs = []
    async for part in merged(streams):
        if part.output is not None:
            outputs.append(part.output)
        for event in form.events(part):
            yield event
    if with_usage:
        yield form.usage_event(outputs)


async def _prompts(service: Service, prompt: Any) -> list[tuple[int, ...]]:
    """The prompts of a completion request as token ids.

    Raises:
        Refusal: The prompt has another type, or cannot be encoded.
    """
    several = isinstance(prompt, list) and not is_token_ids(prompt)
    each = prompt if several else [prompt]
    if len(each) > _MOST_PROMPTS:
        raise Refusal(f"the request has {len(each)} prompts; at most {_MOST_PROMPTS} are allowed", param="prompt")
    for one in each:
        is_ids = isinstance(one, list) and set(map(type, one)) <= {int}
        if not (isinstance(one, str) or is_ids) or not one:
            raise Refusal("prompt must be text, token ids, or a list of these, none of them empty", param="prompt")
    return [tuple(one) if isinstance(one, list) else await service.encode(one) for one in each]


def _chat_wanted(service: Service, body: ChatBody, prompt_tokens: int) -> Wanted:
    given = {name: value for name, value in body.given().items() if name not in _OF_CHAT}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    if given.get("max_tokens") is None:  # as in OpenAI and vLLM: the rest of the context
        given["max_tokens"] = max(1, service.context - prompt_tokens)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise Refusal("top_logprobs needs logprobs=true", param="top_logprobs")
    return service.wanted(given)


def _wants_calls(body: ChatBody) -> bool:
    """Whether tool calls are parsed from the outputs."""
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise Refusal("tool_choice must be auto or none: outputs are not forced into a form", param="tool_choice")
    return bool(body.tools) and choice != "none"


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "specactor",
        "root": service.model,
        "parent": None,
        "max_model_len": service.context,
    }
