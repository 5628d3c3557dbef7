"""Groups of a step in one stream, on the real queue and simulated verifiers: what it saves, and what it leaves."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.simulation.cluster import VirtualRun
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.world import GeneratedText, World, linear
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.experience import Experience, ExperienceMaker
from specactor_ray.trainer.groups import Group, GroupStream
from specactor_ray.trainer.rewards import RewardPool, RewardSample, Score
from specactor_ray.trainer.workers import Outcome
from tests.fakes.virtual_loop import VirtualLoop

PROMPTS, SAMPLES, STEPS, MAX_TOKENS = 8, 4, 3, 256


class Lengths(dict[int, int]):
    """Output lengths by seed, with a long tail."""

    def __missing__(self, seed: int) -> int:
        return min(max(round(random.Random(seed).lognormvariate(math.log(30), 0.9)), 1), MAX_TOKENS)


class Scores(RewardPool):
    """Scores half of the prompts by length, the others all alike."""

    def score(self, samples: Sequence[RewardSample]) -> Future[list[Outcome]]:
        rewards = [len(one.token_ids) if random.Random(one.answer).random() < 0.5 else 1.0 for one in samples]
        future = Future[list[Outcome]]()
        future.set_result([(Score(float(reward)), "") for reward in rewards])
        return future


def by_rounds(self: GroupStream, make: Callable[[int], Group], wanted: int, most: int, share: float) -> Any:
    """In place of `GroupStream._run`: one round after the other, each as large as the need."""

    async def run() -> tuple[list[Group], list[Group]]:
        groups = list[Group]()
        while (missing := wanted - sum(map(bool, (one.is_informative for one in groups)))) and len(groups) < most:
            found = [make(number) for number in range(len(groups), min(len(groups) + missing, most))]
            await asyncio.gather(*map(self._play, found))
            groups += found
        return groups, []

    return run()


@functools.cache
def steps(way: str, seed: int = 0) -> tuple[list[Experience], list[float]]:
    """Steps of DAPO, and the virtual seconds of each. `seed`: of latencies and of the order of simultaneous events."""
    config = from_mapping(
        {
            "mode": "plain",
            "target": {"replicas": 2, "max_batch": 64},
            "cluster": {"address": "auto"},
            "algorithm": {"name": "dapo", "overlong_buffer": 0},
            "data": {"n": SAMPLES},
            "sampling": {"max_tokens": MAX_TOKENS},
            "trainer": {"prompts_per_step": PROMPTS},
        }
    )
    tasks: Any = [Task(index, [1, 2, 3], str(index)) for index in range(500)]
    scores = Scores(config.reward, 1)
    maker = ExperienceMaker(config, make_recipe(config), TaskStream(tasks, 0, len, 9, shuffle=False), scores)
    world = World(GeneratedText(Lengths(), []), linear(0.02, 0.0002))
    run = VirtualRun(config, world, [Node(name, cpus=8.0) for name in "ab"], seed)
    found, seconds = list[Experience](), list[float]()

    def drive() -> None:
        run.start_run()
        journal, rollout = run.queue.dispatcher.journal, SimpleNamespace(queue=run.queue, progress=(0, 0))
        for step in range(STEPS):
            begin, before = run.clock.now(), journal.committed_tokens
            found.append(maker.collect(rollout, config.sampling, step))
            seconds.append(run.clock.now() - begin)
            assert not run.queue.running() and not run.queue.open_streams and not journal.entries
            kept = sum(len(one.token_ids) for one in found[-1].trajectories)
            assert found[-1].discarded_tokens == journal.committed_tokens - before - kept
            run.queue.call_verifiers("sleep")
        scores.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "run", lambda coroutine: VirtualLoop(run.clock).run_until_complete(coroutine))
        if way == "rounds":
            patch.setattr(GroupStream, "_run", by_rounds)
        run.kernel.spawn(drive, "main", run.driver.process)
        run.kernel.run(until=1e5, done=lambda: len(seconds) == STEPS or bool(run.kernel.crashes))
    crashes = list(run.kernel.crashes)
    run.kernel.close()
    for _, error in crashes:
        raise error
    return found, seconds


def trained(experiences: Sequence[Experience]) -> list[Any]:
    """All that a step leaves, apart from what depends on time."""
    return [
        (
            [(one.prompt_index, one.token_ids) for one in step.trajectories],
            [(sample.output.tolist(), sample.advantage) for sample in step.samples],
            (step.rewards, step.position, step.groups, step.zero_variance_groups),
        )
        for step in experiences
    ]


def test_a_stream_takes_less_time_than_rounds_for_the_same_samples() -> None:
    """The first step, which expects all groups to be informative, and the others, which run ahead of the need."""
    rounds, of_rounds = steps("rounds")
    stream, seconds = steps("stream")
    assert trained(rounds) == trained(stream) and sum(one.zero_variance_groups for one in stream) > PROMPTS
    assert seconds[0] < 0.9 * of_rounds[0] and sum(seconds[1:]) < 0.6 * sum(of_rounds[1:])
    assert not any(one.discarded_tokens for one in rounds) and any(one.discarded_tokens for one in stream)


def test_the_order_of_events_changes_nothing_that_is_trained_on() -> None:
    (stream, first), (other, second) = steps("stream"), steps("stream", 1)
    assert trained(stream) == trained(other) and first != second
