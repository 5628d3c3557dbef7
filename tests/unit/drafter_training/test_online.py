"""Learning online: what is recorded of outputs under way, and what a learner makes of it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.online import OnlineConfig
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafter_training.eagle import EagleExample, expected_counts, make_batch, new_head
from specactor_ray.drafter_training.eagle_unroll import unroll_loss
from specactor_ray.drafter_training.online import EagleLearner, choose_samples, load_learner
from specactor_ray.drafter_training.recording import RolloutRecorder
from specactor_ray.drafters.eagle import EagleProposer
from specactor_ray.drafters.registry import build_proposer
from specactor_ray.messages import DraftOpen, Features, SamplingParams
from specactor_ray.modeling.eagle_checkpoint import load_head, trained_weights
from specactor_ray.modeling.eagle_head import EagleHead
from specactor_ray.modeling.loading import load_model
from specactor_ray.modeling.ragged_model import HEAD_INPUT
from specactor_ray.modeling.wire import from_wire
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.drafter_training.recorded import make_engine
from tests.unit.engine_conformance import requests, run

SMALL = OnlineConfig(learning_rate=2e-3, buffer_tokens=4096, batch_tokens=256, passes=3, steps_per_version=4, depths=2)


def opening(
    request_id: str, prompt: Sequence[int], committed: Sequence[int] = (), features: tuple[Features, ...] = ()
) -> DraftOpen:
    return DraftOpen(0, 1, request_id, tuple(prompt), tuple(committed), SamplingParams(), 4, features)


@functools.cache
def some_head() -> EagleHead:
    return load_head(str(tiny_eagle()), str(tiny_target()))


@pytest.fixture(scope="module")
def rollouts() -> list[EagleExample]:
    """What a draft actor records of rollouts of the tiny target; `final` is there to make a head with."""
    engine, batch = make_engine(hidden_layers=(0, 1, 2, HEAD_INPUT), max_batch=16), requests(48, 1.0, max_tokens=40)
    for request in batch:
        engine.add(request)
    recorder, final = RolloutRecorder(1 << 20), dict[str, list[torch.Tensor]]()
    for request in batch:
        recorder.open(opening(request.request_id, request.prompt_token_ids))
    for output in run(engine).outputs:
        states = output.hidden_states
        final.setdefault(output.request_id, []).append(from_wire(states[:, 192:]))
        features = (Features(output.hidden_start, states[:, :192]),)
        recorder.commit(output.request_id, output.start, output.token_ids, features)
    examples = []
    for request in batch:
        example = recorder.close(request.request_id)
        assert example is not None and example.first == 0 and len(example) == len(example.token_ids) - 1
        examples.append(
            EagleExample(example.token_ids, example.num_prompt, example.states, torch.cat(final[request.request_id]))
        )
    assert recorder.tokens == 0
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
    for example in seen:
        learner.add(example)
    for _ in range(12):
        metrics = learner.step()
        assert metrics is not None and 0 < metrics["tokens"] <= SMALL.batch_tokens and 0 <= metrics["overlap"] <= 1
    assert loss_on(head, held_out) < loss - 0.3
    changed = {name for name, weight in head.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == before.keys() - {"embed_tokens.weight", "lm_head.weight"}
    assert learner.weights().keys() == trained_weights(head).keys()


def test_versions_rise_with_the_steps_and_learning_ends_when_all_is_used_up(rollouts: list[EagleExample]) -> None:
    learner = EagleLearner(untrained(rollouts), SMALL, version=7)
    assert learner.step() is None and learner.version == 7, "nothing to learn from yet"
    for example in without_teacher(rollouts[:20]):
        learner.add(example)
    versions = []
    while learner.step() is not None:
        versions.append(learner.version)
    assert versions == [7 + step // 4 for step in range(1, len(versions) + 1)] and versions[-1] > 9
    assert learner.tokens == 0 and learner.steps == len(versions)
    learner.add(without_teacher(rollouts[:1])[0])
    assert learner.step() is not None, "new outputs are learned from again"


def test_equal_examples_in_equal_order_give_equal_weights(rollouts: list[EagleExample]) -> None:
    results = []
    for seed in (0, 0, 1):
        learner = EagleLearner(untrained(rollouts), SMALL, seed=seed)
        for number, example in enumerate(without_teacher(rollouts[:24])):
            learner.add(example)
            if number % 4 == 3:
                learner.step()
        results.append(learner.weights())
    same = [all(torch.equal(results[0][name], other[name]) for name in results[0]) for other in results[1:]]
    assert same == [True, False], "the seed orders the examples"


def test_what_is_not_finite_is_skipped_and_counted(rollouts: list[EagleExample]) -> None:
    head = untrained(rollouts)
    learner, (good, bad) = EagleLearner(head, SMALL), without_teacher(rollouts[:2])
    before = {name: weight.clone() for name, weight in head.named_parameters()}
    learner.add(EagleExample(bad.token_ids, bad.num_prompt, torch.full_like(bad.states, float("inf"))))
    while learner.step() is not None:
        pass
    assert learner.skipped == SMALL.passes and learner.steps == learner.version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in head.named_parameters())
    learner.add(good)
    metrics = learner.step()
    assert metrics is not None and np.isfinite(metrics["loss"]) and learner.steps == 1


def test_tokens_that_the_head_cannot_say_teach_nothing(rollouts: list[EagleExample]) -> None:
    head = untrained(rollouts)
    foreign = sorted(set(range(512)) - set(head.draft_token_ids().tolist()))[:8]
    learner = EagleLearner(head, SMALL)
    learner.add(EagleExample((1, *foreign), 1, torch.zeros(8, 192)))
    assert learner.step() is None and learner.steps == learner.skipped == 0


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=8),
    batch=st.integers(2, 40),
    room=st.integers(0, 80),
)
def test_the_buffer_is_bounded_and_keeps_the_newest(lengths: list[tuple[int, int]], batch: int, room: int) -> None:
    config = OnlineConfig(buffer_tokens=batch + room, batch_tokens=batch, passes=1, steps_per_version=1, depths=1)
    learner, number = EagleLearner(some_head(), config), 0
    added: list[int] = []
    for prompt, output in lengths:
        # Every state is its own number, so that what is kept tells where it comes from.
        states = torch.arange(number, number + prompt + output - 1.0).unsqueeze(1).expand(-1, 192)
        number += len(states)
        learner.add(EagleExample((1,) * (prompt + output), prompt, states))
        added += range(number - output, number)
        assert 0 < learner.tokens <= config.buffer_tokens
    kept = list(iter(learner.next_examples, []))
    places = [int(place) for examples in kept for one in examples for place in one.states[:, 0]]
    assert len(places) == len(set(places)) and learner.tokens == 0
    assert all(len(examples) * max(map(len, examples)) <= batch for examples in kept)
    predicting = [place for place in sorted(places) if place in added]
    assert predicting == added[len(added) - len(predicting) :], "the oldest go first"
    if sum(prompt + output for prompt, output in lengths) <= config.buffer_tokens:
        assert predicting == added, "all of the output is learned from"


class Message:
    """A request's true course, told piece by piece over a channel that repeats, delays and loses."""

    def __init__(self, rng: random.Random) -> None:
        self.prompt = tuple(rng.randrange(500) for _ in range(rng.randint(1, 9)))
        self.output = [rng.randrange(500) for _ in range(rng.randint(2, 30))]
        self.tokens = [*self.prompt, *self.output]
        self.states = np.random.default_rng(rng.randrange(99)).standard_normal((len(self.tokens), 6), np.float32)

    def features(self, begin: int, committed: int) -> tuple[Features, ...]:
        end = len(self.prompt) + committed - 1
        return (Features(begin, self.states[begin:end]),) if end > begin else ()

    def opening(self, committed: int, begin: int = 0) -> DraftOpen:
        known = tuple(self.output[:committed])
        return opening("r", self.prompt, known, self.features(begin, committed))

    def commit(self, start: int, end: int, begin: int) -> tuple[str, int, Sequence[int], Sequence[Features]]:
        return "r", start, tuple(self.output[start:end]), self.features(begin, end)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_recorded_is_true_and_has_no_gaps(seed: int) -> None:
    rng = random.Random(seed)
    course, recorder = Message(rng), RolloutRecorder(10_000)
    known = rng.randint(0, 1)
    sent = rng.randint(0, 2) if known else 0
    recorder.open(course.opening(known, sent))
    lost = False
    while known < len(course.output):
        end = min(known + rng.randint(1, 5), len(course.output))
        start = rng.randint(max(known - 3, 0), known)
        begin = min(max(sent - rng.randint(0, 3), 0), len(course.prompt) + end - 1)
        if rng.random() < 0.15:  # its states are lost, as when the verifier keeps the newest only
            begin = min(begin + rng.randint(1, 6), len(course.prompt) + end - 1)
        commit = course.commit(start, end, begin)
        for _ in range(rng.choice([1, 1, 2])):
            recorder.commit(*commit)
        if rng.random() < 0.1 and end < len(course.output) - 1:
            recorder.commit(*course.commit(end + 1, end + 2, begin))  # one is missing in between
            assert recorder.tokens == 0
            lost = True
            break
        known, sent = end, len(course.prompt) + end - 1
    example = recorder.close("r")
    assert recorder.tokens == 0
    if lost:
        assert example is None, "until it is opened again"
        return
    assert example is not None or sent >= len(course.tokens) - 1
    if example is not None:
        assert list(example.token_ids) == course.tokens and example.num_prompt == len(course.prompt)
        assert example.first + len(example) == len(course.tokens) - 1
        expected = course.states[example.first : len(course.tokens) - 1]
        assert np.array_equal(example.states.numpy(), expected)


def test_recordings_are_bounded_and_the_longest_loses_its_beginning() -> None:
    recorder = RolloutRecorder(40)
    for name, length in (("long", 60), ("short", 20)):
        recorder.open(opening(name, (1, 2)))
        for start in range(0, length, 4):
            features = (Features(max(start - 3, 0) if start else 0, np.ones((4, 6), np.float32)),)
            if start:
                features = (Features(start, np.full((4, 6), start, np.float32)),)
            recorder.commit(name, start, (5,) * 4, features)
            assert recorder.tokens <= 40
    long, short = recorder.close("long"), recorder.close("short")
    assert long is not None and short is not None
    assert (short.first, len(short)) == (0, 20) and (long.first, len(long)) == (40, 20)
    assert recorder.tokens == 0 and recorder.close("long") is None and recorder.close("nobody") is None


def test_a_recording_without_output_positions_teaches_nothing() -> None:
    recorder = RolloutRecorder(40)
    recorder.open(opening("r", (1, 2, 3, 4)))
    assert recorder.close("r") is None
    recorder.open(opening("r", (1, 2, 3, 4), (5,)))
    recorder.commit("r", 0, (5,), (Features(0, np.zeros((2, 6), np.float32)),))
    assert recorder.close("r") is None, "the states end inside the prompt"
    recorder.open(opening("r", (1, 2, 3, 4), (5,)))
    recorder.forget("r")
    assert recorder.close("r") is None


@given(lengths=st.lists(st.integers(1, 50)), room=st.integers(1, 200), seed=st.integers(0, 9))
def test_samples_are_chosen_up_to_the_room_there_is(lengths: list[int], room: int, seed: int) -> None:
    chosen = choose_samples(lengths, room, seed)
    total = sum(lengths[index] for index in chosen)
    assert chosen == sorted(set(chosen)) == choose_samples(lengths, room, seed)
    assert total <= room or len(chosen) == 1
    assert bool(chosen) == bool(lengths)
    left = [length for index, length in enumerate(lengths) if index not in chosen]
    assert all(total + length > room for length in left), "whatever fits is taken"


def test_a_learner_begins_where_the_newest_version_is_and_shares_the_embedding() -> None:
    target = TargetConfig(model=str(tiny_target()))
    drafter = DrafterConfig(method="eagle", model=str(tiny_eagle()), kv_cache_gb=0.01, online=SMALL)
    proposer = build_proposer(drafter, target, "cpu")
    assert isinstance(proposer, EagleProposer)
    newest = {name: weight + 1.0 for name, weight in trained_weights(some_head()).items()}
    learner = load_learner(drafter, target, "cpu", proposer, 5, newest)
    assert learner.version == 5
    assert all(torch.equal(weight, newest[name]) for name, weight in learner.weights().items())
    assert learner._head.embed_tokens is proposer.embedding
    assert not proposer.embedding.weight.requires_grad
    proposer.load_weights(6, learner.weights())  # they fit the running head
    assert load_learner(drafter, target, "cpu").version == 0
