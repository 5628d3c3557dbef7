"""The server over a run of the tiny model, with the clients that people use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import openai
import pytest
import schemathesis

from specactor_ray import Rollout, SamplingParams
from specactor_ray.rollout import verifiers
from tests.served import SETTINGS, Served
from tests.tiny import tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
HTTP = httpx.Client(timeout=250.0)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestOpenAI:
    def test_samples_have_the_seeds_and_tokens_of_a_rollout(self, rollout: Rollout, client: openai.OpenAI) -> None:
        prompts, sampling = tiny_prompts(2), SamplingParams(max_tokens=48, seed=11)
        expected = rollout.generate(prompts, sampling, n=3)
        ids = [list(expected[3 * at].prompt_token_ids) for at in range(2)]
        answer = client.completions.create(
            model="tiny", prompt=ids, n=3, max_tokens=48, seed=11, extra_body={"return_token_ids": True}
        )
        for choice, output in zip(answer.choices, expected, strict=True):
            assert tuple(choice.token_ids) == output.token_ids and choice.text == output.text
            assert choice.seed == output.sampling.seed and choice.finish_reason == output.finish_reason
        one = client.completions.create(model="tiny", prompt=ids[1], max_tokens=48, seed=expected[4].sampling.seed)
        assert one.choices[0].text == expected[4].text, "a choice can be asked for again by its seed"
        assert answer.usage and answer.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        first, second = (client.completions.create(model="tiny", prompt=ids[0], max_tokens=9).choices[0] for _ in "ab")
        assert first.seed != second.seed and max(first.seed, second.seed) < 2**53, "as JavaScript keeps it"

    def test_a_stream_is_the_whole_output(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "tiny", "messages": [{"role": "user", "content": tiny_prompts(5)[4]}], "n": 3}
        options |= {"seed": 9, "logprobs": True, "max_tokens": 60}
        whole = client.chat.completions.create(**options)
        texts, logprobs = dict[int, str](), dict[int, list[float]]()
        finished, usage = dict[int, str](), None
        for event in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.logprobs:
                    mine = logprobs.setdefault(choice.index, [])
                    mine += [one.logprob for one in choice.logprobs.content]
                finished[choice.index] = choice.finish_reason
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert logprobs[choice.index] == pytest.approx([one.logprob for one in choice.logprobs.content], abs=1e-4)
            assert finished[choice.index] == choice.finish_reason
        assert usage == whole.usage

    def test_tokens_are_sent_while_later_ones_are_computed(
        self, rollout: Rollout, server: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The output ends sooner than a poll that gathers steps. A pause holds it until its reader is there."""
        monkeypatch.setattr(verifiers, "_LINGER_S", 10.0)
        HTTP.post(f"{server.url}/pause?mode=keep").raise_for_status()
        body = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            wait_until(lambda: rollout.queue._thread._watched, "a reader")
            HTTP.post(f"{server.url}/resume").raise_for_status()
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        counts = [len(event["choices"][0]["token_ids"]) for event in events]
        assert sum(counts) == 300 and len(counts) > 10 and counts[0] < 30

    def test_log_probabilities_of_prompts(self, rollout: Rollout, server: Served) -> None:
        """An output that comes as a part of the prompt has the log-probabilities that it was sampled with."""
        (output,) = rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=12, seed=8, ignore_eos=True), n=1)
        prompt, begin = [1, 2, 3, *output.token_ids], 3
        expected = [pytest.approx(value, abs=1e-4) for value in output.logprobs]
        (scored,) = rollout.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=True), n=1)
        assert scored.prompt_logprobs is not None and list(scored.prompt_logprobs[begin - 1 :]) == expected
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
        answer = HTTP.post(f"{server.url}/inference/v1/generate", json=body).json()
        first, *others = answer["prompt_logprobs"]
        assert first is None and [int(token) for one in others for token in one] == prompt[1:]
        assert [value["logprob"] for one in others[begin - 1 :] for value in one.values()] == expected
        body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
        (choice,) = HTTP.post(f"{server.url}/v1/completions", json=body).json()["choices"]
        assert choice["logprobs"]["token_logprobs"][begin:] == expected
        (best,) = rollout.generate([prompt], SamplingParams(temperature=0, max_tokens=1), n=1)[0].token_ids
        text = tiny_prompts(1)[0]
        sent = [text, [*prompt, best], [*prompt, best ^ 1]]
        body |= {"prompt": sent, "temperature": 0, "max_tokens": 1, "seed": 1234}  # as lm-eval's local-completions
        choices = HTTP.post(f"{server.url}/v1/completions", json=body).json()["choices"]
        places, *others = (choice["logprobs"]["text_offset"] for choice in choices)
        offsets = server.service.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert (
            places == [*(begin for begin, _ in offsets), len(text)] and list(map(len, others)) == [len(prompt) + 2] * 2
        )
        reports = [choice["logprobs"] for choice in choices[1:]]
        greedy = [one["token_logprobs"][-2] == max(one["top_logprobs"][-2].values()) for one in reports]
        assert greedy == [True, False]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json=chat | {"return_token_ids": True}).json()
        assert [int(token) for one in answer["prompt_logprobs"][1:] for token in one] == answer["prompt_token_ids"][1:]
        body = {"prompt": [1, 2, 3], "max_tokens": 12, "seed": output.sampling.seed, "ignore_eos": True}
        body |= {"stop": [output.text[3:6]], "prompt_logprobs": 1}  # it ends the output before the engine does
        (choice,) = HTTP.post(f"{server.url}/v1/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "stop" and len(choice["prompt_logprobs"]) == 3

    def test_metrics_count_tokens_and_drafts(self, server: Served) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "stream": True}
        assert "[DONE]" in HTTP.post(f"{server.url}/v1/completions", json=body).text
        text = HTTP.get(f"{server.url}/metrics").text
        figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(figures['specactor_committed_tokens_total{actor="verifier-0"}']) > 0
        assert float(figures["specactor_time_to_first_token_seconds_count"]) > 0
        assert float(figures['specactor_drafter_tried_tokens_total{actor="verifier-0",method="suffix"}']) >= 0


def test_trls_own_client(rollout: Rollout, server: Served) -> None:
    pytest.importorskip("vllm")
    from trl.generation.vllm_client import VLLMClient

    client, texts, options = VLLMClient(base_url=server.url), tiny_prompts(2), {"generation_kwargs": {"seed": 5}}
    expected = rollout.generate(texts, SamplingParams(max_tokens=32, seed=5), n=2)
    prompts = [list(expected[2 * at].prompt_token_ids) for at in range(2)]
    done = client.generate(prompts, n=2, max_tokens=32, **options)
    assert done["prompt_ids"] == prompts
    assert done["completion_ids"] == [list(one.token_ids) for one in expected]
    assert [[value for (value,) in one] for one in done["logprobs"]] == [
        pytest.approx(one.logprobs, abs=1e-4) for one in expected
    ]
    assert [[token for (token,) in one] for one in done["logprob_token_ids"]] == done["completion_ids"]
    chat = client.chat([[{"role": "user", "content": texts[0]}]], n=2, max_tokens=32, **options)
    assert chat["completion_ids"] == done["completion_ids"][:2] and chat["prompt_ids"] == prompts[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_requests_of_a_client_that_leaves_end(rollout: Rollout, server: Served, stream: bool) -> None:
    """While a pause holds them, so that they do not end by themselves."""
    HTTP.post(f"{server.url}/pause?mode=keep").raise_for_status()
    body = json.dumps({"prompt": [1, 2, 3], "n": 4, "stream": stream, "max_tokens": 400, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: len(rollout.queue.running()) == 4, "four requests")
    wait_until(lambda: not rollout.queue.running(), "their end")
    HTTP.post(f"{server.url}/resume").raise_for_status()


def test_many_streams_at_once_while_equal_weights_replace_the_current_ones(server: Served) -> None:
    async def stream(http: httpx.AsyncClient, seed: int) -> str:
        body = {"prompt": [1, 2, 3], "max_tokens": 12, "seed": seed % 8, "stream": True, "ignore_eos": True}
        text = ""
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def push_weights(http: httpx.AsyncClient) -> str:
        for _ in range(3):
            answer = await http.post(f"{server.url}/update_weights", json={"weight_dir": str(tiny_target())})
            answer.raise_for_status()
        return ""

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=120.0) as http:
            return (await asyncio.gather(*(stream(http, seed) for seed in range(256)), push_weights(http)))[:-1]

    texts = asyncio.run(all_at_once())
    assert all(text == texts[seed % 8] for seed, text in enumerate(texts)) and len(set(texts)) == 8


@pytest.mark.filterwarnings("ignore")
def test_no_request_of_the_schema_is_a_defect(server: Served) -> None:
    """Bodies that fit the OpenAPI schema, and some that do not."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = Counter[int]()
    for operation in (one.ok() for one in schema.get_all_operations()):

        @hypothesis.settings(max_examples=20, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def send(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body = {**case.body, "model": "tiny", "max_tokens": 4}
            answer = case.call(base_url=server.url, timeout=250.0)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, answer.text

        send()
        for path in ("/wake_up", "/resume"):
            HTTP.post(f"{server.url}{path}").raise_for_status()
    assert statuses[200] > 50 and statuses[400] > 20


def test_sigterm_ends_the_command(rollout: Rollout, tmp_path: Path) -> None:
    settings = {**SETTINGS, "cluster": {"pin_cores": False, "address": rollout.address}}
    config = tmp_path / "serve.json"
    config.write_text(json.dumps(settings))
    key = "a-key-of-this-test"
    environment = {**os.environ, "SPECACTOR_API_KEY": key}
    command = [sys.executable, "-m", "specactor_ray", "serve", "--config", str(config), "--port", "0"]
    command += ["--model-name", "tiny"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(line for line in process.stderr if line.startswith("serving")).split()[3].rstrip(";")
        assert HTTP.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert HTTP.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        body = {"prompt": [1, 2, 3], "max_tokens": 8}
        assert HTTP.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(120) == 0, said
        assert "/v1/models: 401" in said and "ending the run" in said
    finally:
        process.kill()
        process.communicate()
