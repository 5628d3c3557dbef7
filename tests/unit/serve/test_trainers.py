"""Dialects of trainers on a scripted engine: forms of answers, what is refused and how."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import pytest

from specactor_ray.serve import control
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_engine import ScriptedEngine, events, make_service, on, post
from tests.tiny import VOCAB_SIZE

TOKENS, GENERATE = "/inference/v1/generate", "/generate"


def tokens(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": sampling}


def ids(prompt: Any, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": sampling}


class TestTokens:
    def test_answer(self) -> None:
        body = tokens([1, 2, 3], max_tokens=5, seed=4, logprobs=1) | {"request_id": "mine", "return_token_ids": True}
        answer = post(TOKENS, body).json()
        assert answer["request_id"] == "mine" and answer["prompt_token_ids"] == [1, 2, 3]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [14, 15, 16, 17, 18] and choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 5}] and choice["seed"] == 4
        first = choice["logprobs"]["content"][0]
        assert first == {"token": "token_id:14", "token_id": 14, "logprob": -0.5, "top_logprobs": []}

    def test_without_logprobs_there_are_none(self) -> None:
        assert post(TOKENS, tokens([1], max_tokens=2)).json()["choices"][0]["logprobs"] is None

    def test_what_changes_no_token_is_taken(self) -> None:
        """SkyRL's parameters (`get_vllm_sampling_params`), and those of prime-rl's renderer client."""
        skyrl = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 4}
        skyrl |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None}
        prime = {"max_tokens": 4, "stop_token_ids": [0, 2], "logprobs": 1, "skip_special_tokens": False}
        prime |= {"extra_args": {"prl_compact_logprobs": True}, "flat_logprobs": True, "detokenize": False}
        for sampling, more in ((skyrl, {"model": "tiny"}), (prime, {"cache_salt": "3", "priority": -2})):
            engine = ScriptedEngine()
            answer = post(TOKENS, tokens([5], **sampling) | more, engine, headers={"X-Session-ID": "s"})
            assert answer.is_success, answer.text
            assert engine.submitted[0][2] == {"session": "s", "priority": more.get("priority", 0)}

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"output_mode": "text"}, "output_mode"),
            ({"stream": True}, "stream"),
            ({"features": {"mm_hashes": {}}}, "features"),
            ({"content_parts": [{}]}, "content_parts"),
            ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
            ({"token_ids": []}, "prompt"),
            ({"token_ids": [VOCAB_SIZE]}, "prompt"),
            ({"token_ids": [-1]}, "token_ids.0"),
            ({"token_ids": [1.5]}, "token_ids.0"),
            ({"token_ids": "a"}, "token_ids"),
            ({"token_ids": [1] * 600}, "prompt"),
            ({"sampling_params": None}, "sampling_params"),
            ({"model": "another"}, "model"),
        ],
    )
    def test_bad_requests(self, more: dict[str, Any], param: str) -> None:
        answer = post(TOKENS, tokens([1], max_tokens=2) | more)
        assert answer.status_code == (404 if param == "model" else 400)
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("name", "value"), [("top_p", 2.0), ("min_p", 0.1), ("n", 0), ("unheard_of", 1)])
@pytest.mark.parametrize("path", [TOKENS, GENERATE])
def test_what_would_change_sampling_is_refused_by_name(path: str, name: str, value: Any) -> None:
    make = tokens if path == TOKENS else ids
    answer = post(path, make([1], **{name: value}))
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [TOKENS, GENERATE, "/abort_request", "/update_weights", "/update_weights_from_disk"],
)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b"null", b'{"a": NaN}'])
def test_what_is_no_request_is_refused(path: str, body: bytes) -> None:
    answer = post(path, body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


class TestGenerate:
    def test_answer(self) -> None:
        answer = post(
            GENERATE, ids([1, 2, 3], max_new_tokens=4, sampling_seed=4) | {"return_logprob": True, "rid": "r"}
        )
        meta = answer.json()["meta_info"]
        assert answer.json()["output_ids"] == [14, 15, 16, 17]
        assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in (14, 15, 16, 17)]
        assert meta["finish_reason"] == {"type": "length", "length": 4} and meta["id"] == "r"
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 4, "0")

    def test_a_seed_counts_positions_of_the_whole_text(self) -> None:
        engine = ScriptedEngine()
        post(GENERATE, ids([1, 2, 3], max_new_tokens=4, sampling_seed=4), engine)
        post(GENERATE, ids([1, 2, 3], max_new_tokens=4), engine)
        assert [sampling.first_position for _, sampling, _ in engine.submitted] == [3, 0]

    def test_a_stream_repeats_what_came_before(self) -> None:
        body = ids([1], max_new_tokens=8, sampling_seed=1) | {"return_logprob": True}
        streamed = events(post(GENERATE, body | {"stream": True}))
        whole = post(GENERATE, body).json()
        assert len(streamed) > 1
        for one, following in pairwise(streamed):
            assert following["text"].startswith(one["text"])
            assert following["output_ids"][: len(one["output_ids"])] == one["output_ids"]
            assert one["meta_info"]["finish_reason"] is None
        streamed[-1]["meta_info"]["id"] = whole["meta_info"]["id"]
        assert streamed[-1] == whole

    @pytest.mark.parametrize(
        ("sampling", "text"),
        [
            ({}, "ab"),
            ({"no_stop_trim": True}, "ab"),
            ({"skip_special_tokens": False}, "ab"),
            ({"skip_special_tokens": False, "no_stop_trim": True}, "ab<end>"),
        ],
    )
    def test_text_is_sglangs(self, sampling: dict[str, Any], text: str) -> None:
        engine = ScriptedEngine()
        letters = [engine.tokenizer(letter)["input_ids"][-1] for letter in "ab"]
        end = engine.tokenizer.eos_token_id
        engine.script, engine.finish_reason = lambda _prompt, _sampling: [*letters, end], "stop"
        answer = post(GENERATE, ids([1], max_new_tokens=9, **sampling), engine).json()
        assert answer["text"] == text.replace("<end>", engine.tokenizer.decode([end]))
        assert answer["output_ids"] == [*letters, end]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}

    @pytest.mark.parametrize(
        ("body", "named"),
        [
            ({}, "input_ids"),
            ({"text": "a", "input_ids": [1]}, "input_ids"),
            (ids([]), "no tokens"),
            (ids([VOCAB_SIZE]), "token id"),
            (ids([[1], [2]]), "input_ids.0"),
            (ids([1], n=2), "a request for each sample"),
            (ids([1]) | {"image_data": ["x"]}, "image_data"),
            (ids([1]) | {"lora_path": "x"}, "lora_path"),
            (ids([1]) | {"return_routed_experts": True}, "return_routed_experts"),
            (ids([1]) | {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
            (ids([1], custom_params={"return_top_p_token_ids": True}), "custom_params"),
            (ids([1], json_schema="{}"), "json_schema"),
        ],
    )
    def test_bad_requests(self, body: dict[str, Any], named: str) -> None:
        answer = post(GENERATE, body)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"] and answer.json()["success"] is False


class TestControl:
    @pytest.mark.parametrize(
        ("path", "named"),
        [
            ("/init_weight_transfer_engine", "weight_dir"),
            ("/collective_rpc", "weight_dir"),
            ("/fetch_weights", "weight_dir"),
            ("/init_broadcaster", "filesystem"),
            ("/v1/load_lora_adapter", "merge"),
            ("/update_weights_from_distributed", "disk"),
            ("/pull_weights", "local-checkpoint-dir"),
        ],
    )
    def test_what_is_not_there_is_named_with_what_is(self, path: str, named: str) -> None:
        answer = post(path, {"anything": [1]})
        assert answer.status_code == 400
        assert path in answer.json()["error"]["message"] and named in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            ("/pause?mode=later", None, "mode"),
            ("/sleep?mode=later", None, "mode"),
            ("/sleep?level=0", None, "level"),
            ("/pause_generation", {"mode": "later"}, "mode"),
            ("/update_weights", {}, "update_info"),
            ("/update_weights", {"weight_dir": None}, "NCCL"),
            ("/update_weights", {"weight_dir": 5}, "weight_dir"),
            ("/update_weights", {"weight_dir": "~nobody/x"}, "weight_dir"),
            ("/update_weights", {"weight_dir": "a\0b"}, "weight_dir"),
            ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "names"),
            ("/finish_weight_update", {"weight_version": -1}, "weight_version"),
            ("/update_weight_version", {}, "new_version"),
            ("/update_weights_from_disk", {}, "model_path"),
            ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}, "load_format"),
            ("/update_weights_from_disk", {"model_path": "x", "weight_version": 1.5}, "weight_version"),
            ("/abort_request", {}, "rid"),
            ("/workers", {"url": "http://elsewhere:1"}, "http://localhost"),
            ("/workers", {}, "url"),
        ],
    )
    def test_bad_requests(self, path: str, body: Any, named: str) -> None:
        answer = post(path, body)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"] or named in str(answer.json()["error"].get("param"))

    def test_a_worker_is_the_server_itself(self) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            (worker,) = (await client.get("/workers")).json()["workers"]
            assert worker["url"] == "http://localhost"
            assert (await client.post("/workers", json={"url": "http://localhost/"})).is_success

        on(make_service(ScriptedEngine()), work)

    def test_loads_and_aborts(self) -> None:
        engine = ScriptedEngine()
        engine.held = True
        service = make_service(engine)

        async def work(client: httpx.AsyncClient) -> list[Any]:
            waiting = [
                asyncio.ensure_future(client.post(GENERATE, json=ids([1]) | {"rid": "a"})),
                asyncio.ensure_future(client.post(TOKENS, json=tokens([1]) | {"request_id": "b"})),
            ]
            while len(engine.running) < 2:
                await asyncio.sleep(0)
            for path, body, left in (
                ("/abort_request", {"rid": "another"}, 2),
                ("/abort_request", {"rid": "a"}, 1),
                ("/abort_request", {"rid": "b"}, 0),
            ):
                assert (await client.post(path, json=body)).is_success
                (load,) = (await client.get("/v1/loads?include=core")).json()["loads"]
                assert load["num_running_reqs"] + load["num_waiting_reqs"] == left
            return [(await one).json() for one in waiting]

        ended, other = on(service, work)
        assert ended["meta_info"]["finish_reason"]["type"] == "abort" and ended["output_ids"] == []
        assert other["choices"][0]["finish_reason"] == "abort"

    def test_they_are_reached_while_all_requests_that_may_be_open_wait(self) -> None:
        engine = ScriptedEngine()
        engine.held = True
        service = make_service(engine, Limits(max_requests=2))

        async def work(client: httpx.AsyncClient) -> None:
            waiting = [asyncio.ensure_future(client.post(TOKENS, json=tokens([1]))) for _ in range(2)]
            while len(engine.running) < 2:
                await asyncio.sleep(0)
            assert (await client.post(TOKENS, json=tokens([1]))).status_code == 429
            assert (await client.post("/resume")).is_success
            assert (await client.post("/abort_request", json={"abort_all": True})).is_success
            await asyncio.gather(*waiting)

        on(service, work)

    @pytest.mark.parametrize("path", ["/health_generate", "/liveness"])
    def test_an_engine_that_commits_nothing_is_not_live(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_LIVE_S", 0.3)
        engine = ScriptedEngine()
        service = make_service(engine)

        async def both(client: httpx.AsyncClient) -> set[int]:
            return {answer.status_code for answer in await asyncio.gather(client.get(path), client.get(path))}

        assert on(service, both) == {200}
        engine.held = True
        assert on(service, both) == {503} and not engine.running

    def test_server_info_holds_vllms_and_sglangs_fields(self) -> None:
        info = on(make_service(ScriptedEngine()), lambda client: client.get("/server_info?config_format=json")).json()
        assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert (info["tp_size"], info["num_gpus"], info["enable_memory_saver"]) == (1, 1, False)
