"""Bodies of OpenAI's and vLLM's endpoints. Other fields that a client sends are kept, and `wanted_of` checks them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Real = Annotated[float, BeforeValidator(_no_boolean)]
Text = Annotated[str | None, Field(max_length=4096)]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""Text, texts, token ids, or several lists of token ids."""
Stops = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["role", "content"],
}
Messages = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
"""Messages of a conversation."""


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def given(self) -> dict[str, Any]:
        """The fields that were sent."""
        return {**{name: getattr(self, name) for name in self.model_fields_set}, **(self.model_extra or {})}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """Fields that concern sampling; those that `parameters.NEUTRAL` lists are not here."""

    model: Text = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Integer | None = None
    max_tokens: Integer | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: Stops = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    first_position: Integer | None = None
    prompt_logprobs: Integer | bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Text = None
    session: Text = None
    priority: Annotated[Integer | None, Field(ge=-(2**31), lt=2**31)] = None


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: Prompts
    logprobs: Integer | None = None
    echo: bool | None = None


class TemplateBody(Body):
    """Chat messages, and arguments of the chat template."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(SamplingBody, TemplateBody):
    """Body of `/v1/chat/completions`."""

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeBody(Body):
    """Body of `/tokenize`: a prompt, or chat messages as in `TemplateBody`."""

    model: Text = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: Text = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]]
