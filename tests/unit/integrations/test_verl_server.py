"""What verl's configuration and requests become here; no verl is needed."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.integrations.verl_server import Seeds, configuration, require_supported, sampling_of

ROLLOUT: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_parallel_size": 1,
    "data_parallel_size": 3,
    "repetition_penalty": 1.0,
    "prompt_length": 100,
    "response_length": 60,
    "max_model_len": None,
    "max_num_seqs": 1024,
    "dtype": "bfloat16",
    "checkpoint_engine": {"backend": "naive"},
    "engine_kwargs": {"vllm": {"seed": 1}},
}


def rollout(**more: Any) -> Any:
    return OmegaConf.create({**ROLLOUT, **more})


class TestConfiguration:
    def test_a_replica_is_what_its_section_says(self) -> None:
        target = configuration(rollout(), "org/model", True, has_gpus=False).target
        assert (target.model, target.replicas, target.max_model_len, target.dtype) == ("org/model", 3, 160, "bfloat16")
        assert (target.gpus, target.max_batch, target.backend, target.trust_remote_code) == (0, 16, "hf", True)
        target = configuration(rollout(tensor_model_parallel_size=2), "org/model", False, has_gpus=True).target
        assert (target.gpus, target.tensor_parallel, target.backend, target.max_batch) == (2, 2, "vllm", 128)

    def test_our_section_wins_key_by_key_and_its_mistakes_have_verls_key(self) -> None:
        own = {"mode": "coupled", "drafters": [{"method": "suffix"}], "target": {"max_batch": 5}}
        config = configuration(rollout(max_num_seqs=2, engine_kwargs={"specactor": own}), "org/model", False, False)
        assert (config.target.max_batch, config.target.replicas, config.drafters[0].method) == (5, 3, "suffix")
        section = rollout(engine_kwargs={"specactor": {"target": {"max_bach": 5}}})
        with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.specactor\.target\.max_bach"):
            configuration(section, "org/model", False, False)

    def test_what_cannot_be_served_is_refused_by_its_key(self) -> None:
        """Adapters are served only when they are merged."""
        settings = {"pipeline_model_parallel_size": 2, "expert_parallel_size": 8, "repetition_penalty": 1.1}
        settings |= {"logprobs_mode": "raw_logprobs", "quantization": "fp8", "qat": {"enable": True}}
        settings |= {"enable_rollout_routing_replay": True, "disaggregation": {"enabled": True}}
        for key, value in {**settings, "checkpoint_engine": {"backend": "nccl"}}.items():
            with pytest.raises(ConfigError, match=rf"^actor_rollout_ref\.rollout\.{key}"):
                require_supported(rollout(**{key: value}), {})
        for model in ({"lora_rank": 8}, {"lora": {"rank": 8, "merge": False}}):
            with pytest.raises(ConfigError, match=r"model\.lora"):
                require_supported(rollout(), OmegaConf.create(model))
        require_supported(rollout(), OmegaConf.create({"lora_rank": 8, "lora": {"merge": True}}))


def sampling_params(given: dict[str, Any], num_prompt: int, seed: int) -> SamplingParams:
    section = rollout(prompt_length=8, response_length=16, ignore_eos=False)
    return sampling_of(section, given, num_prompt, seed, max_model_len=32)


class TestSampling:
    def test_lengths(self) -> None:
        """An output has at most the rest of prompt and response, and always what the context holds."""
        assert sampling_params({}, 6, 1).max_tokens == 16
        assert sampling_params({}, 20, 1).max_tokens == 4
        assert sampling_params({"max_tokens": 100}, 20, 1).max_tokens == 12
        assert sampling_params({"max_new_tokens": 5}, 20, 1).max_tokens == 5
        with pytest.raises(InputError, match="32"):
            sampling_params({}, 32, 1)

    def test_verls_parameters(self) -> None:
        given = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
        sampling = sampling_params({**given, "stop_token_ids": [7], "min_p": None, "stop": []}, 6, 3)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 0, 3)
        assert (sampling.stop_token_ids, sampling.first_position, sampling.ignore_eos) == ((7,), 6, False)
        assert sampling_params({"seed": 9}, 6, 3).seed == 9

        for others in ({"min_p": 0.1}, {"prompt_logprobs": 0}, {"stop": ["x"]}, {"n": 2}):
            with pytest.raises(InputError, match=rf"sampling_params\.{next(iter(others))}="):
                sampling_params(others, 6, 3)


def test_seeds_differ_and_come_again_in_another_run() -> None:
    """That of a named request depends on its name alone."""

    def taken(run_seed: int, replica: int) -> list[int]:
        seeds, all_of_them = Seeds(run_seed, replica), []
        for step in range(2):
            all_of_them += [seeds.take(prompt) for prompt in ([1, 2], [1, 2], [3])]
            seeds.begin_step(step)
        return all_of_them

    runs = [taken(1, 0), taken(1, 1), taken(2, 0)]
    assert len({seed for run in runs for seed in run}) == 18
    assert taken(1, 1) == runs[1]
    assert Seeds(1, 0).take([1], "det-0") == Seeds(1, 5).take([1], "det-0") != Seeds(1, 0).take([1], "det-1")


def test_an_aborted_request_keeps_its_seed_once() -> None:
    seeds = Seeds(1, 0)
    first, second = seeds.take([1]), seeds.take([1])
    seeds.keep([1, 5], first)
    seeds.keep([1, 5], second)
    seeds.begin_step(4)
    assert {seeds.take([1, 5]), seeds.take([1, 5])} == {first, second}
    assert seeds.take([1, 5]) not in {first, second}


def test_the_package_names_verls_plugin() -> None:
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["verl.plugins"].values()
    assert importlib.util.find_spec(module) is not None
