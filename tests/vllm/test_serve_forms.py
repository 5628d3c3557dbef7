"""The server's answers in vLLM's forms, read by vLLM's own classes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.scripted_engine import post
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


def test_errors() -> None:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    for path, body in ((TOKENS, tokens([])), ("/update_weights", {}), ("/collective_rpc", {}), ("/pause?mode=x", None)):
        answer = post(path, body)
        assert ErrorResponse.model_validate(answer.json()).error.code == answer.status_code == 400
