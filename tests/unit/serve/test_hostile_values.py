"""Every field of the endpoints that generate, with values that no client should send: never a defect."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_queue import ScriptedQueue, make_service, on

MESSAGES = [{"role": "user", "content": "a"}]
CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": '{"a": "\\ud800"}'}}]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [1]},
}
MORE = ("response_format", "logit_bias", "min_p", "seed", "stop", "n", "user", "unknown", "echo", "chat_template")
VALUES: list[Any] = [
    *(None, True, -1, 2**64, 10**400, float("nan"), float("inf"), "\0", "\ud800", "a" * 5000),
    *([], [None], ["\ud800"], [2**40], {}, {"\ud800": 1}, CALLS),
]


@pytest.mark.parametrize("path", BODIES)
def test_no_value_is_a_defect(path: str) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        schema = (await client.get("/openapi.json")).json()
        reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = {*schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"], *MORE}
        bodies = [{**BODIES[path], field: value} for field in sorted(fields) for value in VALUES]
        if "sampling_params" in BODIES[path]:
            bodies += [{**BODIES[path], "sampling_params": {field: value}} for field in MORE for value in VALUES]
        for body in (*bodies, *VALUES):
            sent = json.dumps(body)
            answer = await client.post(path, content=sent, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500 and '"code":500' not in answer.text, (sent[:300], answer.text)

    on(make_service(ScriptedQueue()), work)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_no_deep_value_is_a_defect(path: str) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for depth in (100, 300, 500, 900, 980, 10_000):
            for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
                call = json.dumps([{"function": {"name": "f", "arguments": deep}}])
                for message, more in (
                    (f', "x": {deep}', ""),
                    (f', "tool_calls": {call}', ""),
                    ("", f', "chat_template_kwargs": {{"a": {deep}}}'),
                    ("", f', "tools": [{{"a": {deep}}}]'),
                ):
                    sent = f'{{"messages": [{{"role": "user", "content": "a"{message}}}]{more}}}'
                    answer = await client.post(path, content=sent, headers={"Content-Type": "application/json"})
                    assert answer.status_code in (200, 400), (depth, message[:20], more[:30], answer.text)

    on(make_service(ScriptedQueue()), work)
