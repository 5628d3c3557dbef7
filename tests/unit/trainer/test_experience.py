"""From outputs to samples: those without a reward are left out, groups with equal rewards replaced; rollouts ahead."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import RewardFunctionConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.experience import AheadMaker, Experience, ExperienceMaker
from specactor_ray.trainer.rewards import RewardPool, RewardSample, Scorer
from specactor_ray.trainer.workers import Outcome
from tests.fakes.trajectories import trajectory

Place = tuple[int, int]
PATIENCE_S, SEED = 60.0, 5
FIRST, SECOND, THIRD = (derive_seed(SEED, step, 0) for step in range(3))
"""Seeds of the first steps."""
RAISES = "tests.fakes.reward_functions:number_or_raises"
NO_NUMBER = "RuntimeError: no number (reward_functions.py, line "
EVENTS: list[str] = []
"""Outputs that ended, and scores that were requested, in their order."""


class Scripted:
    """A rollout and its queue: it says what is written for each prompt, sample by sample; `!` is a request that failed.

    Outputs and scores end one by one, when nothing else happens: the next one is chosen by `choose` among the places
    of those that have begun. `open` has the requests that have not ended, `late` what ends a score.
    """

    def __init__(self, *outputs: str, choose: Callable[[list[Place]], Place] = max, seed: int = FIRST) -> None:
        self.queue, self.progress, self.choose = self, (0, 0), choose
        self.open: dict[Place, asyncio.Future[Trajectory]] = {}
        self.late: dict[Place, Callable[[], None]] = {}
        self.begun = list[Place]()
        self.asked = list[SamplingParams]()
        self._ticks = False
        self._places = {derive_seed(seed, *place): place for place in itertools.product(range(99), range(4))}
        self._outputs = [output.split() for output in outputs]

    def wake_verifiers(self) -> None:
        pass

    def encoded(self, prompt: str) -> tuple[int, ...]:
        return (1, 2)

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[int]:
        yield 7

    async def begin(self, prompt: Any, sampling: SamplingParams, *, session: Any, stream: int) -> Handle:
        assert (prompt, session, stream) == ((1, 2), None, 7)
        place = self._places[sampling.seed]
        self.begun.append(place)
        self.asked.append(sampling)
        self.open[place] = asyncio.get_running_loop().create_future()
        self.tick_later()
        return Handle(self, place)

    def tick_later(self) -> None:
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        """End an output or a score, once the loop has nothing else to do, however slow the machine is."""
        loop: Any = asyncio.get_running_loop()
        if loop._ready:
            loop.call_soon(self._tick)
            return
        self._ticks = False
        if waiting := [*self.open, *self.late]:
            place = self.choose(waiting)
            if place in self.late:
                self.late.pop(place)()
            else:
                self.end(place)
            self.tick_later()

    def end(self, place: Place, reason: str = "stop") -> None:
        text = self._outputs[place[0]][place[1]]
        EVENTS.append("ended" if reason == "stop" else reason)
        outcome = {"error": "lost" if text == "!" else "", "finish_reason": "length" if place[1] == 3 else reason}
        output = trajectory(range(place[1] + 1), text=text, **outcome)
        self.open.pop(place).set_result(output)


class Handle:
    """A request of `Scripted`."""

    def __init__(self, rollout: Scripted, place: Place) -> None:
        self._rollout, self._place, self._future = rollout, place, rollout.open[place]

    def __await__(self) -> Any:
        return (yield from asyncio.shield(self._future).__await__())

    def drop(self) -> None:
        asyncio.get_running_loop().call_later(1e-3, self._abort)

    def _abort(self) -> None:
        if self._place in self._rollout.open:
            self._rollout.end(self._place, "abort")


class InProcess(RewardPool):
    """Scores as a reward process does, in this one; in the order of a rollout, if it has one."""

    def __init__(self, config: Config, rollout: Scripted | None = None) -> None:
        super().__init__(config.reward, 1)
        self._config, self._rollout, self._submitted = config.reward, rollout, 0

    def score(self, samples: Sequence[RewardSample]) -> Future[list[Outcome]]:
        EVENTS.append("scored")
        future, outcomes = Future[list[Outcome]](), Scorer(self._config)(samples)
        if self._rollout is None:
            future.set_result(outcomes)
        else:
            self._submitted += 1
            self._rollout.late[-1, self._submitted] = lambda: future.set_result(outcomes)
            self._rollout.tick_later()
        return future


def collect(outputs: Sequence[str], **settings: Any) -> Experience:
    """One step of as many prompts as there are outputs, or `prompts`."""
    EVENTS.clear()
    prompts = {"prompts_per_step": settings.pop("prompts", len(outputs))}
    reward = {"functions": [{"name": RAISES}], **settings.pop("reward", {})}
    sampling = settings.pop("sampling", None)
    algorithm = {"name": "grpo", **settings}
    sections = {"algorithm": algorithm, "reward": reward, "data": {"n": 4}, "trainer": prompts}
    config = from_mapping({"mode": "plain", **sections})
    config.sampling = replace(sampling or config.sampling, seed=SEED)
    return maker_of(config, [Task(index, "a", "1") for index in range(99)]).collect(
        Scripted(*outputs), config.sampling, 0
    )


def maker_of(config: Config, tasks: Any) -> ExperienceMaker:
    workers: Any = InProcess(config)
    return ExperienceMaker(config, make_recipe(config), TaskStream(tasks, 0, len, 3, shuffle=False), workers)


def advantages(experience: Experience) -> list[float]:
    return [round(sample.advantage, 3) for sample in experience.samples]


def test_tasks_skipped_for_a_step_are_counted_for_it() -> None:
    config = from_mapping({"mode": "plain", "data": {"n": 1}, "trainer": {"prompts_per_step": 1}})
    config.reward.functions, config.sampling = [RewardFunctionConfig(RAISES)], replace(config.sampling, seed=SEED)
    maker = maker_of(config, [Task(index, "a" * length) for index, length in enumerate((9, 1, 1, 8, 7, 1))])
    seeds = enumerate((FIRST, SECOND, THIRD))
    steps = [maker.collect(Scripted("1", seed=seed), config.sampling, step) for step, seed in seeds]
    assert [(one.skipped_tasks, one.first_skip[:10], one.position) for one in steps] == [
        (1, "row 0, has", (2, 1)),
        (0, "", (3, 1)),
        (2, "row 3, has", (6, 3)),
    ]


def test_outputs_are_scored_while_others_are_rolled_out() -> None:
    """By what the pattern finds in them. Samples and advantages are recomputed in `test_recomputation.py`."""
    experience = collect(["x=1 x=2 1 y=1"], reward={"functions": [{"name": "exact_match"}], "answer_pattern": r"=(\d)"})
    assert experience.rewards == [1.0, 0.0, 0.0, 1.0]
    assert [score and score.rewards for score in experience.scores] == [{"exact_match": one} for one in (1, 0, 0, 1)]
    assert [task.index for task in experience.tasks] == [0] * 4 and EVENTS == ["ended", "scored"] * 4
    assert [len(sample.output) for sample in experience.samples] == [1, 2, 3, 4]
    outputs, rewards = experience.spans["outputs"], experience.spans["rewards"]
    assert outputs[0] <= rewards[0] and outputs[1] <= rewards[1]


def test_functions_of_a_batch_get_the_outputs_of_a_prompt_in_their_order() -> None:
    """Whatever the order in which they end; those that failed are not among them."""
    functions = [{"name": "tests.fakes.reward_forms:rank"}, {"name": RAISES}]
    experience = collect(["1 2 3 4", "! 5 x 6", "! ! ! !"], reward={"functions": functions, "failure_value": 0.0})
    assert experience.rewards == [4002.0, 4103.0, 4204.0, 4305.0, 3006.0, 0.0, 3207.0]
    assert experience.failures["reward"].total() == 1 and experience.failures["rollout"] == {"lost": 5}
    assert [*["ended"] * 8, "scored", *["ended"] * 4, "scored"] == EVENTS, "each group at its end, the failed one never"


@pytest.mark.parametrize(
    ("outputs", "settings", "samples", "is_unusable"),
    [
        ("x x x x", {}, 0, True),
        ("x x x x", {"reward": {"failure_value": 0.0}}, 4, True),
        ("1 x 0 x", {"reward": {"failure_value": 0.0}}, 4, False),
        ("1 ! 0 !", {}, 2, False),
        ("! ! ! !", {}, 0, True),
        ("1 x x x", {"name": "ppo"}, 1, False),
        ("1 x x x", {"name": "rloo"}, 0, True),  # a sample alone has nothing to be compared with
    ],
)
def test_failures_of_a_step(outputs: str, settings: dict[str, Any], samples: int, is_unusable: bool) -> None:
    experience = collect([outputs], **settings)
    assert (len(experience.samples), experience.is_unusable) == (samples, is_unusable)
    assert experience.failures["rollout"].total() == outputs.count("!")
    assert experience.failures["reward"].total() == outputs.count("x")
    assert all(reason.startswith(NO_NUMBER) for reason in experience.failures["reward"])


def test_dull_groups_are_replaced_by_further_prompts_as_long_as_there_are_any() -> None:
    experience = collect(["1 1 1 1", "1 0 0 0", "0 0 0 0", "0 0 0 1"], prompts=2, dynamic_sampling=True)
    assert experience.groups == 4 and experience.zero_variance_groups == 2
    assert [sample.reward for sample in experience.samples] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    experience = collect(["10.1 10.1 10.1 10.1"] * 4, prompts=1, dynamic_sampling=True)
    assert experience.groups == 4 and experience.zero_variance_groups == 4
    assert advantages(experience) == [0.0] * 4, "the groups of one round, for which memory was planned"
    experience = collect(["1 1 1 1"] * 7 + ["0 1 0 0"], prompts=2, dynamic_sampling=True)
    assert experience.zero_variance_groups == 7 and len(experience.samples) == 4 and max(advantages(experience)) > 0


GROUPS = ("1 1 1 1", "1 0 0 0", "! ! ! 1", "0 x 0 1", "0 0 0 0", "1 1 1 1", "0 1 ! 0", "x x x x", "0 0 0 1")
"""Groups 1, 3, 6 and 8 are informative."""


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize(("prompts", "groups"), [(1, 2), (2, 4), (3, 7), (4, 9)])
def test_a_step_depends_on_the_order_of_its_tasks_and_on_no_time(prompts: int, groups: int, is_resumed: bool) -> None:
    """Whichever outputs and rewards end first, and however many groups run ahead of the need: they do after a step
    without an informative one, not after a resume. The next step goes on behind the last group that counts."""
    config = from_mapping({"mode": "plain", "algorithm": {"dynamic_sampling": True}, "data": {"n": 4}})
    config.reward.functions, config.sampling = [RewardFunctionConfig(RAISES)], replace(config.sampling, seed=SEED)
    config.trainer.prompts_per_step = prompts
    found, discarded = set[str](), list[tuple[int, int]]()
    for seed in range(12):
        maker = maker_of(config, [Task(index, "long" if index % 5 == 4 else "a", "1") for index in range(90)])
        if is_resumed:
            maker.stream.position, maker.stream.skipped = 5 * prompts - 1, prompts - 1
        else:
            maker.collect(Scripted(*["1 1 1 1"] * 4 * prompts), config.sampling, 0)
        rollout = Scripted(*GROUPS, *["1 0 1 0"] * 9, choose=random.Random(seed).choice if seed else min, seed=SECOND)
        maker._workers = workers = InProcess(config, rollout)  # type: ignore[assignment]
        one = maker.collect(rollout, config.sampling, 1)
        assert not rollout.open and not workers.closed and rollout.progress[1] == len(rollout.begun)
        assert (maker.stream.position, maker.stream.skipped) == one.position
        discarded.append((one.discarded_samples, len(rollout.begun) - 4 * groups))
        found.add(repr(replace(one, spans={}, reward_wait_s=0.0, discarded_samples=0, discarded_tokens=0)))
    assert len(found) == 1
    assert one.groups == groups and len(one.samples) == sum((4, 3, 3, 4)[:prompts])
    assert all(of_step == begun for of_step, begun in discarded)
    assert (max(discarded) > (0, 0)) == (not is_resumed)


def test_an_interruption_in_a_sample_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are not awaited."""
    config = from_mapping({"mode": "plain", "data": {"n": 4}, "trainer": {"prompts_per_step": 3}})
    config.reward.functions, config.sampling = [RewardFunctionConfig(RAISES)], replace(config.sampling, seed=SEED)
    maker, rollout = maker_of(config, [Task(index, "a", "1") for index in range(9)]), Scripted(*["1 0 1 0"] * 3)
    begin = rollout.begin

    async def interrupted(*arguments: Any, **options: Any) -> Handle:
        if len(rollout.begun) == 7:
            raise KeyboardInterrupt
        return await begin(*arguments, **options)

    monkeypatch.setattr(rollout, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maker.collect(rollout, config.sampling, 0)
    assert len(rollout.begun) == 7 and not rollout.open and maker._workers.closed


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_do_not_depend_on_an_offset_of_the_rewards(name: str) -> None:
    expected = advantages(collect(["1 2 4 8"], name=name))
    for offset in (-1e6, 1e8, 1e12):
        moved = collect([" ".join(str(offset + value) for value in (1, 2, 4, 8))], name=name)
        assert advantages(moved) == expected and moved.zero_variance_groups == 0


def test_advantages_are_of_the_whole_step() -> None:
    """Whitened over all tokens; of tokens by a function, for the own tokens of each output."""
    found = collect(["1 1 1 1", "0 0 0 4"], name="reinforce_pp")
    rewards = [
        reward for reward, tokens in zip([1, 1, 1, 1, 0, 0, 0, 4], [1, 2, 3, 4] * 2, strict=True) for _ in range(tokens)
    ]
    expected = [(one - mean(rewards)) / stdev(rewards) for one in (1, 1, 1, 1, 0, 0, 0, 4)]
    assert advantages(found) == pytest.approx(expected, abs=2e-3) and found.zero_variance_groups == 1
    own = collect(["1 2 3 4", "1 1 1 1", "5 6 ! !"], advantages="tests.fakes.own_algorithms:by_place").samples
    places = [(group, place) for group, size in enumerate((4, 4, 2)) for place in range(size)]
    for sample, (group, place) in zip(own, places, strict=True):
        assert list(np.asarray(sample.advantage)) == [1000 * group + 100 * place + t for t in range(place + 1)]


def test_outputs_that_were_cut_off_are_left_out_after_they_were_compared() -> None:
    whole = collect(["0 1 0 9", "9 9 0 9"])
    masked = collect(["0 1 0 9", "9 9 0 9"], mask_truncated=True)
    assert [len(sample.output) for sample in masked.samples] == [1, 2, 3, 1, 2, 3], "those of 4 tokens were cut off"
    kept = [one for place, one in enumerate(advantages(whole)) if place % 4 < 3]
    assert advantages(masked) == kept and masked.rewards == whole.rewards


class Maker:
    """Makes a step when it is allowed to; the second one fails."""

    def __init__(self) -> None:
        self.begun = list[int]()
        self.allowed, self.has_begun = threading.Event(), threading.Event()

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Any:
        self.begun.append(step)
        self.has_begun.set()
        assert self.allowed.wait(PATIENCE_S)
        if step == 1:
            raise RuntimeError("lost")
        return f"experience {step} of {rollout}"


def test_rollouts_ahead_are_waited_for_and_what_they_raise_arrives_at_its_step() -> None:
    """Rollouts ahead of a trainer are in `tests/ray/test_training.py`."""
    maker: Any = Maker()
    ahead = AheadMaker(maker, 2, 10)

    def interrupt() -> None:
        assert maker.has_begun.wait(PATIENCE_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes no wait of the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ahead.collect("rollout", SamplingParams(), 0)
    thread.join()
    maker.allowed.set()
    assert ahead.collect("rollout", SamplingParams(), 0) == "experience 0 of rollout"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            ahead.collect("rollout", SamplingParams(), 1)
    assert set(maker.begun) == {0, 1}, "none after an error"
