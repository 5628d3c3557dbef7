"""Dialects of trainers on a scripted engine: forms of answers, names, pauses, states."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import httpx
import pytest

from specactor_ray import __version__
from specactor_ray.actors.specs import ClusterView
from specactor_ray.rollout.dispatch import WeightPolicy
from tests.fakes.scripted_queue import ScriptedQueue, events, make_service, on, post

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
        assert post(TOKENS, tokens([1], max_tokens=2)).json()["choices"][0]["logprobs"] is None

    @pytest.mark.parametrize(
        ("given", "header", "session"),
        [
            ({}, "h", "h"),
            ({"session_id": "i"}, "h", "i"),
            ({"session_id": "i", "session": "s"}, "", "s"),
            ({}, "", None),
        ],
    )
    def test_sessions_have_vllms_names(self, given: dict[str, str], header: str, session: str | None) -> None:
        for path, body in ((TOKENS, tokens([5], max_tokens=1)), ("/v1/completions", {"prompt": [5], "max_tokens": 1})):
            engine = ScriptedQueue()
            assert post(path, body | given, engine, headers={"X-Session-ID": header} if header else {}).is_success
            assert engine.submitted[0][2]["session"] == session


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
        engine = ScriptedQueue()
        post(GENERATE, ids([1, 2, 3], max_new_tokens=4, sampling_seed=4), engine)
        seed = post(GENERATE, ids([1, 2, 3], max_new_tokens=4), engine).json()["meta_info"]["seed"]
        post(GENERATE, ids([1, 2, 3], max_new_tokens=4, sampling_seed=seed), engine)
        _, own, again = [sampling for _, sampling, _ in engine.submitted]
        assert own == again and own.first_position == 3

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
        engine = ScriptedQueue()
        letters = [engine.tokenizer(letter)["input_ids"][-1] for letter in "ab"]
        end = engine.tokenizer.eos_token_id
        engine.script, engine.finish_reason = lambda _prompt, _sampling: [*letters, end], "stop"
        answer = post(GENERATE, ids([1], max_new_tokens=9, **sampling), engine).json()
        assert answer["text"] == text.replace("<end>", engine.tokenizer.decode([end]))
        assert answer["output_ids"] == [*letters, end]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


def test_loads_and_aborts() -> None:
    engine = ScriptedQueue()
    engine.held = True
    service = make_service(engine)

    async def work(client: httpx.AsyncClient) -> list[Any]:
        waiting = [
            asyncio.ensure_future(client.post(GENERATE, json=ids([1]) | {"rid": "a"})),
            asyncio.ensure_future(client.post(TOKENS, json=tokens([1]) | {"request_id": "b"})),
        ]
        while len(engine.open) < 2:
            await asyncio.sleep(0)
        for path, body, left in (
            ("/abort_request", {"rid": "another"}, 2),
            ("/abort_request", {"rid": "a"}, 1),
            ("/abort_requests", {"request_ids": ["c", "d"]}, 1),
            ("/abort_requests", {"request_ids": ["c", "b"]}, 0),
            ("/abort_requests", {}, 0),
        ):
            assert (await client.post(path, json=body)).is_success
            (load,) = (await client.get("/v1/loads?include=core")).json()["loads"]
            assert load["num_running_reqs"] + load["num_waiting_reqs"] == left
        return [(await one).json() for one in waiting]

    ended, other = on(service, work)
    assert ended["meta_info"]["finish_reason"]["type"] == "abort" and ended["output_ids"] == []
    assert other["choices"][0]["finish_reason"] == "abort"


def test_without_verifiers_it_does_not_generate() -> None:
    service = make_service(ScriptedQueue())
    for verifiers, status in (({"verifier-0": None}, 200), ({}, 503)):
        service.rollout.view = lambda verifiers=verifiers: ClusterView(verifiers=verifiers)  # type: ignore[method-assign]
        assert on(service, lambda client: client.get("/health_generate")).status_code == status


class PausedQueue(ScriptedQueue):
    """An engine on which nothing runs when a pause begins."""

    def pause(self, policy: WeightPolicy) -> Future[None]:
        drained: Future[None] = Future()
        drained.set_result(None)
        return drained

    def resume(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_rejects_requests_or_lets_them_wait(mode: str) -> None:
    bodies = {
        "/v1/completions": {"prompt": [1]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        TOKENS: tokens([1]),
        GENERATE: ids([1]),
    }

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            assert (await client.post(f"/pause?mode={mode}")).is_success
            for path, body in bodies.items():
                answer = await client.post(path, json=body)
                assert answer.status_code == (200 if mode == "keep" else 503), "as in vLLM 0.33"
                if mode != "keep":
                    error = answer.json()["error"]
                    assert error["code"] == 503 and error["message"].startswith("engine_paused: ")
                    assert answer.headers["Retry-After"] == "1"
            assert (await client.post("/resume")).is_success
            assert (await client.post(TOKENS, json=tokens([1]))).is_success
        assert (await client.post(f"/pause?mode={mode}")).is_success
        assert (await client.post("/pause_generation", json={})).is_success
        assert (await client.post(GENERATE, json=ids([1]))).is_success, "the last pause counts; SGLang's lets all wait"

    on(make_service(PausedQueue()), work)


@pytest.mark.parametrize(("query", "ranks"), [("", 6), ("?include_dp=true", 6), ("?include_dp=false", 2)])
def test_ranks_of_all_verifiers_or_of_one(query: str, ranks: int) -> None:
    service = make_service(ScriptedQueue())
    service.rollout.config.target.replicas, service.rollout.config.target.gpus = 3, 2
    answer = on(service, lambda client: client.get(f"/get_world_size{query}"))
    assert answer.json() == {"world_size": ranks}


def test_state_in_vllms_form() -> None:
    async def work(client: httpx.AsyncClient) -> list[Any]:
        states = [(await client.get(path)).json() for path in ("/is_paused", "/is_sleeping", "/load", "/version")]
        for path in ("/pause?mode=keep", "/resume"):
            assert (await client.post(path)).is_success
            states.append((await client.get("/is_paused")).json())
        ping = await client.get("/ping")
        return [*states, {ping.status_code: ping.content}]

    still, paused = {"is_paused": False}, {"is_paused": True}
    found = on(make_service(PausedQueue()), work)
    version = {"version": __version__}
    assert found == [still, {"is_sleeping": False}, {"server_load": 0}, version, paused, still, {200: b""}]
