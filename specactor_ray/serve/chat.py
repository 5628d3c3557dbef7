"""Chat messages → token ids, and tool calls in outputs (the Hermes form, which Qwen and others write)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specactor_ray.rollout.prompts import encode_chat
from specactor_ray.serve.bodies import TemplateBody
from specactor_ray.serve.refusal import Refusal

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

CALL, _CALL_END = "<tool_call>", "</tool_call>"
_RESERVED = (
    *("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "return_dict", "return_tensors"),
    *("padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
)
"""Arguments of `apply_chat_template` that are not template variables."""


async def encode_messages(service: Service, body: TemplateBody, with_tools: bool = True) -> tuple[int, ...]:
    """Token ids of the messages, in the model's chat template.

    Raises:
        Refusal: They cannot be encoded.
    """
    more = dict(body.chat_template_kwargs or {})
    if reserved := [name for name in more if name in _RESERVED]:
        raise Refusal(f"chat_template_kwargs may not hold {reserved[0]}", param="chat_template_kwargs")
    if body.continue_final_message is not None:
        more["continue_final_message"] = body.continue_final_message
    more["add_generation_prompt"] = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    if body.tools and with_tools:
        more["tools"] = body.tools
    messages = [_with_read_arguments(one) for one in body.messages]

    return await service.encoded(partial(encode_chat, service.tokenizer, messages, **more), "messages")


def _with_read_arguments(message: Any) -> Any:
    """Parse the arguments of earlier tool calls: templates expect objects; OpenAI's clients send JSON text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_read_call(call) for call in calls]}


def _with_read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def parsed_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Text before the first tool call, and the calls as OpenAI's clients expect them. If one of the calls cannot be
    parsed, the text is returned unchanged, without calls."""
    content, *blocks = text.split(CALL)
    calls = []
    for block in blocks:
        try:
            call = json.loads(block.partition(_CALL_END)[0])
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            return text, []
        arguments = call.get("arguments", {})
        function = {
            "name": call["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        }
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return (content.rstrip() if calls else content), calls
