"""What is refused, by the name of its field and in one form; what is ignored; and no value is a defect."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_queue import ScriptedQueue, make_service, on, post
from tests.tiny import VOCAB_SIZE

COMPLETIONS, CHAT, TOKENS, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "a"}]
HALF = "\\ud83d"
LONG = "a" * 100_000
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [1], "max_tokens": 2},
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    GENERATE: {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}},
    TOKENS: {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [1]},
}


def tokens(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": sampling}


def ids(prompt: Any, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": sampling}


FIELDS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1.0, True, "x")),
    *({"max_tokens": value} for value in (0, "x", True)),
    *({"n": value} for value in (0, 10**9, True)),
    *({"stop": value} for value in ("", ["a"] * 100, {})),
    *({"stop_token_ids": value} for value in (["a"], [1 << 20], [True])),
    *({"prompt_logprobs": value} for value in (5, "yes", 2.5)),
    *({name: True} for name in ("top_k", "seed", "priority", "logprobs", "first_prompt", "watermarking")),
    *({name: ["a"]} for name in ("user", "cache_salt", "kv_transfer_params", "return_weight_versions")),
    *({name: "x"} for name in ("stream", "ignore_eos", "skip_special_tokens", "suffix")),
    *({name: False} for name in ("include_reasoning", "enable_thinking", "do_sample")),
    *({"top_k": -2}, {"first_prompt": -1}, {"seed": 2**64}, {"logprobs": 21}, {"priority": 10**30}, {"echo": [1]}),
    *({"min_p": 0.1}, {"best_of": 2}, {"chat_template": "{{ messages }}"}, {"temprature": 1.0}, {"modalities": ["a"]}),
    *({"thinking_token_budget": 8}, {"logprob_token_ids": [1]}, {"reasoning_effort": "low"}),
]
SAMPLING: list[dict[str, Any]] = [{"top_p": 2.0}, {"min_p": 0.1}, {"n": 0}, {"json_schema": "{}"}]
REFUSED: list[tuple[str, Any, str]] = [
    *[(COMPLETIONS, {"prompt": [1], **given}, next(iter(given))) for given in FIELDS],
    (COMPLETIONS, {"prompt": [1], "n": 1024, "top_k": 99999999999}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
    *[(COMPLETIONS, {"prompt": prompt}, "prompt") for prompt in ("", [[]], [1, "a"], [True], [10**20], None)],
    (COMPLETIONS, {"prompt": [1] * 600}, "must stay within 512"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e400}', "temperature"),
    *[(CHAT, {"messages": messages}, "messages") for messages in ([], [1], [{"role": "user"}], [{"role": 1}])],
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages"),
    (CHAT, {"messages": MESSAGES, "tools": [{}], "tool_choice": "required"}, "tool_choice"),
    *[(TOKENS, tokens([1], **given), name) for given in SAMPLING for name in given],
    *[(GENERATE, ids([1], **given), name) for given in SAMPLING for name in given],
    (TOKENS, tokens([1]) | {"output_mode": "text"}, "output_mode"),
    (TOKENS, tokens([1]) | {"stream": True}, "stream"),
    (TOKENS, tokens([1]) | {"features": {"mm_hashes": {}}}, "features"),
    (TOKENS, tokens([]), "prompt"),
    (TOKENS, tokens([VOCAB_SIZE]), "prompt"),
    (TOKENS, tokens([-1]), "token_ids.0"),
    (TOKENS, tokens([1]) | {"sampling_params": None}, "sampling_params"),
    (GENERATE, {}, "input_ids"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "input_ids"),
    (GENERATE, ids([[1], [2]]), "input_ids.0"),
    (GENERATE, ids([1], n=2), "a request for each sample"),
    (GENERATE, ids([1]) | {"return_routed_experts": True}, "return_routed_experts"),
    (GENERATE, ids([1]) | {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ("/init_weight_transfer_engine", {"anything": [1]}, "/init_weight_transfer_engine is not available: weights come"),
    ("/v1/load_lora_adapter", {}, "/v1/load_lora_adapter is not available: adapters are not served; merge"),
    ("/release_kv_cache_memory", {}, "/release_kv_cache_memory is not available"),
    ("/pause?mode=later", None, "mode"),
    ("/abort_requests", {"request_ids": "b"}, "request_ids"),
    ("/sleep?level=0", None, "level"),
    ("/pause_generation", {"mode": "later"}, "mode"),
    ("/update_weights", {}, "weight_dir"),
    ("/update_weights", {"weight_dir": None}, "NCCL"),
    *[("/update_weights", {"weight_dir": path}, "weight_dir") for path in ("~nobody/x", "a\0b")],
    ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "weight_dir"),
    ("/finish_weight_update", {"weight_version": -1}, "weight_version"),
    ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}, "load_format"),
    ("/abort_request", {}, "rid"),
    ("/workers", {"url": "http://elsewhere:1"}, "http://localhost"),
    # half of a surrogate pair
    ("/finish_weight_update", f'{{"weight_version": "{HALF}"}}'.encode(), "weight_version"),
    ("/update_weights", f'{{"update_info": {{"weight_dir": "{HALF}"}}}}'.encode(), "update_info.weight_dir"),
    (COMPLETIONS, f'{{"prompt": "a", "stop": ["b", "\\ud83d\\ude00{HALF}"]}}'.encode(), "stop.1"),
    (COMPLETIONS, f'{{"prompt": "a", "metadata": {{"{HALF}": 1}}}}'.encode(), "metadata"),
    (COMPLETIONS, f'{{"prompt": "a", "{HALF}": 1}}'.encode(), "Unicode"),
    (TOKENS, f'{{"token_ids": [1], "sampling_params": {{"stop": "{HALF}"}}}}'.encode(), "sampling_params.stop"),
    # texts that are too long are not tokenized
    ("/tokenize", {"prompt": LONG}, "characters, and a context of"),
    (COMPLETIONS, {"prompt": ["b", LONG]}, "characters, and a context of"),
    (GENERATE, {"text": LONG}, "characters, and a context of"),
    (CHAT, {"messages": [{"role": "user", "content": LONG[:60_000]}] * 2}, "characters, and a context of"),
    (CHAT, {"messages": MESSAGES, "tools": [{"a": LONG}]}, "characters, and a context of"),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED, ids=lambda one: ascii(one)[:50])
def test_what_is_not_available_is_refused_by_name(path: str, body: Any, named: str) -> None:
    answer = post(path, body, headers=JSON if isinstance(body, bytes) else {})
    assert answer.status_code == 400 and answer.json()["success"] is False
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == 400
    assert named in error["message"] or named == error["param"] or f"{error['param']}".startswith(f"{named}.")


@pytest.mark.parametrize("path", [COMPLETIONS, TOKENS, GENERATE, "/update_weights", "/update_weights_from_disk"])
def test_what_is_no_request_is_refused(path: str) -> None:
    in_utf_16 = '{"prompt": "a"}'.encode("utf-16")
    for body in (b"", b"{", b"[]", b'"a"', b"\xff", b"null", b'{"a": NaN}', b"[" * 100_000, in_utf_16, b"\xed\xa0\x80"):
        answer = post(path, body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None, "Exceeds the limit"),
        (b"[" * 100_000, None, "nested too deeply"),
        (b'{"prompt": "a", "stop": 5}', "stop", "valid string or Input should be a valid list"),
        (b'{"prompt": "a", "stop": ["a", 5]}', "stop", "valid string"),
        (b'{"prompt": "a", "stop_token_ids": [1, "x"]}', "stop_token_ids.1", "valid integer"),
        (b'{"prompt": "a", "prompt_logprobs": 5}', "prompt_logprobs", "must be 0 or 1"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 50}',
            "top_logprobs",
            "20",
        ),
        (b"[]", None, "must be a JSON object"),
    ],
    ids=lambda one: ascii(one)[:40],
)
def test_a_refusal_has_the_reason_and_a_field_that_exists(body: bytes, field: str | None, reason: str) -> None:
    error = post(CHAT if b"messages" in body else COMPLETIONS, body, headers=JSON).json()["error"]
    assert error["param"] == field and reason in error["message"]


@pytest.mark.parametrize("most", [2**31 - 1, 2**31, 2**63 - 1])
def test_more_tokens_than_the_context_has_are_no_limit(most: int) -> None:
    for path, body in BODIES.items():
        if "max_tokens" in body:
            assert post(path, {**body, "max_tokens": most}).status_code == 200
    assert post(GENERATE, ids([1], max_new_tokens=most)).status_code == 200


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_requests_nothing_passes_everywhere(value: Any) -> None:
    for path in (COMPLETIONS, CHAT, TOKENS, GENERATE):
        for given, status in ((value, 200), (0, 400), (True, 400), ("x", 400)):
            assert post(path, BODIES[path] | {"unknown_field": given}).status_code == status
        if "sampling_params" in BODIES[path]:
            assert post(path, BODIES[path] | {"sampling_params": {"unknown_field": value}}).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        *({"return_weight_versions": value} for value in (True, False)),
        *({"skip_special_tokens": value} for value in (True, False, None)),
        {"include_reasoning": True, "return_prompt_text": False, "add_special_tokens": True, "echo": False},
        {"mm_payload": "none", "return_token_offsets": True, "separate_reasoning": True, "stream_reasoning": True},
        {"routed_experts_prompt_start": 0, "thinking_token_budget": -1, "truncation_side": "left"},
        {"stream_interval": 4, "session_id": "a", "seed": -1, "suffix": "", "min_p": 0.0},
        {"modalities": ["text"], "reasoning_effort": "none", "function_call": "auto"},
        {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "response_format": {"type": "text"}},
    ],
    ids=str,
)
def test_neutral_values_of_vllms_fields_pass(given: dict[str, Any]) -> None:
    assert post(COMPLETIONS, {"prompt": [1], **given}).status_code == 200
    assert post(CHAT, {"messages": MESSAGES, **given}).status_code == 200
    if "return_weight_versions" in given:
        answer = post(TOKENS, tokens([1]) | given)
        assert answer.status_code == 200 and answer.json()["choices"][0]["weight_versions"]


# ---- nothing that a client sends is a defect ----

CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": '{"a": "\\ud800"}'}}]}]
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
            answer = await client.post(path, content=sent, headers=JSON)
            assert answer.status_code < 500 and '"code":500' not in answer.text, (sent[:300], answer.text)

    on(make_service(ScriptedQueue()), work)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_no_template_argument_and_no_deep_value_is_a_defect(path: str) -> None:
    names = ("tokenizer", "conversation", "messages", "self", "template", "kwargs", "chat_template", "tokenize", "a b")

    async def work(client: httpx.AsyncClient) -> None:
        sent = [json.dumps({"messages": MESSAGES, "chat_template_kwargs": {name: 1}}) for name in names]
        for depth in (100, 500, 900, 980, 10_000):
            for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
                call = json.dumps([{"function": {"name": "f", "arguments": deep}}])
                for message, more in (
                    (f', "x": {deep}', ""),
                    (f', "tool_calls": {call}', ""),
                    ("", f', "chat_template_kwargs": {{"a": {deep}}}'),
                    ("", f', "tools": [{{"a": {deep}}}]'),
                ):
                    sent.append(f'{{"messages": [{{"role": "user", "content": "a"{message}}}]{more}}}')
        for body in sent:
            answer = await client.post(path, content=body, headers=JSON)
            assert answer.status_code in (200, 400), (body[:80], answer.text)

    on(make_service(ScriptedQueue()), work)
