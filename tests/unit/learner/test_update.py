"""The policy and its update: scores are right, and micro-batches and mini-batches change nothing they should not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe, uses_values
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import Schedule, TrainerConfig
from specactor_ray.learner.batching import Sample, collate, cut_by_tokens, share_out
from specactor_ray.learner.engine import PolicyModel, SavedPart, TorchEngine
from specactor_ray.learner.update import PolicyUpdater, learning_rate
from specactor_ray.models.loading import load_model
from specactor_ray.models.packed_attention import PACKED_NAME, register
from tests.tiny import tiny_target

torch.set_num_threads(1)


def config(**algorithm: object) -> Config:
    settings = {
        "mode": "plain",
        "target": {"dtype": "float32"},
        "algorithm": algorithm,
        "sampling": {"max_tokens": 16, "temperature": 0.8},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 4096},
    }
    return from_mapping(settings)


def make_policy(settings: Config, packed: bool = False) -> PolicyModel:
    model = load_model(str(tiny_target())).requires_grad_(True)
    recipe = make_recipe(settings)
    if packed:
        register()
        model.set_attn_implementation(PACKED_NAME)
    return PolicyModel(model, settings.sampling.temperature, uses_values(recipe), bool(recipe.entropy_coef))


def make_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        prompt, output = rng.integers(4, 400, rng.integers(3, 12)), rng.integers(4, 400, rng.integers(1, 16))
        logprobs = rng.normal(-3.0, 0.5, len(output)).astype(np.float32)
        own = np.ones(len(output), dtype=np.bool_)
        samples.append(Sample(prompt, output, logprobs, float(index % 2), 1.0 if index % 2 else -0.5, own))
    return samples


def trained(
    settings: Config, samples: Sequence[Sample], steps: int = 2, packed: bool = False
) -> tuple[dict[str, torch.Tensor], dict]:
    engine = TorchEngine(make_policy(settings, packed), settings.trainer)
    updater = PolicyUpdater(engine, make_recipe(settings), settings)
    for step in range(steps):
        metrics = updater.update(samples, step, seed=step)
    return dict(engine.policy.state_dict()), metrics


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


@given(lengths, st.integers(8, 200), st.integers(1, 5))
def test_every_sample_is_in_one_group_that_fits_and_ranks_get_equally_many(
    sizes: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    totals = [sum(size) for size in sizes]
    groups = cut_by_tokens(totals, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or len(group) * max(totals[index] for index in group) <= budget for group in groups)
    packed = cut_by_tokens(totals, budget, packed=True)
    assert sorted(index for group in packed for index in group) == list(range(len(sizes)))
    sums = [sum(totals[index] for index in group) for group in packed]
    assert all(len(group) == 1 or total <= budget for group, total in zip(packed, sums, strict=True))
    assert all(a + b > budget for a, b in itertools.combinations(sums, 2)), "no two would fit into one"
    assert totals[packed[0][0]] == max(totals)
    shares = share_out(groups, ranks)
    assert len({len(share) for share in shares}) == 1
    assert sorted(group for share in shares for group in share if group) == sorted(groups)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_micro_batches_add_up_to_the_whole(algorithm: str, packed: bool) -> None:
    """Those that are cut, and are in one row without padding, or padded."""
    samples = make_samples()
    whole = config(name=algorithm, entropy_coef=0.01)
    cut = config(name=algorithm, entropy_coef=0.01)
    cut.trainer.micro_batch_tokens = 30
    for settings in (whole, cut):
        settings.trainer.mini_batches, settings.trainer.epochs = 2, 2
    one, one_metrics = trained(whole, samples)
    other, other_metrics = trained(cut, samples, packed=packed)
    assert one_metrics == pytest.approx(other_metrics, rel=1e-3, abs=1e-4)
    start = make_policy(whole).state_dict()
    moved = sum(float((value - start[name]).square().sum()) for name, value in one.items()) ** 0.5
    apart = sum(float((value - other[name]).square().sum()) for name, value in one.items()) ** 0.5
    assert moved > 0.0 and apart < 0.001 * moved, "of single weights AdamW makes much of tiny gradients"


def test_the_gap_to_the_rollout_is_measured() -> None:
    settings, samples = config(name="grpo"), make_samples()
    engine = TorchEngine(make_policy(settings), settings.trainer)
    with torch.no_grad():
        before = engine.score(collate(samples, range(len(samples)))).logprobs
    exact = [replace(s, rollout_logprobs=before[i, : len(s.output)].numpy().copy()) for i, s in enumerate(samples)]
    exact[0].rollout_logprobs[0] += 0.5
    metrics = PolicyUpdater(engine, make_recipe(settings), settings).update(exact, 0, 0)
    tokens = sum(len(sample.output) for sample in exact)
    assert metrics["logprob_gap_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / tokens, rel=1e-3)
    assert metrics["logprob_gap"] == pytest.approx(0.5 / tokens, rel=1e-3)
    assert metrics["logprob_gap_max"] == pytest.approx(0.5, rel=1e-4)


def test_a_conversation_teaches_what_its_turns_teach_alone() -> None:
    """Each turn as a sample of its own, with all that came before as its prompt. Every token counts alike."""
    settings, rng = config(name="dapo"), np.random.default_rng(4)
    whole, apart = list[Sample](), list[Sample]()
    for index in range(4):
        ids, logprobs = rng.integers(4, 400, 20), rng.normal(-3.0, 0.5, 12).astype(np.float32)
        own = np.array([True] * 4 + [False] * 5 + [True] * 3)
        advantage = 1.0 if index % 2 else -0.5
        whole.append(Sample(ids[:8], ids[8:], logprobs, 1.0, advantage, own))
        for begin, end in ((8, 12), (17, 20)):
            part = logprobs[begin - 8 : end - 8]
            apart.append(Sample(ids[:begin], ids[begin:end], part, 1.0, advantage, np.ones(end - begin, np.bool_)))
    one, metrics = trained(settings, whole, steps=1)
    other, expected = trained(settings, apart, steps=1)
    assert_same(one, other, atol=5e-5)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_steps_without_a_finite_loss_or_without_samples_change_nothing() -> None:
    samples = make_samples()
    samples[3] = replace(samples[3], advantage=math.nan)
    for wanted, skipped in ((samples, 1), ([], 0)):
        after, metrics = trained(config(), wanted, steps=1)
        assert metrics["skipped"] == skipped and metrics.keys() == trained(config(), make_samples(), steps=1)[1].keys()
        assert_same(dict(make_policy(config()).state_dict()), after, atol=0)


@pytest.mark.parametrize("offset", [1e8])
def test_advantages_of_ppo_do_not_depend_on_an_offset_of_the_rewards(offset: float) -> None:
    """The value head begins with zeros, and is not trained here."""
    settings = config(name="ppo", value_coef=0.0, gae_lambda=1.0)
    shifted = [replace(sample, reward=sample.reward + offset) for sample in make_samples()]
    (one, _), (other, _) = (trained(settings, samples, steps=1) for samples in (make_samples(), shifted))
    assert_same(one, other, atol=1e-7)


def test_gradients_that_are_zero_or_whose_squares_are_zero_or_infinite_in_float32() -> None:
    """By a gradient of zero AdamW would step with its moments alone."""
    settings = config(name="grpo")
    engine = TorchEngine(make_policy(settings), settings.trainer)
    updater = PolicyUpdater(engine, make_recipe(settings), settings)
    updater.update(make_samples(), 0, seed=0)
    steps = ((1, 1e30, "skipped"), (2, 1e-27, ""), (3, 1e-38, ""), (4, 0.0, "no_gradient"), (5, 1.0, ""))
    for step, advantage, left_out in steps:
        before = {name: value.clone() for name, value in engine.policy.state_dict().items()}
        metrics = updater.update([replace(one, advantage=advantage) for one in make_samples(seed=1)], step, seed=step)
        assert [name for name in ("skipped", "no_gradient") if metrics[name]] == ([left_out] if left_out else [])
        moved = any(not torch.equal(before[name], value) for name, value in engine.policy.state_dict().items())
        assert moved == (not left_out) and (metrics["grad_norm"] > 0) == (not left_out)


@pytest.mark.parametrize(
    ("algorithm", "moves"),
    [
        ({"name": "grpo"}, False),
        ({"name": "dapo", "importance": "sequence"}, False),
        ({"name": "gspo"}, False),
        ({"name": "cispo"}, False),
        ({"name": "grpo", "kl_coef": 0.1}, True),
        ({"name": "grpo", "entropy_coef": 0.01}, True),
        ({"name": "ppo"}, True),  # by its value head
    ],
    ids=str,
)
def test_a_step_without_advantages_moves_the_weights_only_by_what_else_has_a_gradient(
    algorithm: dict[str, Any], moves: bool
) -> None:
    """Neither AdamW's moments nor its weight decay move them, whatever the cut."""
    settings = config(**algorithm)
    settings.trainer.micro_batch_tokens, settings.trainer.mini_batches, settings.trainer.epochs = 30, 2, 2
    settings.trainer.weight_decay = 0.1
    engine = TorchEngine(make_policy(settings), settings.trainer)
    reference = make_policy(config(name="grpo")) if settings.algorithm.kl_coef else None
    updater = PolicyUpdater(engine, make_recipe(settings), settings, reference)
    updater.update(make_samples(), 0, seed=0)
    before = {name: value.clone() for name, value in engine.policy.state_dict().items()}
    metrics = updater.update([replace(one, advantage=0.0) for one in make_samples(seed=1)], 1, seed=1)
    assert metrics["no_gradient"] == (0 if moves else 4) and metrics["skipped"] == 0
    assert moves == any(not torch.equal(before[name], value) for name, value in engine.policy.state_dict().items())


def test_a_resumed_optimizer_has_the_settings_of_the_configuration(tmp_path: Path) -> None:
    """And the moments of the checkpoint."""
    settings, engines = config(name="grpo"), list[TorchEngine]()
    for decay in (0.0, 0.1):
        settings.trainer.weight_decay = decay
        engines.append(TorchEngine(make_policy(settings), settings.trainer))
    PolicyUpdater(engines[0], make_recipe(settings), settings).update(make_samples(), 0, seed=0)
    engines[0].save(tmp_path, SavedPart(tmp_path))
    engines[1].load(tmp_path)
    first, second = (engine._optimizer for engine in engines)
    assert [group["weight_decay"] for group in second.param_groups] == [0.1, 0.0]
    state = first.state_dict()["state"], second.state_dict()["state"]
    assert all(torch.equal(one[name], state[1][key][name]) for key, one in state[0].items() for name in one)


def test_advantages_of_tokens_reach_their_tokens() -> None:
    """Through every cut, with tokens of an environment between them."""
    sample = make_samples(1, seed=7)[0]
    own = np.arange(len(sample.output)) % 3 != 1
    own[-1] = True
    values = np.arange(1.0, own.sum() + 1)
    batch = collate([make_samples(1)[0], replace(sample, advantage=values, loss_mask=own)], [0, 1])
    assert batch.advantages[1, : len(own)][torch.tensor(own)].tolist() == values.tolist()
    assert float(batch.advantages[1].sum()) == values.sum()


@pytest.mark.parametrize("level", ["token", "sequence", "mask"])
def test_weights_of_what_the_rollout_sampled(level: str) -> None:
    """One optimizer step: by the scores that it computes anyway, in one forward per micro-batch."""
    settings, samples = config(name="grpo", importance=level, importance_cap=1.5), make_samples()
    settings.trainer.micro_batch_tokens = 30
    engine = TorchEngine(make_policy(settings), settings.trainer)
    with torch.no_grad():
        trained_by = engine.score(collate(samples, range(len(samples)))).logprobs
    rng, weights = np.random.default_rng(0), list[float]()
    for row, sample in enumerate(samples):
        gap = rng.normal(0.0, 0.3, len(sample.output))
        ours = trained_by[row, : len(gap)].numpy()
        samples[row] = replace(sample, rollout_logprobs=(ours - gap).astype(np.float32))
        ratio = np.exp(gap) if level == "token" else np.full(len(gap), np.exp(gap.sum()))
        weights += list(ratio * (ratio <= 1.5) if level == "mask" else np.minimum(ratio, 1.5))
    forwards = []
    engine.policy.register_forward_hook(lambda *_: forwards.append(1))
    metrics = PolicyUpdater(engine, make_recipe(settings), settings).update(samples, 0, 0)
    assert metrics["importance_weight"] == pytest.approx(np.mean(weights), rel=1e-4)
    assert metrics["importance_ess"] == pytest.approx(
        np.sum(weights) ** 2 / (len(weights) * np.sum(np.square(weights))), rel=1e-4
    )
    assert len(forwards) == len(cut_by_tokens([sample.num_tokens for sample in samples], 30))


def test_learning_rate() -> None:
    section = TrainerConfig(learning_rate=1.0, warmup_steps=2, steps=6)
    assert [learning_rate(section, step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    section.schedule = Schedule.linear
    assert [learning_rate(section, step) for step in range(2, 6)] == [1.0, 0.75, 0.5, 0.25]
    section.schedule = Schedule.cosine
    assert learning_rate(section, 4) == pytest.approx(0.5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_hidden_states_are_the_models_own(max_tokens: int, packed: bool) -> None:
    settings, samples = config(name="ppo"), make_samples(5)
    settings.trainer.micro_batch_tokens = max_tokens
    engine = TorchEngine(make_policy(settings, packed), settings.trainer)
    layers, scored = engine.policy.model.get_decoder().layers, list[int]()
    output_layer = engine.policy.model.get_output_embeddings()
    output_layer.register_forward_hook(lambda _, inputs, __: scored.append(inputs[0].shape[-2]))
    states, plain = engine.hidden_states(samples, (0, 2)), make_policy(settings)
    assert sum(scored) == len(samples), "the output layer runs for nothing"
    assert not any(layer._forward_hooks for layer in layers), "nothing is left behind"
    for sample, found in zip(samples, states, strict=True):
        ids = torch.tensor(np.concatenate([sample.prompt, sample.output]))[None]
        with torch.no_grad():
            whole = plain.model(input_ids=ids, output_hidden_states=True).hidden_states
        expected = torch.cat([whole[1][0, :-1], whole[3][0, :-1]], dim=-1)  # [0] is what enters the first layer
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert engine.hidden_states([], (0,)) == []
