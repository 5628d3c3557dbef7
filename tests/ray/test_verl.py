"""verl's own servers, clients, agent loops and weight updates, unmodified: the tokens are those of plain decoding."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from specactor_ray import Rollout, SamplingParams
from specactor_ray.actors.process import put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.methods import import_named
from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.upstream import VERL
from specactor_ray.integrations.verl_server import Seeds, VerlServer
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.trainer.rewards import RewardSample, Scorer
from tests.contract import lacking
from tests.tiny import tiny_prompts, tiny_target

try:
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "specactor_ray.integrations.verl"  # also of the actors
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
except Exception as error:  # noqa: BLE001 - hydra raises a bare one beside another version of omegaconf
    pytest.skip(f"verl cannot be imported ({error}); scripts/test-verl installs it", allow_module_level=True)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT, RESPONSE, LENGTH = 48, 32, 448
SEED = 11
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
SAMPLED = {**GREEDY, "temperature": 1.0}
PARTS = {
    "verl.workers.rollout.replica.RolloutReplica": (
        *("__init__(replica_rank, config, model_config)", "init_standalone", "init_colocated(resource_pool)"),
        *("launch_servers", "get_ray_class_with_init_args", "is_reward_model", "is_teacher_model"),
        *("rollout_mode", "workers", "servers", "_server_address", "_server_handle", "max_concurrency"),
    ),
    "verl.workers.rollout.replica": (
        *("RolloutMode.STANDALONE", "RolloutMode.HYBRID", "RolloutReplicaRegistry.register(name, loader)"),
        *(f"TokenOutput.{name}" for name in ("token_ids", "log_probs", "stop_reason", "extra_fields")),
    ),
    "verl.workers.rollout.base.BaseRollout": (
        *("__init__(config, model_config, device_mesh)", "resume(tags)", "release"),
        "update_weights(weights)",
    ),
    "verl.checkpoint_engine.base": ("CheckpointEngineRegistry.register(backend)",),
    "verl.checkpoint_engine.base.CheckpointEngine": (
        *("prepare", "build_topology", "init_process_group", "finalize", "send_weights(weights)"),
        *("receive_weights", "wire_format"),
    ),
    "verl.single_controller.ray": (
        "RayResourcePool.__init__(process_on_nodes, use_gpu, max_colocate_count)",
        "RayWorkerGroup.__init__(resource_pool, ray_cls_with_init, bin_pack)",
    ),
}
"""Everything of verl that is used beside what is imported."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=12, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_rewards_are_those_of_verl() -> None:
    """Its own function, as it is, for rows of its data."""
    name = "verl.utils.reward_score:default_compute_score"
    compute, score = import_named(name, ""), Scorer(RewardConfig([RewardFunctionConfig(name)])).score
    for text, truth in itertools.product(("so #### 72", "72", "#### 71", "#### 1,072"), ("72", "1072")):
        columns = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": truth}, "extra_info": {"index": 1}}
        sample = RewardSample([{"role": "user", "content": "?"}], text, None, columns)
        assert score(sample).reward == compute("openai/gsm8k", text, truth)


def test_the_installed_version_has_every_part() -> None:
    assert VERL.lacking() == "" and lacking(PARTS) == []


def configured(ours: Sequence[str] = (), **rollout: Any) -> Any:
    """verl's configuration of a PPO run, with one replica of ours."""
    settings = {
        "name": "specactor",
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "tensor_model_parallel_size": 1,
        "agent.num_workers": 1,
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "max_model_len": LENGTH,
        "dtype": "float32",
        "calculate_log_probs": True,
        "seed": SEED,
        "checkpoint_engine.backend": "specactor",
        **rollout,
    }
    own = ["target={kv_cache_gb: 0.05, max_batch: 4}", "cluster={pin_cores: false}", *ours]
    section = "actor_rollout_ref.rollout"
    overrides = [f"actor_rollout_ref.model.path={tiny_target()}"]
    overrides += [f"{section}.{key}={value}" for key, value in settings.items()]
    overrides += [f"+{section}.engine_kwargs.specactor.{item}" for item in own]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


DRAFTING = ("drafters=[{method: suffix}]", "speculation={verify: all}")


@pytest.fixture(scope="module")
def manager() -> Any:
    return LLMServerManager.create(configured(DRAFTING))


@pytest.fixture(scope="module")
def server(manager: Any) -> Any:
    return manager.server_handles[0]


@pytest.fixture(scope="module")
def local() -> Iterator[VerlServer]:
    """A server in this process whose rollout decodes plainly and gives up its memory."""
    config = omega_conf_to_dataclass(configured(["mode=plain"]).actor_rollout_ref.rollout)
    server = VerlServer(config, str(tiny_target()), False, replica_rank=1, sleeps=True)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.close())


@pytest.fixture(scope="module")
def plain(local: VerlServer) -> Rollout:
    return local._rollout


def ids(number: int) -> list[int]:
    """Token ids of a prompt, as verl's agent loops make them."""
    messages = [{"role": "user", "content": tiny_prompts(number + 1)[number]}]
    encoded: Any = load_tokenizer(str(tiny_target())).apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])


def truth(plain: Rollout, prompt: list[int], seed: int, **more: Any) -> list[int]:
    """What plain decoding gives."""
    sampling = SamplingParams(seed=seed, first_position=len(prompt), **{"max_tokens": RESPONSE, **more})
    return list(plain.queue.submit(prompt, sampling).result(120.0).token_ids)


def ask(server: Any, prompt: list[int], sampling: Mapping[str, Any], **more: Any) -> Any:
    return server.generate.remote(prompt_ids=prompt, sampling_params=dict(sampling), request_id="r", **more)


def test_agent_loops_generate_what_plain_decoding_generates(manager: Any, server: Any, plain: Rollout) -> None:
    ray.get(server.set_global_steps.remote(1))
    loops = AgentLoopManager.create(manager.config, manager.get_client())
    asked = np.empty(6, dtype=object)
    asked[:] = [[{"role": "user", "content": text}] for text in tiny_prompts(3) for _ in range(2)]
    done = loops.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt": asked}))
    rows = zip(done.batch["responses"], done.batch["response_mask"], strict=True)
    outputs = [row[mask.bool()].tolist() for row, mask in rows]
    seeds = Seeds(SEED, 0)
    seeds.begin_step(1)
    for number in range(3):
        prompt = ids(number)
        expected = [truth(plain, prompt, seeds.take(prompt)) for _ in range(2)]
        assert sorted(outputs[2 * number : 2 * number + 2]) == sorted(expected) and expected[0] != expected[1]
    assert done.batch["rollout_log_probs"][0].min() < 0
    assert set(done.non_tensor_batch["max_global_steps"]) == {1}
    drafted, accepted = (sum(done.non_tensor_batch[f"spec_num_{name}_tokens"]) for name in ("draft", "accepted"))
    assert drafted > 0 and 0 <= accepted <= drafted


def test_verls_client_continues_what_was_aborted(manager: Any, server: Any, plain: Rollout) -> None:
    """With the undisturbed tokens: samples of one prompt keep their seeds apart, under new names after every abort."""
    ray.get(server.set_global_steps.remote(200))
    prompt, most, count = ids(1), 380, 3
    client = manager.get_client(FullyAsyncLLMServerClient)
    asked = {**SAMPLED, "ignore_eos": True, "max_tokens": most}

    async def run() -> list[Any]:
        tasks = [client.generate(str(one), prompt_ids=prompt, sampling_params=dict(asked)) for one in range(count)]
        outputs, delay_s = asyncio.gather(*tasks), 0.01
        while not outputs.done():
            await asyncio.sleep(delay_s)
            await server.abort_all_requests.remote()
            await server.resume_generation.remote()
            delay_s *= 2
        return await outputs

    outputs = asyncio.run(run())
    seeds = Seeds(SEED, 0)
    seeds.begin_step(200)
    expected = [truth(plain, prompt, seeds.take(prompt), max_tokens=most, ignore_eos=True) for _ in range(count)]
    assert sorted(output.token_ids for output in outputs) == sorted(expected)
    assert all(len(output.log_probs) == most for output in outputs)


def test_a_server_that_leaves_refuses_and_one_that_pauses_lets_wait(server: Any) -> None:
    ray.get(server.abort_all_requests.remote(reject_request=True))
    refused = ray.get(ask(server, ids(0), GREEDY))
    assert refused.stop_reason == "aborted" and not refused.token_ids
    ray.get(server.abort_all_requests.remote())
    waiting = ask(server, ids(0), GREEDY)
    assert not ray.wait([waiting], timeout=0.5)[0]
    ray.get(server.resume_generation.remote())
    assert ray.get(waiting).token_ids


class Trainer(Worker):  # type: ignore[misc]
    """A trainer apart from its rollouts, with the methods that verl's manager calls."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = CheckpointEngineRegistry.new("specactor", bucket_size=1 << 20, is_master=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> None:
        await self.engine.send_weights(weights(2.0), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *arguments: Any, **more: Any) -> Any:
        return getattr(self.engine, method)(*arguments, **more)


def weights(scale: float) -> Iterator[tuple[str, Any]]:
    """The tiny model's, those of its head times a factor."""
    for name, tensor in load_model(str(tiny_target())).named_parameters():
        yield name, tensor.detach() * (scale if name == "lm_head.weight" else 1.0)


def test_weights_change_tokens_and_back(manager: Any, server: Any, local: VerlServer, plain: Rollout) -> None:
    prompt, asked = ids(2), {**SAMPLED, "seed": 5}
    before = ray.get(ask(server, prompt, asked))
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    trainer = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Trainer)), use_gpu=False, device_name="cpu")
    config = omega_conf_to_dataclass(manager.config.actor_rollout_ref.rollout)
    CheckpointEngineManager(config.checkpoint_engine, trainer, manager.get_replicas()).update_weights(global_steps=300)
    after = ray.get(ask(server, prompt, asked))
    plain.update_weights(weights(2.0))
    assert after.token_ids == truth(plain, prompt, 5) != before.token_ids
    assert after.extra_fields["global_steps"] == 300

    os.environ["RANK"] = "0"  # as a rank of a trainer that shares its processes with the rollout
    model = omega_conf_to_dataclass(manager.config.actor_rollout_ref.model)
    adapter = get_rollout_class("specactor")(config, model, None)
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        asyncio.run(adapter.update_weights(pair for pair in weights(1.0) if pair[0] != "lm_head.weight"))
    asyncio.run(adapter.update_weights(weights(1.0), global_steps=301, peft_config=None, base_sync_done=True))
    again = ray.get(ask(server, prompt, asked))
    assert again.token_ids == before.token_ids and again.extra_fields["global_steps"] == 301
    with pytest.raises(InputError, match="adapter"):
        asyncio.run(adapter.update_weights(weights(1.0), peft_config={"r": 8}))


def test_sleep_and_wake(local: VerlServer, plain: Rollout) -> None:
    """Weights that come in between are taken."""

    async def run() -> list[Any]:
        asked = {**SAMPLED, "seed": 5}
        first = await local.generate(ids(0), asked, "a")
        await local.sleep()
        await local.wake_up(["weights"])
        await local.release_kv_cache()
        layout = await local.weight_layout()
        weight_set = put_weights(1, layout.buckets(weights(1.0)), Calls(), layout=layout)
        await local.update_weights(weight_set, global_steps=9)
        await local.wake_up(["kv_cache"])
        return [first, await local.generate(ids(0), asked, "b")]

    plain.update_weights(weights(1.0))
    first, second = asyncio.run(run())
    assert first.token_ids == second.token_ids and second.extra_fields["min_global_steps"] == 9


def test_what_cannot_be_is_refused_by_name(server: Any) -> None:
    with pytest.raises(InputError, match="image_data"):
        ray.get(ask(server, ids(0), GREEDY, image_data=["image"]))
    with pytest.raises(InputError, match=r"sampling_params\.min_p=0\.2"):
        ray.get(ask(server, ids(0), {**GREEDY, "min_p": 0.2}))
    with pytest.raises(ConfigError, match=r"rollout\.enable_rollout_routing_replay: "):
        LLMServerManager.create(configured(enable_rollout_routing_replay=True))
