"""Learning online: what a learner makes of a step's samples."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.config.training_schema import OnlineConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.eagle import EagleExample, expected_counts, make_batch, new_head
from specactor_ray.distill.eagle_unroll import unroll_loss
from specactor_ray.distill.online import EagleLearner, choose_samples, load_learner
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.eagle.runner import EagleRunner
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.registry import build_proposer
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.models.weight_buckets import from_wire, to_wire
from specactor_ray.transport.messages import Features
from tests.by_name import ByName
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.distill.recorded import make_engine
from tests.unit.engine_conformance import Driver, requests, run

SMALL = OnlineConfig(learning_rate=2e-3, batch_tokens=256, passes=3, steps_per_version=4, depths=2)


@functools.cache
def some_head() -> EagleHead:
    return load_head(str(tiny_eagle()), str(tiny_target()))


@pytest.fixture(scope="module")
def rollouts() -> list[EagleExample]:
    """Rollouts of the tiny target; `final` is there to make a head with."""
    engine = Driver(make_engine(hidden_layers=(0, 1, 2, HEAD_INPUT), max_batch=16))
    batch = requests(48, 1.0, max_tokens=40)
    for request in batch:
        engine.add(request)
    collected, examples = run(engine), []
    for request in batch:
        ids = (*request.prompt_token_ids, *collected.tokens[request.request_id])
        known = torch.cat([from_wire(states) for _, states in collected.states[request.request_id]])
        assert len(known) == len(ids) - 1
        examples.append(EagleExample(ids, len(request.prompt_token_ids), known[:, :192], known[:, 192:]))
    return examples


def without_teacher(examples: Sequence[EagleExample]) -> list[EagleExample]:
    return [EagleExample(e.token_ids, e.num_prompt, e.states) for e in examples]


def untrained(rollouts: Sequence[EagleExample]) -> EagleHead:
    model = load_model(str(tiny_target()))
    counts = torch.stack([expected_counts(model, example) for example in rollouts]).sum(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return new_head(model, "tiny-target", counts, 300)


@torch.no_grad()
def loss_on(head: EagleHead, examples: Sequence[EagleExample]) -> float:
    return float(unroll_loss(head, make_batch(examples, head), 2)[0])


def test_a_few_steps_lower_the_held_out_loss_and_leave_alone_what_is_the_targets(rollouts: list[EagleExample]) -> None:
    head, (held_out, seen) = untrained(rollouts), (rollouts[:12], without_teacher(rollouts[12:]))
    before, loss = {name: weight.clone() for name, weight in head.named_parameters()}, loss_on(head, held_out)
    learner = EagleLearner(head, SMALL)
    for batch in itertools.islice(learner.batches(seen), 12):
        metrics = learner.step(batch)
        assert metrics is not None and 0 < metrics["tokens"] <= SMALL.batch_tokens and 0 <= metrics["overlap"] <= 1
    assert loss_on(head, held_out) < loss - 0.3
    changed = {name for name, weight in head.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == before.keys() - {"embed_tokens.weight", "lm_head.weight"}
    assert learner.weights().keys() == trained_weights(head).keys()


def learn(learner: EagleLearner, examples: Sequence[EagleExample]) -> list[dict[str, float] | None]:
    """The metrics of all steps."""
    return [learner.step(batch) for batch in learner.batches(examples)]


def test_versions_rise_with_the_steps(rollouts: list[EagleExample]) -> None:
    learner = EagleLearner(untrained(rollouts), SMALL)
    assert learn(learner, []) == [] and learner.version == 0, "nothing to learn from yet"
    versions = []
    for batch in learner.batches(without_teacher(rollouts[:20])):
        learner.step(batch)
        versions.append(learner.version)
    assert versions == [step // 4 for step in range(1, len(versions) + 1)] and versions[-1] > 2
    assert learner.steps == len(versions)


def test_equal_examples_in_equal_order_give_equal_weights(rollouts: list[EagleExample]) -> None:
    results = []
    for seed in (0, 0, 1):
        learner = EagleLearner(untrained(rollouts), SMALL, seed)
        for begin in (0, 8):
            learn(learner, without_teacher(rollouts[begin : begin + 8]))
        results.append(learner.weights())
    same = [all(torch.equal(results[0][name], other[name]) for name in results[0]) for other in results[1:]]
    assert same == [True, False], "the seed orders the examples"


def test_what_is_not_finite_is_skipped_and_counted(rollouts: list[EagleExample]) -> None:
    head = untrained(rollouts)
    learner, (good, bad) = EagleLearner(head, SMALL), without_teacher(rollouts[:2])
    before = {name: weight.clone() for name, weight in head.named_parameters()}
    learn(learner, [EagleExample(bad.token_ids, bad.num_prompt, torch.full_like(bad.states, float("inf")))])
    assert learner.skipped == SMALL.passes and learner.steps == learner.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in head.named_parameters())
    metrics = learner.step([good])
    assert metrics is not None and np.isfinite(metrics["loss"]) and learner.steps == 1


def test_tokens_that_the_head_cannot_say_teach_nothing(rollouts: list[EagleExample]) -> None:
    head = untrained(rollouts)
    foreign = sorted(set(range(512)) - set(head.draft_token_ids().tolist()))[:8]
    learner = EagleLearner(head, SMALL)
    assert learn(learner, [EagleExample((1, *foreign), 1, torch.zeros(8, 192))]) == [None] * SMALL.passes
    assert learner.steps == learner.skipped == 0


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


def tails_of(proposer: Proposer, rollouts: Sequence[EagleExample]) -> list[tuple[int, ...]]:
    """What is drafted behind some rollouts."""
    tails, proposer = [], ByName(proposer)
    for one in rollouts[:12]:
        proposer.open("r", one.token_ids, (), SamplingParams(temperature=0.0), 4)
        assert proposer.traits.reads_features
        proposer.add_features("r", [Features(0, to_wire(one.states))])
        while proposer.extend():
            pass
        tails.append(proposer.tail("r")[1])
        proposer.close("r", finished=False)
    return tails


def test_what_a_learner_has_learned_fits_the_running_head(rollouts: list[EagleExample]) -> None:
    target = TargetConfig(model=str(tiny_target()))
    drafter = DrafterSpec(method="eagle", model=str(tiny_eagle()), dtype="float32", max_batch=16, online=SMALL)
    learner = load_learner(drafter, target, "cpu")
    before = {name: weight.clone() for name, weight in trained_weights(some_head()).items()}
    assert learner.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())
    learn(learner, without_teacher(rollouts[:4]))
    proposer = build_proposer(drafter, target, "cpu")
    untaught = tails_of(proposer, rollouts)
    proposer.load_weights(6, learner.weights())
    taught = EagleProposer(EagleRunner(copy.deepcopy(learner._head), 10 << 20))
    assert tails_of(proposer, rollouts) == tails_of(taught, rollouts) != untaught
