"""The server's answers in vLLM's forms, read by vLLM's own classes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from specactor_ray.serve.requests import ChatBody, CompletionBody
from specactor_ray.serve.vllm_rl import VllmGenerateBody
from tests.fakes.scripted_queue import ScriptedQueue, make_service, on, post
from tests.unit.serve.test_trainers import TOKENS, tokens
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]


def test_token_ids_in_and_out() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    sampling: dict[str, Any] = {"max_tokens": 6, "seed": 2, "logprobs": 1, "n": 2}
    body = tokens([1, 2, 3], **sampling) | {"request_id": "mine", "return_token_ids": True}
    assert protocol.GenerateRequest.model_validate(body).sampling_params.n == 2
    whole = protocol.GenerateTokensResponse.model_validate(post(TOKENS, body).json())
    assert whole.request_id == "mine" and whole.usage is not None and whole.usage.completion_tokens == 12
    assert whole.prompt_token_ids == [1, 2, 3]
    for choice in whole.choices:
        assert choice.token_ids is not None and choice.logprobs is not None and choice.weight_versions is not None
        content = choice.logprobs.content or []
        assert [one.token_id for one in content] == choice.token_ids
        (span,) = choice.weight_versions
        assert (span.version, span.start, span.end) == ("0", 0, 6)


def request_classes() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Path → vLLM's class of its requests, and the fields that it needs."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {
        "/v1/completions": (CompletionRequest, {"prompt": [1, 2]}),
        "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
        TOKENS: (GenerateRequest, {"token_ids": [1, 2], "sampling_params": {}}),
    }


def test_requests_with_all_of_vllms_defaults_are_served() -> None:
    """As clients send them that dump vLLM's classes; a new field whose default is refused is named."""
    from vllm import SamplingParams

    async def work(client: httpx.AsyncClient) -> None:
        for path, (kind, needed) in request_classes().items():
            defaults = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
            body = {**{name: value for name, value in defaults.items() if name not in needed}, **needed, "model": None}
            answer = await client.post(path, json=body)
            assert answer.is_success, (path, answer.text)
        plain = SamplingParams()
        for name in SamplingParams.__struct_fields__:
            if not name.startswith("_") and name not in ("skip_clone", "output_text_buffer_length", "output_kind"):
                answer = await client.post(TOKENS, json=tokens([1], **{name: getattr(plain, name)}))
                assert answer.is_success, (name, answer.text)

    on(make_service(ScriptedQueue()), work)


VALUES = (True, False, 1, 0, 2, -1, 1.5, 2.0, "yes", "on", "1", "1.5", "abc", ["a"], {"a": 1})
OURS = {
    *("model", "stream_options", "prompt_logprobs", "logprobs", "top_logprobs", "echo", "tools", "tool_choice"),
    "output_mode",
}
"""Fields of which we take other values."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", TOKENS])
def test_fields_take_the_values_that_vllm_takes(path: str) -> None:
    """Except that no boolean is a number."""
    kind, needed = request_classes()[path]
    ours = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, TOKENS: VllmGenerateBody}[path]
    fields = (ours.model_fields.keys() & kind.model_fields.keys()) - needed.keys() - OURS
    fields -= {"stream"} if path == TOKENS else set()
    assert len(fields) >= 6

    async def work(client: httpx.AsyncClient) -> None:
        for name in sorted(fields):
            numeric = taken(kind, {**needed, name: 1.0}) and not taken(kind, {**needed, name: "yes"})
            for value in VALUES:
                body = {**needed, name: value}
                if not (numeric and isinstance(value, bool)):
                    assert (await client.post(path, json=body)).is_success == taken(kind, body), (name, value)

    on(make_service(ScriptedQueue()), work)


def taken(kind: Any, body: dict[str, Any]) -> bool:
    """Whether vLLM takes a request of this class."""
    from pydantic import ValidationError
    from vllm.exceptions import VLLMValidationError

    try:
        request = kind.model_validate(body)
        if hasattr(request, "to_sampling_params"):
            most = body.get("max_completion_tokens", body.get("max_tokens", 16))
            request.to_sampling_params(max_tokens=int(most), default_sampling_params={})
    except (ValidationError, VLLMValidationError, ValueError):
        return False
    return True


def test_errors() -> None:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    for path, body in ((TOKENS, tokens([])), ("/update_weights", {}), ("/collective_rpc", {}), ("/pause?mode=x", None)):
        answer = post(path, body)
        assert ErrorResponse.model_validate(answer.json()).error.code == answer.status_code == 400
