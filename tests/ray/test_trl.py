"""TRL's own trainers, unmodified, generate here: drafts change nothing that they learn, and weights are in step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor_ray import Rollout
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import import_named
from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.upstream import TRL
from specactor_ray.integrations.trl import attach
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.trainer.rewards import RewardSample, Scorer, _loop
from tests.contract import lacking
from tests.local_ray import local_ray
from tests.served import served
from tests.tiny import tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
STEPS = 3
GAP = "sampling/sampling_logp_difference/max"
"""Between the log-probabilities of the rollout's tokens, as it returned them and as the trainer computes them."""
DRAFTS = ("specactor/acceptance_length", "specactor/drafted_share")
PARTS = {
    "trl.generation.vllm_generation.VLLMGeneration": (
        *("_init_vllm", "vllm_client", "accelerator", "sync_weights", "generate(prompts)"),
        "__init__(model, accelerator, processing_class, mode, logprobs, temperature, top_p, top_k, min_p, "
        "repetition_penalty, max_completion_length, structured_outputs_regex, generation_kwargs)",
    ),
    "trl.generation.vllm_client.VLLMClient": (
        *("update_named_params(metadata, named_params)", "reset_prefix_cache"),
        "generate(prompts, features, n, repetition_penalty, temperature, top_p, top_k, min_p, max_tokens, "
        "logprobs, structured_outputs_regex, generation_kwargs)",
    ),
    **dict.fromkeys(
        ("trl.GRPOTrainer", "trl.RLOOTrainer"),
        (
            *("vllm_generation", "use_vllm", "vllm_mode", "_last_loaded_step", "_is_vlm", "_tokenizer"),
            "_metrics",
            *("eos_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            "max_completion_length",
        ),
    ),
    **dict.fromkeys(("trl.GRPOConfig", "trl.RLOOConfig"), ("vllm_structured_outputs_regex", "generation_kwargs")),
}
"""Everything of TRL that is used beside what is imported."""

FORMS = ("above_mean", "lengths", "batch_of")
"""Reward functions in TRL's form: an asynchronous one by the other outputs, by token ids, with None for an output."""

cluster = local_ray(2)


def test_the_installed_version_has_every_part() -> None:
    assert TRL.lacking() == "" and lacking(PARTS) == []


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_rewards_are_those_of_trl(prompt: Any) -> None:
    """Of the outputs of a prompt, for functions of TRL and others in its form: each one's values, and their sums."""
    names = ["trl.rewards:think_format_reward", *(f"tests.fakes.reward_forms:{one}" for one in FORMS)]
    names = names[prompt == "hi" :]  # the first one reads messages alone
    texts = ["<think>a</think>b", "b", "<think>a"]
    ids, columns = [[1] * (number + 1) for number in range(3)], {"answer": "whole tuple of 3", "level": "easy"}
    weights = [0.5, -2.0, 1.0, 0.25][-len(names) :]
    terms = [RewardFunctionConfig(name, weight) for name, weight in zip(names, weights, strict=True)]
    samples = [RewardSample(prompt, text, None, columns, tuple(own)) for text, own in zip(texts, ids, strict=True)]
    found = [score for score, _ in Scorer(RewardConfig(terms))(samples)]
    completions = texts if prompt == "hi" else [[{"role": "assistant", "content": text}] for text in texts]
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        reward_funcs=[import_named(name, "") for name in names],
        reward_processing_classes=[None] * len(names),
        reward_func_names=names,
        async_loop=_loop(),
        **dict.fromkeys(("_log_completion_extra", "_log_metric", "environments")),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
    )
    rows = [{"prompt": prompt, **columns}] * 3
    from trl import GRPOTrainer  # takes ten seconds

    values = GRPOTrainer._calculate_rewards(trainer, rows, [prompt] * 3, completions, ids)
    expected = (values * torch.tensor(weights)).nansum(dim=1)
    assert [score.reward for score in found] == pytest.approx(expected.tolist())
    for score, row in zip(found, values.tolist(), strict=True):
        assert [math.nan if one is None else one for one in score.rewards.values()] == pytest.approx(row, nan_ok=True)


def start(mode: str, **more: Any) -> Rollout:
    target = {"model": str(tiny_target()), "dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 64}
    settings: dict[str, Any] = {"mode": mode, "target": target, "cluster": {"pin_cores": False}, **more}
    return Rollout(from_mapping(settings))


@pytest.fixture(scope="module")
def drafting() -> Iterator[Rollout]:
    with start("coupled", drafters=[{"method": "suffix"}], speculation={"verify": "all"}) as rollout:
        yield rollout


def trainer(folder: Path, kind: str = "GRPO", **settings: Any) -> Any:
    import trl
    from datasets import Dataset

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 5,
        "disable_tqdm": True,
    }
    name = str(tiny_target())
    return getattr(trl, f"{kind}Trainer")(
        model=load_model(name).requires_grad_(True),
        reward_funcs=vowels,
        args=getattr(trl, f"{kind}Config")(**{**common, **settings}),
        train_dataset=Dataset.from_dict({"prompt": tiny_prompts(16)}),
        eval_dataset=Dataset.from_dict({"prompt": tiny_prompts(4, seed=1)}),
        processing_class=load_tokenizer(name),
    )


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]


def steps(done: Any) -> list[dict[str, Any]]:
    return [row for row in done.state.log_history if "reward" in row]


def rows(done: Any, *names: str) -> list[tuple[float, ...]]:
    return [tuple(row[name] for name in names) for row in steps(done)]


def assert_drafted(done: Any) -> None:
    """In some step; in which ones depends on the samples."""
    lengths, shares = zip(*rows(done, *DRAFTS), strict=True)
    assert min(lengths) >= 1.0 < max(lengths) and 0.0 <= min(shares) <= max(shares) <= 1.0 and max(shares) > 0.0


def test_grpo_learns_the_same_with_drafts_and_without(drafting: Rollout, tmp_path: Path) -> None:
    drafting.reset_metrics()
    names = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")
    with_drafts = trainer(tmp_path / "drafts")
    attach(with_drafts, drafting)
    version = drafting.weight_version
    with_drafts.train()
    assert drafting.weight_version == version + STEPS, "a push before each step"
    assert drafting.metrics().drafted_tokens > 0
    assert_drafted(with_drafts)
    with start("plain") as plain:
        without = trainer(tmp_path / "plain")
        attach(without, plain)
        without.train()
    assert len(steps(without)) == STEPS
    assert rows(with_drafts, *names) == rows(without, *names) and set(rows(without, *DRAFTS)) == {(1.0, 0.0)}
    assert len({row["reward"] for row in steps(without)}) == STEPS, "every step samples anew"
    assert all(row[GAP] < 1e-3 for done in (with_drafts, without) for row in steps(done)), "weights are in step"
    for first, second in zip(rows(with_drafts, "loss", "grad_norm"), rows(without, "loss", "grad_norm"), strict=True):
        assert first == pytest.approx(second, rel=1e-2, abs=1e-4)


def test_rloo_over_http_generates_what_it_does_here(drafting: Rollout, tmp_path: Path) -> None:
    """Tokens, weights and log-probabilities over HTTP; the server drafts."""
    names = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")
    over_http, here = (trainer(tmp_path / name, "RLOO") for name in ("server", "here"))
    with served(drafting) as server:
        version = drafting.weight_version
        attach(over_http, f"{server.url}/v1", str(tmp_path))
        over_http.train()
        assert drafting.weight_version == version + STEPS
    assert not list(tmp_path.glob("specactor-weights-*")), "a version of the weights is removed when it was read"
    attach(here, drafting)
    here.train()
    assert len(steps(here)) == STEPS and rows(over_http, *names) == rows(here, *names)
    assert_drafted(over_http)
    assert all(row["specactor/saved_s"] != 0.0 for done in (over_http, here) for row in steps(done))
    assert all(row.get(GAP, 0.0) < 1e-3 for row in steps(over_http)), "weights are in step"


def test_a_server_that_cannot_be_used_is_refused(drafting: Rollout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="127"):
        attach(trainer(tmp_path), "http://127.0.0.1:9")
    with pytest.raises(InputError, match="none"):
        attach(trainer(tmp_path), "http://127.0.0.1:9", str(tmp_path / "none"))
    with served(drafting) as server:
        other = trainer(tmp_path)
        other._tokenizer.add_tokens(["rivers"])
        for place in (drafting, server.url):
            with pytest.raises(InputError, match="tokenizer"):
                attach(other, place)


def test_a_resumed_run_samples_what_the_whole_run_did(drafting: Rollout, tmp_path: Path) -> None:
    """Also where it evaluated in between: seeds are of the step and the mode, not of the calls since the start."""
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    whole = trainer(tmp_path, **often, per_device_eval_batch_size=4)
    attach(whole, drafting)
    whole.train()
    again = trainer(tmp_path, **often, per_device_eval_batch_size=4)
    attach(again, drafting)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    names = ("reward", "completions/mean_length")
    assert rows(again, *names)[-1] == rows(whole, *names)[-1]
    assert len([row for row in whole.state.log_history if "eval_reward" in row and f"eval_{DRAFTS[0]}" in row]) == STEPS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"vllm_structured_outputs_regex": "a+"}, "structured_outputs_regex='a"),
        ({"generation_kwargs": {"seed": 1}}, "seed=1"),
        ({"generation_kwargs": {"stop_token_ids": 5}}, "generation_kwargs"),
        ({"max_completion_length": 64}, "max_completion_length.*target.max_model_len"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    drafting: Rollout, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        attach(trainer(tmp_path, **settings), drafting)


def test_what_cannot_be_attached_is_refused(drafting: Rollout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="list"):
        attach([], drafting)
    twice = trainer(tmp_path, generation_kwargs={"top_k": None, "stop_token_ids": None, "stop": "x"}, top_k=-1)
    with pytest.raises(InputError, match="rollout"):
        attach(twice, None)
    with pytest.raises(InputError, match="int"):
        attach(twice, 5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ftp://host"):
        attach(twice, "ftp://host")
    attach(twice, drafting)
    with pytest.raises(InputError, match="use_vllm"):
        attach(twice, drafting)
