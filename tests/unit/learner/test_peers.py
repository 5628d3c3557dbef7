"""Gradients of an update, cut into mini-batches and micro-batches, are those of TRL's and verl's own loss functions.

The policy is a table of log-probabilities, moved at random after each optimizer step, a few tokens very far. TRL's and
verl's functions get the samples of a mini-batch as one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.schema import Config
from specactor_ray.learner.algorithms import rewarded_group, step_advantages
from specactor_ray.learner.batching import MicroBatch, Sample
from specactor_ray.learner.engine import TokenScores, TorchEngine
from specactor_ray.learner.update import PolicyUpdater

COUNT, LONGEST, MAX_TOKENS = 15, 12, 16


class Table(nn.Module):
    """Log-probabilities of the output tokens of each sample; the first token of a prompt is the sample's number."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.logprobs, self.packed = nn.Parameter(start.clone()), False

    def forward(self, batch: MicroBatch, chunks: int) -> TokenScores:
        found = self.logprobs[batch.input_ids[:, 0], : batch.mask.shape[1]] * batch.mask
        return TokenScores(found, torch.zeros_like(found), torch.zeros_like(found))


@dataclass
class Step:
    """One optimizer step."""

    rows: list[int]
    before: torch.Tensor
    gradient: torch.Tensor


class Moving(TorchEngine):
    """Keeps the gradient of each optimizer step, and moves the table at random: 3% of the tokens by 6."""

    def __init__(self, table: Any, config: Config) -> None:
        super().__init__(table, config.trainer)
        self.steps, self._rows = list[Step](), list[int]()
        self._random = torch.Generator().manual_seed(5)

    def score(self, batch: MicroBatch, model: Any = None) -> TokenScores:
        if torch.is_grad_enabled():
            self._rows += batch.input_ids[:, 0].tolist()
        return super().score(batch, model)

    def step(self, learning_rate: float) -> float:
        table: Any = self.policy
        weights = table.logprobs
        self.steps.append(Step(sorted(self._rows), weights.detach().clone(), weights.grad.clone()))
        with torch.no_grad():
            far = torch.rand(weights.shape, generator=self._random) < 0.03
            weights += 0.2 * torch.randn(weights.shape, generator=self._random) + far * 6.0
        self._rows, weights.grad = [], None
        return 1.0


def steps_of(algorithm: dict[str, Any], micro_batch_tokens: int) -> tuple[list[Sample], torch.Tensor, list[Step], dict]:
    """Samples, the table at the start, the optimizer steps of an update, and its metrics."""
    trainer = {"epochs": 2, "mini_batches": 3, "micro_batch_tokens": micro_batch_tokens}
    sections = {"trainer": trainer, "sampling": {"max_tokens": MAX_TOKENS}, "target": {"dtype": "float32"}}
    config = from_mapping({"mode": "plain", "algorithm": {"dynamic_sampling": False, **algorithm}, **sections})
    rng, samples = np.random.default_rng(3), list[Sample]()
    start = torch.tensor(rng.normal(-2.0, 0.5, (COUNT, LONGEST)), dtype=torch.float32)
    for number in range(COUNT):
        length = int(rng.integers(1, LONGEST + 1))
        own = rng.random(length) < 0.8
        own[-1] = True
        rollout = (start[number, :length].numpy() + rng.normal(0.0, 0.4, length)).astype(np.float32) * own
        advantage = 0.0 if number == 4 else float(rng.normal())
        samples.append(Sample(np.array([number]), np.zeros(length, np.int64), rollout, 0.0, advantage, own))
    engine = Moving(Table(start), config)
    metrics = PolicyUpdater(engine, make_recipe(config), config).update(samples, 0, seed=1)
    assert len(engine.steps) == 6 and metrics["skipped"] == 0
    return samples, start, engine.steps, metrics


def padded(samples: Sequence[Sample], values: Callable[[Sample], Any]) -> torch.Tensor:
    whole = torch.zeros(len(samples), LONGEST)
    for row, sample in enumerate(samples):
        whole[row, : len(sample.output)] = torch.as_tensor(np.asarray(values(sample), dtype=np.float32))
    return whole


def assert_equal_gradients(algorithm: dict[str, Any], loss_of: Callable[..., torch.Tensor]) -> dict[str, float]:
    """`loss_of(logprobs, old, rollout, advantages, mask)` of every mini-batch has our gradient. Returns our metrics."""
    for micro_batch_tokens in (20, 4096):
        (samples, start, steps, metrics), trained = steps_of(algorithm, micro_batch_tokens), 0
        for step in steps:
            chosen = [samples[row] for row in step.rows]
            logprobs = step.before[step.rows].requires_grad_(True)
            mask = padded(chosen, lambda one: one.loss_mask)
            advantages = torch.tensor([one.advantage for one in chosen], dtype=torch.float32)
            rollout = padded(chosen, lambda one: one.rollout_logprobs)
            loss_of(logprobs * mask, start[step.rows] * mask, rollout, advantages, mask).backward()
            assert logprobs.grad is not None
            trained += bool(logprobs.grad.any())
            torch.testing.assert_close(step.gradient[step.rows], logprobs.grad, atol=1e-8, rtol=1e-5)
        assert trained >= 4, "of six"
    return metrics


WIDE = {"epsilon": 0.5, "epsilon_high": 1.0}
"""Most outputs would be beyond GSPO's own clip range in all but the first mini-batch."""
TRL_LOSSES = (
    ({"name": "grpo"}, {"loss_type": "grpo"}),
    ({"name": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ({"name": "gspo", "clip_low": 0.5, "clip_high": 1.0}, {"importance_sampling_level": "sequence", **WIDE}),
    ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ({"name": "grpo", "importance": "token"}, {"mode": "token_truncate", "cap": 2.0}),
    ({"name": "grpo", "importance": "sequence"}, {"mode": "sequence_truncate", "cap": 3.0}),
    ({"name": "dr_grpo", "importance": "mask"}, {"loss_type": "dr_grpo", "mode": "sequence_mask", "cap": 3.0}),
)


@pytest.mark.parametrize(("algorithm", "settings"), TRL_LOSSES, ids=str)
def test_gradients_are_those_of_trl(algorithm: dict[str, Any], settings: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl import GRPOTrainer

    def loss_of(
        logprobs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        accelerator = SimpleNamespace(
            num_processes=1, gather=lambda values: values, reduce=lambda values, reduction: values
        )
        trainer: Any = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            **dict.fromkeys(("aux_loss_enabled", "_entropy_bonus_enabled", "use_adaptive_entropy"), False),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            beta=0.0,
            importance_sampling_level=settings.get("importance_sampling_level", "token"),
            loss_type=settings.get("loss_type", "grpo"),
            epsilon_low=settings.get("epsilon", 0.2),
            epsilon_high=settings.get("epsilon_high", 0.2),
            args=SimpleNamespace(delta=3.0, steps_per_generation=1),
            use_vllm="mode" in settings,
            vllm_importance_sampling_correction=True,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX_TOKENS,
            accelerator=accelerator,
            _metrics={"train": defaultdict(list)},
        )
        gap = (old - rollout) * mask
        ratio = (gap.sum(1, keepdim=True) if "sequence" in settings.get("mode", "") else gap).exp()
        cap = settings.get("cap", 1.0)
        ratio = ratio.masked_fill(ratio > cap, 0.0) if settings.get("mode") == "sequence_mask" else ratio.clamp(max=cap)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        inputs = {
            **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "importance_sampling_ratio": ratio,
            "num_items_in_batch": mask.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    assert_equal_gradients(algorithm, loss_of)


VERL_LOSSES = (
    ({"name": "grpo"}, "vanilla", "seq-mean-token-mean", None),
    ({"name": "rloo"}, "vanilla", "token-mean", None),
    ({"name": "reinforce_pp"}, "vanilla", "token-mean", None),
    ({"name": "dapo", "importance": "token"}, "vanilla", "token-mean", ("token", 2.0)),
    ({"name": "rloo", "importance": "sequence"}, "vanilla", "token-mean", ("sequence", 3.0)),
    ({"name": "grpo", "importance": "mask"}, "vanilla", "seq-mean-token-mean", ("sequence", "1e-12_3.0")),
    ({"name": "gspo", "clip_low": 0.5, "clip_high": 1.0, "clip_dual": 1e9}, "gspo", "seq-mean-token-mean", None),
    ({"name": "cispo"}, "cispo", "token-mean", None),
)


@pytest.mark.parametrize(("algorithm", "name", "mode", "weights"), VERL_LOSSES, ids=str)
def test_gradients_are_those_of_verl(algorithm: dict[str, Any], name: str, mode: str, weights: Any) -> None:
    pytest.importorskip("verl", reason="scripts/test-verl installs verl", exc_type=ImportError)
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

    recipe = make_recipe(from_mapping({"mode": "plain", "algorithm": algorithm}))
    clips = {"clip_ratio_low": recipe.clip_low, "clip_ratio_high": recipe.clip_high}
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clips)

    def loss_of(
        logprobs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        correction = None
        if weights is not None:
            correction, _ = compute_rollout_correction_weights((old - rollout) * mask, mask, *weights)
        loss, _ = get_policy_loss_fn(name)(
            old, logprobs, advantages[:, None] * mask, mask, mode, actor, rollout_is_weights=correction
        )
        return loss

    metrics = assert_equal_gradients(algorithm, loss_of)
    assert ("importance_ess" in metrics) == (weights is not None)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_advantages_are_those_of_verl(algorithm: str) -> None:
    pytest.importorskip("verl", reason="scripts/test-verl installs verl", exc_type=ImportError)
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    rng, recipe = np.random.default_rng(0), make_recipe(from_mapping({"algorithm": {"name": algorithm}}))
    sizes = (4, 2, 7)
    rewards, lengths = ([rng.normal(size=n) for n in sizes], [rng.integers(1, LONGEST, n) for n in sizes])
    groups = [rewarded_group(recipe, list(r), n.tolist(), 512) for r, n in zip(rewards, lengths, strict=True)]
    ours = torch.cat(step_advantages(groups, recipe))
    mask = (torch.arange(LONGEST) < torch.tensor(np.concatenate(lengths))[:, None]).double()
    last = torch.arange(LONGEST) == torch.tensor(np.concatenate(lengths))[:, None] - 1
    token_rewards = torch.tensor(np.concatenate(rewards))[:, None] * last
    index = np.repeat(np.arange(len(sizes)), sizes)
    theirs, _ = {
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(token_rewards, mask, index),
        "dr_grpo": lambda: core_algos.compute_grpo_outcome_advantage(
            token_rewards, mask, index, norm_adv_by_std_in_grpo=False
        ),
        "rloo": lambda: core_algos.compute_rloo_outcome_advantage(token_rewards, mask, index),
        "reinforce_pp": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            token_rewards, mask, config=AlgoConfig(gamma=1.0)
        ),
    }[algorithm]()
    torch.testing.assert_close(ours[:, None] * mask, theirs, atol=1e-6, rtol=1e-5)
