"""The server as the rollout engine of other trainers: their calls over HTTP, on a run of the tiny model over Ray.

No trainer's client can be installed beside this package, but for vLLM's; the others' calls are written out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from specactor_ray import Rollout, SamplingParams
from specactor_ray.models.loading import load_model
from specactor_ray.table.requests import TargetRequest
from tests.served import Served
from tests.tiny import tiny_prompt_ids, tiny_target
from tests.unit.engine_conformance import run
from tests.unit.target.test_hf_engine import load, make
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
PROMPTS = [list(one) for one in tiny_prompt_ids(3)]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=11)
LONG = {"max_tokens": 440, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=200) as client:
        yield client


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that the run began with, in a file of their own as prime-rl writes it: no configuration."""
    folder = tmp_path_factory.mktemp("old")
    shutil.copy(tiny_target() / "model.safetensors", folder)
    return folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those after a training step of a kind, as a whole checkpoint."""
    folder, noise = tmp_path_factory.mktemp("new"), torch.Generator().manual_seed(1)
    policy = load_model(str(tiny_target()))
    for weight in policy.parameters():
        if weight.dim() > 1:
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    policy.save_pretrained(folder)
    return folder


def plain(model: Path, sampling: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What plain decoding gives under this very seed."""
    engine = make(load(model), max_batch=8)
    for number, prompt in enumerate(prompts):
        engine.add(TargetRequest(str(number), tuple(prompt), sampling))
    tokens = run(engine).tokens
    return [list(tokens[str(number)]) for number in range(len(prompts))]


@pytest.fixture(scope="module")
def truth(new: Path) -> dict[str, list[list[int]]]:
    truth = {"old": plain(tiny_target(), SAMPLING), "new": plain(new, SAMPLING)}
    assert truth["old"] != truth["new"]
    return truth


def generated(client: httpx.Client) -> list[list[int]]:
    """Token ids of all prompts from vLLM's endpoint; SGLang's counts the positions of seeds in another way."""
    params = {"temperature": 1.0, "max_tokens": SAMPLING.max_tokens, "seed": SAMPLING.seed, "logprobs": 1}
    outputs = []
    for prompt in PROMPTS:
        body = {"model": "tiny", "token_ids": prompt, "sampling_params": params}
        (choice,) = sent(client, "/inference/v1/generate", body)["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        outputs.append(choice["token_ids"])
    return outputs


def sent(client: httpx.Client, path: str, body: Any = None, **params: Any) -> Any:
    answer = client.post(path, json=body, params=params)
    assert answer.is_success, answer.text
    return answer.json()


def got(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.is_success, answer.text
    return answer.json()


def push_by_prime_rl(client: httpx.Client, weights: Path, version: int) -> None:
    """`prime_rl.utils.client.update_weights`."""
    del version
    assert sent(client, "/pause", mode="keep", clear_cache="false") == {"status": "paused"}
    (weights / "NCCL_READY").touch()
    assert sent(client, "/update_weights", {"weight_dir": weights.as_posix()}) == {"status": "ok"}
    assert sent(client, "/resume") == {"status": "resumed"}


def push_by_slime(client: httpx.Client, weights: Path, version: int) -> None:
    """`RayTrainGroup._reload_rollout_weights_from_disk` through `SGLangEngine`."""
    sent(client, "/pause_generation", {})
    assert client.get("/flush_cache").status_code == 200
    answer = sent(client, "/update_weights_from_disk", {"model_path": str(weights), "weight_version": str(version)})
    assert answer["success"] is True
    sent(client, "/continue_generation", {})
    assert str(got(client, "/get_weight_version")["weight_version"]) == str(version)


versions = iter(range(100, 10_000))


@pytest.mark.parametrize("push", [push_by_prime_rl, push_by_slime])
def test_new_weights_change_the_tokens_and_the_old_ones_bring_them_back(
    client: httpx.Client, truth: dict[str, list[list[int]]], old: Path, new: Path, push: Any
) -> None:
    assert generated(client) == truth["old"]
    for weights, name in ((new, "new"), (old, "old")):
        push(client, weights, next(versions))
        assert generated(client) == truth[name]


def background(server: Served, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        async with httpx.AsyncClient(base_url=server.url, timeout=200) as client:
            return await work(client)

    return asyncio.run(body())


async def until(client: httpx.AsyncClient, is_so: Callable[[dict[str, Any]], bool]) -> None:
    """Wait for a number of requests."""
    while not is_so((await client.get("/v1/loads?include=core")).json()["loads"][0]):
        await asyncio.sleep(0.01)


async def begun(client: httpx.AsyncClient, requests: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until one of the requests runs, or has ended."""
    await until(client, lambda load: bool(load["num_running_reqs"]) or any(one.done() for one in requests))


def waiting(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda load: bool(load["num_waiting_reqs"] == number)


class TestPauses:
    def test_requests_continue_with_the_new_weights(self, server: Served, old: Path, new: Path) -> None:
        """One that runs behind what it has, one that waits from the beginning."""
        body = {"token_ids": PROMPTS[0], "sampling_params": {**LONG, "seed": 5}}

        async def work(client: httpx.AsyncClient) -> list[dict[str, Any]]:
            started = asyncio.Event()
            running = asyncio.ensure_future(streamed(client, started))
            await started.wait()
            assert (await client.post("/pause?mode=keep")).is_success
            held = asyncio.ensure_future(client.post("/inference/v1/generate", json=body))
            await until(client, waiting(1))
            for path, more in (
                ("/update_weights", {"json": {"weight_dir": str(new)}}),
                ("/update_weight_version", {"json": {"new_version": "in flight"}}),
                ("/resume", {}),
            ):
                assert (await client.post(path, **more)).is_success
            return [await running, (await held).json()["choices"][0]]

        async def streamed(client: httpx.AsyncClient, started: asyncio.Event) -> dict[str, Any]:
            params = {"max_new_tokens": LONG["max_tokens"], "sampling_seed": 5, "first_position": 0}
            params |= {"ignore_eos": True, "temperature": 1.0}
            sent, event = {"input_ids": PROMPTS[0], "sampling_params": params, "stream": True}, dict[str, Any]()
            async with client.stream("POST", "/generate", json=sent) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        started.set()
            return {"token_ids": event["output_ids"], **event["meta_info"]}

        sampling = SamplingParams(seed=5, **LONG)
        after = plain(new, sampling, PROMPTS[:1])[0]
        ran, waited = background(server, work)
        assert waited["token_ids"] == after
        assert waited["weight_versions"] == [{"version": "in flight", "start": 0, "end": len(after)}]
        tokens, spans = ran["token_ids"], ran["weight_versions"]
        assert [span["start"] for span in spans] + [len(tokens)] == [0] + [span["end"] for span in spans]
        assert [span["version"] == "in flight" for span in spans] in ([False, True], [False])  # or it had ended
        for start, end, version in [(span["start"], span["end"], span["version"]) for span in spans]:
            rest = replace(sampling, first_position=start, max_tokens=sampling.max_tokens - start)
            model = new if version == "in flight" else tiny_target()
            assert tokens[start:end] == plain(model, rest, [PROMPTS[0] + tokens[:start]])[0][: end - start]
        with httpx.Client(base_url=server.url, timeout=200) as client:
            push_by_prime_rl(client, old, 0)
            sent(client, "/update_weight_version", {"new_version": "0"})


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Directory and what an error says of it."""
    root, tensors = tmp_path_factory.mktemp("bad"), load_file(tiny_target() / "model.safetensors")
    first = next(iter(tensors))
    shaped = {**tensors, first: tensors[first][:, 1:].contiguous()}
    whole = {name: tensor for name, tensor in tensors.items() if name != first}
    for name, content in (("shape", shaped), ("missing", whole)):
        (root / name).mkdir()
        save_file(content, root / name / "model.safetensors")
    return [(root / "nowhere", "no directory"), (root / "shape", first), (root / "missing", first)]


def test_refused_weights_are_named_and_change_nothing(
    client: httpx.Client, bad: list[tuple[Path, str]], truth: dict[str, list[list[int]]]
) -> None:
    version = got(client, "/get_weight_version")
    for folder, named in bad:
        for path, body in (
            ("/update_weights", {"update_info": {"weight_dir": str(folder)}}),
            ("/update_weights_from_disk", {"model_path": str(folder)}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["success"] is False
            assert named.lower() in answer.json()["error"]["message"].lower()
    assert generated(client) == truth["old"]
    assert got(client, "/get_weight_version") == version


def test_sleep(server: Served, client: httpx.Client, truth: dict[str, list[list[int]]]) -> None:
    async def work(other: httpx.AsyncClient) -> str:
        body = {"token_ids": PROMPTS[1], "sampling_params": {**LONG, "seed": 1}}
        output = asyncio.ensure_future(other.post("/inference/v1/generate", json=body))
        await begun(other, [output])
        assert (await other.post("/sleep?level=1")).is_success
        return str((await output).json()["choices"][0]["finish_reason"])

    assert background(server, work) in ("abort", "length")
    refused = client.post("/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}})
    assert refused.status_code == 503 and "wake_up" in refused.json()["error"]["message"]
    sent(client, "/sleep")
    assert sent(client, "/wake_up", tags=["weights"])["tags"] == ["weights"]
    sent(client, "/wake_up")
    assert generated(client) == truth["old"]


def test_skyrls_client(client: httpx.Client, rollout: Rollout) -> None:
    """`RemoteInferenceClient`: generate, pause, resume, the rest of its control plane."""
    params = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 24}
    params |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None, "seed": 11}
    body = {"sampling_params": params, "model": "tiny", "token_ids": PROMPTS[0], "cache_salt": "0"}
    headers = {"X-Session-ID": "trajectory-1"}
    answer = client.post("/inference/v1/generate", json=body, headers=headers).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == plain(tiny_target(), SAMPLING, PROMPTS[:1])[0]
    assert len([info["logprob"] for info in choice["logprobs"]["content"]]) == len(choice["token_ids"])
    text = sent(client, "/detokenize", {"model": "tiny", "tokens": choice["token_ids"]})["prompt"]
    assert text == rollout.queue.tokenizer.decode(choice["token_ids"])
    samples = sent(client, "/inference/v1/generate", {**body, "sampling_params": {**params, "n": 3, "output_kind": 2}})
    assert len(samples["choices"]) == 3

    assert client.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    for path, options in (
        ("/pause", {"params": {"mode": "keep", "clear_cache": "false"}}),
        ("/reset_prefix_cache", {"json": {"reset_running_requests": True}}),
        ("/resume", {}),
        ("/sleep", {"params": {"level": "2"}}),
        ("/wake_up", {"params": {"tags": ["weights"]}}),
        ("/wake_up", {"params": {"tags": ["kv_cache"]}}),
        ("/finish_session", {"params": {"session_id": "trajectory-1"}}),
    ):
        answer = client.post(path, **options)  # type: ignore[arg-type]
        assert answer.is_success and answer.json(), path
    for path, refused in (
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}),
        ("/fetch_weights", {"target_version": 1}),
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ):
        answer = client.post(path, json=refused)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(path)


def test_prime_rls_client(client: httpx.Client) -> None:
    """`renderers.client.generate`, as its train client calls it, and the checks of its admin clients."""
    assert client.get("/health").is_success
    card = next(model for model in got(client, "/v1/models")["data"] if model["id"] == "tiny")
    assert card["max_model_len"] > 0
    params = {"temperature": 1.0, "max_tokens": 24, "seed": 11, "stop_token_ids": [2], "skip_special_tokens": False}
    more = {"flat_logprobs": True, "extra_args": {"prl_compact_logprobs": True}, "detokenize": False}
    body = {"model": "tiny", "token_ids": PROMPTS[0], "cache_salt": "4", "priority": -1}
    for logprobs in ({"logprobs": 1}, {"logprobs": 5, **more}):
        answer = sent(client, "/inference/v1/generate", {**body, "sampling_params": {**params, **logprobs}})
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        for one in content if logprobs["logprobs"] == 5 else ():
            ranked = {other["token"]: other["logprob"] for other in one["top_logprobs"]}
            assert len(ranked) == len(one["top_logprobs"]) >= 5 and ranked[one["token"]] == one["logprob"]
            assert all(logprob <= 1e-6 for logprob in ranked.values())


def test_slimes_external_engine(client: httpx.Client) -> None:
    """`slime.backends.sglang_utils.external` and `SGLangEngine._init_external`, miles's beside it."""
    url = str(client.base_url).rstrip("/")
    assert client.get("/health_generate").status_code == 200 and client.get("/flush_cache").status_code == 200
    info = got(client, "/server_info")
    assert int(info["tp_size"]) * int(info["pp_size"]) == 1 and int(info["num_gpus"]) == 1
    assert info.get("disaggregation_mode") not in ("prefill", "decode") and not info.get("encoder_only")
    assert info["enable_memory_saver"] is False
    assert client.post("/workers", json={"url": url, "worker_type": "regular"}).is_success
    assert [worker["url"] for worker in got(client, "/workers")["workers"]] == [url]


@needs_vllm
def test_vllms_own_client(client: httpx.Client, truth: dict[str, list[list[int]]], old: Path, new: Path) -> None:
    """In a process of its own: vLLM is not imported beside Ray's tests."""
    script = """if True:
        import sys
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        client = HTTPVLLMWeightSyncClient(sys.argv[1])
        for line in sys.stdin:
            weights, version = line.split()
            client.start_weight_update()
            client.update_weights({"weight_dir": weights})
            client.finish_weight_update(version)
            print("done", flush=True)
    """
    command = [sys.executable, "-c", script, str(client.base_url)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as theirs:
        assert theirs.stdin is not None and theirs.stdout is not None
        for weights, name in ((new, "new"), (old, "old")):
            theirs.stdin.write(f"{weights} {next(versions)}\n")
            theirs.stdin.flush()
            assert "done\n" in iter(theirs.stdout.readline, "")
            assert generated(client) == truth[name]
        theirs.stdin.close()
        assert theirs.wait(120.0) == 0
