"""One optimizer step, from rewards to weights, beside a recomputation in float64, sample by sample."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import mean, pstdev, stdev
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe, uses_values
from specactor_ray.config.schema import Config
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.batching import Sample
from specactor_ray.learner.engine import PolicyModel, TorchEngine
from specactor_ray.learner.update import PolicyUpdater
from specactor_ray.models.loading import load_model
from specactor_ray.trainer.experience import Experience
from tests.tiny import tiny_target
from tests.unit.trainer.test_experience import collect

torch.set_num_threads(1)
MAX_TOKENS, TEMPERATURE, RATE, DECAY, MAX_NORM = 5, 0.8, 1e-3, 0.1, 0.05
OUTPUTS = ("1 0 0 1", "2 2 2 2", "x 3 x 5", "7 x x x", "1 1.25 1.5 1.75", "-4 ! 0 0.5")
"""Rewards by prompt, of outputs of 1, 2, 3 and 4 tokens: `x` raised, `!` is a failed rollout."""


class Keeping(TorchEngine):
    """Keeps the gradient of each optimizer step."""

    gradients: dict[str, torch.Tensor]

    def step(self, learning_rate: float) -> float:
        self.gradients = {
            name: one.grad.double() for name, one in self.policy.named_parameters() if one.grad is not None
        }
        return super().step(learning_rate)


def settings(algorithm: dict[str, Any]) -> Config:
    trainer = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": MAX_NORM, "micro_batch_tokens": 12}
    sampling = {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}
    sections = {"algorithm": algorithm, "sampling": sampling, "trainer": trainer, "target": {"dtype": "float32"}}
    return from_mapping({"mode": "plain", **sections})


def policy_of(config: Config, drift: int) -> PolicyModel:
    """The tiny model, moved at random."""
    recipe = make_recipe(config)
    policy = PolicyModel(
        load_model(str(tiny_target())).requires_grad_(True), TEMPERATURE, uses_values(recipe), bool(recipe.entropy_coef)
    )
    generator = torch.Generator().manual_seed(drift)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def expected_rewards(config: Config, outputs: Sequence[str]) -> list[tuple[int, float, float]]:
    """Length, shaped reward and advantage of every sample that is trained on, by the definitions; NaN for ppo."""
    recipe, found = make_recipe(config), list[tuple[int, float, float]]()
    for group in outputs:
        given = [(n + 1, float(text)) for n, text in enumerate(group.split()) if text not in ("x", "!")]
        alone = recipe.name.value in ("ppo", "reinforce_pp")
        if len(given) < (1 if alone else 2):
            continue
        ramp = [min(0.0, (MAX_TOKENS - recipe.overlong_buffer - n) / max(recipe.overlong_buffer, 1)) for n, _ in given]
        shaped = [r + (max(p, -1.0) if recipe.overlong_buffer else 0.0) for (_, r), p in zip(given, ramp, strict=True)]
        dull = len({r for _, r in given}) == 1 or max(shaped) - min(shaped) < 1e-9
        for place, (length, _) in enumerate(given):
            others = [r for number, r in enumerate(shaped) if number != place]
            if uses_values(recipe):
                advantage = math.nan
            elif dull:
                advantage = 0.0
            elif recipe.name.value == "rloo":
                advantage = shaped[place] - mean(others)
            else:
                advantage = (shaped[place] - mean(shaped)) / (stdev(shaped) + 1e-6 if recipe.scale_by_std else 1.0)
            found.append((length, shaped[place], advantage))
    if recipe.name.value == "reinforce_pp":
        tokens = [reward for length, reward, _ in found for _ in range(length)]
        found = [(length, reward, (reward - mean(tokens)) / stdev(tokens)) for length, reward, _ in found]
    return found


def scores(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the output tokens, and the last hidden states before them; float64."""
    ids, begin = torch.tensor([*sample.prompt, *sample.output]), len(sample.prompt) - 1
    output = model(input_ids=ids[None], output_hidden_states=True)
    log_p = (output.logits[0].double() / TEMPERATURE).log_softmax(-1)[begin:-1]
    chosen = log_p.gather(1, ids[begin + 1 :, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), output.hidden_states[-1][0, begin:-1]


def estimates(values: Sequence[float], reward: float, lam: float) -> list[float]:
    """Advantages of the tokens of one output, by the sum that defines them."""
    after, last = [*values[1:], 0.0], len(values) - 1
    delta = [(reward if t == last else 0.0) + after[t] - values[t] for t in range(last + 1)]
    return [sum(lam ** (k - t) * delta[k] for k in range(t, last + 1)) for t in range(last + 1)]


def expected_loss(config: Config, policy: PolicyModel, reference: Any, experience: Experience) -> torch.Tensor:
    recipe, samples = make_recipe(config), experience.samples
    known, everything = expected_rewards(config, OUTPUTS), [scores(policy.model, sample) for sample in samples]
    assert [len(sample.output) for sample in samples] == [length for length, _, _ in known]
    advantages = [[advantage] * length for length, _, advantage in known]
    values = [torch.zeros(length) for length, _, _ in known]
    returns = values
    if policy.value_head is not None:
        head = policy.value_head
        values = [head(states)[:, 0] for _, _, states in everything]
        raw = [
            estimates(v.tolist(), reward, recipe.gae_lambda) for v, (_, reward, _) in zip(values, known, strict=True)
        ]
        returns = [torch.tensor(a) + v.detach() for a, v in zip(raw, values, strict=True)]
        flat = [one for row in raw for one in row]
        advantages = [[(one - mean(flat)) / math.sqrt(pstdev(flat) ** 2 + 1e-8) for one in row] for row in raw]
    total, tokens = torch.zeros((), dtype=torch.float64), sum(length for length, _, _ in known)
    for row, (sample, (logprobs, entropy, _)) in enumerate(zip(samples, everything, strict=True)):
        old = logprobs.detach()
        loss = -(logprobs - old).exp() * torch.tensor(advantages[row])
        if recipe.importance_cap is not None:
            loss = loss * (old - torch.tensor(sample.rollout_logprobs)).exp().clamp_max(recipe.importance_cap)
        loss = loss - recipe.entropy_coef * entropy + recipe.value_coef * 0.5 * (values[row] - returns[row]) ** 2
        if recipe.kl_coef:
            loss = loss + recipe.kl_coef * 0.5 * (scores(reference, sample)[0].detach() - logprobs) ** 2
        assert recipe.loss_aggregation is not None
        share = {
            "sequence": len(samples) * len(sample.output),
            "token": tokens,
            "constant": len(samples) * MAX_TOKENS,
        }[recipe.loss_aggregation.value]
        total = total + loss.sum() / share
    return total


ALGORITHMS = (
    {"name": "grpo"},
    {"name": "grpo", "overlong_buffer": 4, "kl_coef": 0.1, "entropy_coef": 0.01},
    {"name": "grpo", "scale_by_std": False, "loss_aggregation": "constant", "importance_cap": 0.002},
    {"name": "dapo", "dynamic_sampling": False, "overlong_buffer": 4},
    {"name": "rloo", "overlong_buffer": 3},
    {"name": "dr_grpo", "kl_coef": 0.1},
    {"name": "gspo", "overlong_buffer": 0},
    {"name": "reinforce_pp", "overlong_buffer": 4, "importance": "token", "importance_cap": 0.003},
    {"name": "ppo", "gae_lambda": 0.9},
    {"name": "ppo", "overlong_buffer": 4, "gae_lambda": 1.0, "entropy_coef": 0.01},
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_step_from_rewards_to_weights(algorithm: dict[str, Any]) -> None:
    config = settings(algorithm)
    experience = collect(OUTPUTS, **algorithm, sampling=SamplingParams(max_tokens=MAX_TOKENS))
    for sample, (_, reward, advantage) in zip(experience.samples, expected_rewards(config, OUTPUTS), strict=True):
        assert sample.reward == pytest.approx(reward, rel=1e-14)
        assert math.isnan(advantage) or sample.advantage == pytest.approx(advantage, rel=1e-8, abs=1e-15)
    policy, reference = policy_of(config, 1), policy_of(settings({"name": "grpo"}), 2)
    exact, exact_reference = copy.deepcopy(policy), load_model(str(tiny_target())).double()
    exact_reference.load_state_dict(reference.model.state_dict())
    exact_model = load_model(str(tiny_target())).double().requires_grad_(True)
    exact_model.load_state_dict(policy.model.state_dict())
    exact.model = exact_model
    exact.double()
    engine = Keeping(policy, config.trainer)
    kept = reference if config.algorithm.kl_coef else None
    metrics = PolicyUpdater(engine, make_recipe(config), config, kept).update(experience.samples, 0, 0)

    loss = expected_loss(config, exact, exact_reference, experience)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float(one.grad.square().sum()) for one in exact.parameters() if one.grad is not None))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (metrics["skipped"], metrics["no_gradient"]) == (0, 0)
    after = dict(policy.named_parameters())
    for name, start in exact.named_parameters():
        assert start.grad is not None
        apart = (engine.gradients[name] - start.grad).norm()
        assert apart <= 1e-4 * start.grad.norm() + 1e-6 * norm, name
        clipped = engine.gradients[name] * min(1.0, MAX_NORM / norm)
        decay = DECAY if start.dim() >= 2 else 0.0
        moved = start.detach() * (1 - RATE * decay) - RATE * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(after[name].double(), moved, atol=2e-6, rtol=1e-5)
