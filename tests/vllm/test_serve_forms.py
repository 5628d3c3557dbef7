"""The server's answers in vLLM's forms, read by vLLM's own classes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

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
