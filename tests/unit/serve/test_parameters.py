"""Fields of requests: translated, refused by name, or ignored."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.serve.requests import Refusal, refusal_of, wanted_of
from tests.fakes.scripted_queue import ScriptedQueue, post

DEFAULT = SamplingParams(temperature=0.7, max_tokens=16, seed=1)


def test_what_is_not_given_is_the_configurations_and_the_seed_the_runs() -> None:
    wanted = wanted_of({"temperature": None, "model": "x", "user": "me"}, DEFAULT, 9)
    assert wanted.sampling == SamplingParams(temperature=0.7, max_tokens=16, seed=9)
    assert (wanted.n, wanted.logprobs) == (1, None)


def test_fields_are_translated() -> None:
    given = {"temperature": 0, "top_k": -1, "top_p": 0.5, "max_tokens": 3, "seed": 2**64 - 1, "stop_token_ids": [4]}
    wanted = wanted_of({**given, "n": 2, "stop": "end", "logprobs": 0}, DEFAULT, 9)
    assert wanted.sampling == SamplingParams(0.0, 0, 0.5, 3, 2**64 - 1, (4,), stop=("end",))
    assert (wanted.n, wanted.logprobs) == (2, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"min_p": 0.1},
        {"best_of": 2},
        {"prompt_logprobs": 2},
        {"echo": True},
        {"chat_template": "{{ messages }}"},
        {"temprature": 1.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"max_tokens": 0},
        {"n": 0},
        {"n": True},
        {"first_prompt": -1},
        {"first_prompt": True},
        {"seed": 2**64},
        {"logprobs": 21},
        {"stop": ""},
        {"stop": ["a"] * 100},
        {"stop": {}},
        {"stop_token_ids": ["a"]},
        {"\ud800": 1},
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises((Refusal, InputError)) as caught:
        wanted_of(given, DEFAULT, 9)
    refusal = refusal_of(caught.value)
    (name,) = given
    assert isinstance(refusal, Refusal) and refusal.status_code == 400 and refusal.param == name
    assert name == "\ud800" or name in refusal.detail


def test_what_asks_for_nothing_passes() -> None:
    given = {"min_p": 0.0, "response_format": {"type": "text"}, "skip_special_tokens": True, "stream_options": None}
    given |= {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}
    assert wanted_of(given, DEFAULT, 9) == wanted_of({}, DEFAULT, 9)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_requests_nothing_passes_everywhere(value: Any) -> None:
    assert wanted_of({"unknown_field": value}, DEFAULT, 9) == wanted_of({}, DEFAULT, 9)
    for path, body in (
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"unknown_field": value}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"unknown_field": value}}),
    ):
        assert post(path, body | {"unknown_field": value}).status_code == 200
        for other in (0, True, "x"):
            assert post(path, body | {"unknown_field": other}).status_code == 400


NEUTRAL: list[dict[str, Any]] = [
    {"return_weight_versions": True},
    {"return_weight_versions": False},
    {"include_reasoning": True},
    {"return_prompt_text": False},
    {"skip_special_tokens": True},
    {"skip_special_tokens": False},
    {"skip_special_tokens": None},
    {"mm_payload": "none", "return_token_offsets": True},
    {"routed_experts_prompt_start": 0, "thinking_token_budget": -1, "truncation_side": "left"},
    {"stream_interval": 4, "session_id": "a", "seed": -1},
    {"add_special_tokens": True},
    {"echo": False},
    {"suffix": ""},
    {"modalities": ["text"]},
    {"reasoning_effort": "none"},
    {"function_call": "auto"},
    {"separate_reasoning": True, "stream_reasoning": True},
]


@pytest.mark.parametrize("given", NEUTRAL, ids=str)
def test_neutral_values_of_vllms_fields_pass(given: dict[str, Any]) -> None:
    assert post("/v1/completions", {"prompt": [1], **given}).status_code == 200
    body = {"messages": [{"role": "user", "content": "a"}], **given}
    assert post("/v1/chat/completions", body).status_code == 200
    if "return_weight_versions" in given:
        answer = post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, **given})
        assert answer.status_code == 200 and answer.json()["choices"][0]["weight_versions"]


def test_numbers_may_be_texts_as_in_vllm() -> None:
    engine = ScriptedQueue()
    given = {"max_tokens": "3", "temperature": "0.5", "top_k": 4.0, "seed": "7", "n": 2.0, "ignore_eos": "yes"}
    assert post("/v1/completions", {"prompt": [1], **given}, engine).status_code == 200
    samples = [sampling for _, sampling, _ in engine.submitted]
    assert [(one.max_tokens, one.temperature, one.top_k, one.ignore_eos) for one in samples] == [(3, 0.5, 4, True)] * 2
    for name in ("max_tokens", "temperature", "top_k", "seed", "n", "priority", "logprobs"):
        assert post("/v1/completions", {"prompt": [1], name: True}).status_code == 400


def test_seed_minus_one_is_no_seed() -> None:
    for path, body in (("/v1/completions", {"prompt": [1]}), ("/inference/v1/generate", {"token_ids": [1]})):
        engine, given = ScriptedQueue(), {"seed": -1}
        sent = body | (given if path == "/v1/completions" else {"sampling_params": given})
        assert post(path, sent, engine).status_code == 200
        assert engine.submitted[0][1].seed > 0


@pytest.mark.parametrize("name", ["include_reasoning", "enable_thinking", "do_sample"])
def test_false_that_would_change_the_answer_is_refused(name: str) -> None:
    assert post("/v1/completions", {"prompt": [1], name: False}).status_code == 400


@pytest.mark.parametrize(
    "given",
    [
        *({name: value} for name in ("watermarking", "return_prompt_text") for value in (True, 1)),
        *({name: ["a"]} for name in ("user", "cache_salt", "kv_transfer_params", "return_weight_versions")),
        *({"prompt_logprobs": value} for value in (5, "1", "yes", 2.5)),
        *({name: "x"} for name in ("stream", "ignore_eos", "skip_special_tokens", "max_tokens", "temperature")),
        {"thinking_token_budget": 8},
        {"routed_experts_prompt_start": 1},
        {"logprob_token_ids": [1]},
        {"reasoning_effort": "low"},
        {"modalities": ["audio"]},
        {"suffix": "x"},
        {"stop_token_ids": [1 << 20]},
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(given: dict[str, Any]) -> None:
    answer = post("/v1/completions", {"prompt": [1], **given})
    assert answer.status_code == 400 and next(iter(given)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_a_batch_have_its_seeds(size: int) -> None:
    prompts = [[at + 1, 7] for at in range(5)]

    def seeds(part: list[list[int]], **more: Any) -> list[int]:
        answer = post("/v1/completions", {"prompt": part, "n": 2, "seed": 3, "max_tokens": 1, **more}).json()
        return [choice["seed"] for choice in answer["choices"]]

    parts = (seeds(prompts[at : at + size], first_prompt=at) for at in range(0, 5, size))
    assert list(itertools.chain.from_iterable(parts)) == seeds(prompts)
    one = post("/v1/completions", {"prompt": [1], "n": 1, "seed": 3, "first_prompt": 4}).json()["choices"][0]
    assert one["seed"] == seeds(prompts)[8]
