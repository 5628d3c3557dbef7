"""Training an EAGLE head, from recorded rollouts and beside the policy, and what becomes of it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.config.training_schema import OnlineConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.card import DrafterRecipe
from specactor_ray.distill.eagle import (
    FROZEN,
    EagleExample,
    example_of,
    hidden_layers_of,
    make_batch,
    reject_foreign_layers,
    unroll_loss,
)
from specactor_ray.distill.training import (
    EagleLearner,
    HeadTrainer,
    choose_samples,
    head_for,
    load_learner,
)
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.draft.eagle.proposer import EagleProposer, EagleRunner
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT
from tests.by_name import ByName
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.distill.recorded import recorded

SMALL = OnlineConfig(learning_rate=2e-3, batch_tokens=256, passes=3, steps_per_version=4, depths=2)


def recipe(**changes: Any) -> DrafterRecipe:
    return DrafterRecipe(str(tiny_target()), **{"draft_vocab": 256, "depths": 2, "epochs": 5.0, **changes})


def new_head(records: int = 80) -> EagleHead:
    return head_for(load_model(str(tiny_target())), recipe(), recorded("train")[:records])


@functools.cache
def some_head() -> EagleHead:
    return load_head(str(tiny_eagle()), str(tiny_target()))


def rollouts(part: str, count: int) -> list[EagleExample]:
    return [example_of(record) for record in recorded(part)[:count]]


def without_teacher(examples: Sequence[EagleExample]) -> list[EagleExample]:
    return [EagleExample(e.token_ids, e.num_prompt, e.states) for e in examples]


@torch.no_grad()
def loss_on(head: EagleHead, examples: Sequence[EagleExample]) -> float:
    return float(unroll_loss(head, make_batch(examples, head), 2))


def weights_of(trainer: HeadTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.weights().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("from_corpus", [True, False])
def test_steps_lower_the_held_out_loss_and_leave_alone_what_is_the_targets(from_corpus: bool) -> None:
    head, examples = new_head(24), rollouts("train", 36)
    before, loss = {name: weight.clone() for name, weight in head.named_parameters()}, loss_on(head, examples[24:])
    if from_corpus:
        trainer = HeadTrainer(head, 2, 2e-3)
        batches = [examples[begin : begin + 8] for begin in (0, 8, 16)] * 4
    else:
        trainer = learner = EagleLearner(head, SMALL)
        batches = list(itertools.islice(learner.batches(without_teacher(examples[:24])), 12))
    for batch in batches:
        assert trainer.step(batch) is not None
    assert loss_on(head, examples[24:]) < loss - 0.3
    changed = {name for name, weight in head.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == before.keys() - set(FROZEN)
    assert equal(trained_weights(new_head(24)), {name: before[name] for name in changed | {"lm_head.weight"}})


def test_a_target_of_another_build_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32}
    with pytest.raises(InputError, match=r"--target.*Llama family"):
        reject_foreign_layers(GPT2LMHeadModel(GPT2Config(**shape)), "gpt2")
    model = load_model(str(tiny_target()))
    reject_foreign_layers(model, "tiny")
    assert hidden_layers_of(model) == (0, 1, 2, HEAD_INPUT)


def learn(learner: EagleLearner, examples: Sequence[EagleExample]) -> list[float | None]:
    """The losses of all steps."""
    return [learner.step(batch) for batch in learner.batches(examples)]


def test_a_learner_is_a_function_of_its_examples_and_seed() -> None:
    """Its versions rise with its steps."""
    results = []
    for seed in (0, 0, 1):
        learner, versions = EagleLearner(new_head(24), SMALL, seed), list[int]()
        assert learn(learner, []) == [] and learner.version == 0, "nothing to learn from yet"
        for begin in (0, 8):
            for batch in learner.batches(without_teacher(rollouts("train", 16)[begin : begin + 8])):
                learner.step(batch)
                versions.append(learner.version)
        assert versions == [step // 4 for step in range(1, learner.steps + 1)] and versions[-1] > 1
        results.append(learner.weights())
    assert equal(results[0], results[1]) and not equal(results[0], results[2]), "the seed orders the examples"


def test_what_is_not_finite_or_cannot_be_drafted_is_skipped() -> None:
    head = new_head(24)
    learner, (good, bad) = EagleLearner(head, SMALL), without_teacher(rollouts("train", 2))
    before = weights_of(learner)
    learn(learner, [EagleExample(bad.token_ids, bad.num_prompt, torch.full_like(bad.states, float("inf")))])
    assert learner.skipped == SMALL.passes and learner.steps == learner.version == 0
    foreign = sorted(set(range(512)) - set(head.draft_token_ids().tolist()))[:8]
    assert learn(learner, [EagleExample((1, *foreign), 1, torch.zeros(8, 192))]) == [None] * SMALL.passes
    assert learner.steps == 0 and equal(weights_of(learner), before)
    loss = learner.step([good])
    assert loss is not None and np.isfinite(loss) and learner.steps == 1


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), max_size=8),
    batch=st.integers(2, 40),
    passes=st.integers(1, 3),
)
def test_batches_are_bounded_and_go_over_all_of_the_output(
    lengths: list[tuple[int, int]], batch: int, passes: int
) -> None:
    config = OnlineConfig(batch_tokens=batch, passes=passes)
    number, examples, outputs = 0, list[EagleExample](), list[int]()
    for prompt, output in lengths:
        # Every state is its own number, so that what is learned from tells where it comes from.
        states = torch.arange(number, number + prompt + output - 1.0).unsqueeze(1).expand(-1, 192)
        number += len(states)
        examples.append(EagleExample((1,) * (prompt + output), prompt, states))
        outputs += range(number - output, number)
    batches = list(EagleLearner(some_head(), config).batches(examples))
    assert all(one and len(one) * max(map(len, one)) <= batch for one in batches)
    places = [int(place) for one in batches for part in one for place in part.states[:, 0]]
    assert sorted(place for place in places if place in outputs) == sorted(outputs * passes)


@given(lengths=st.lists(st.integers(1, 50)), room=st.integers(1, 200), seed=st.integers(0, 9))
def test_samples_are_chosen_up_to_the_room_there_is(lengths: list[int], room: int, seed: int) -> None:
    chosen = choose_samples(lengths, room, seed)
    total = sum(lengths[index] for index in chosen)
    assert chosen == sorted(set(chosen)) == choose_samples(lengths, room, seed)
    assert total <= room or len(chosen) == 1
    assert bool(chosen) == bool(lengths)
    left = [length for index, length in enumerate(lengths) if index not in chosen]
    assert all(total + length > room for length in left), "whatever fits is taken"


def tails_of(proposer: Proposer) -> list[tuple[int, ...]]:
    """What is drafted behind some rollouts."""
    tails, proposer = [], ByName(proposer)
    for one in rollouts("train", 12):
        proposer.open("r", one.token_ids, (), SamplingParams(temperature=0.0), 4)
        assert proposer.traits.reads_features
        proposer.add_features("r", 0, one.states.float().numpy())
        while proposer.extend():
            pass
        tails.append(proposer.tail("r")[1])
        proposer.close("r", finished=False)
    return tails


def test_what_a_learner_has_learned_fits_the_running_head() -> None:
    target = TargetConfig(model=str(tiny_target()))
    drafter = DrafterSpec(
        method="eagle", model=str(tiny_eagle()), dtype="float32", kv_cache_gb=0.1, max_batch=16, online=SMALL
    )
    learner = load_learner(drafter, target, "cpu")
    assert learner.version == 0 and equal(learner.weights(), trained_weights(some_head()))
    learn(learner, without_teacher(rollouts("train", 4)))
    proposer = build_proposer(drafter, target, "cpu")
    untaught = tails_of(proposer)
    proposer.load_weights(6, learner.weights())
    taught = EagleProposer(EagleRunner(copy.deepcopy(learner.head).requires_grad_(False), 10 << 20))
    assert tails_of(proposer) == tails_of(taught) != untaught
