"""Conversations with environments in processes of their own: what is said by whom, and what a failure costs."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ActorLostError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed, sample_of
from specactor_ray.trainer.conversations import Conversations
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.experience import ExperienceMaker
from specactor_ray.trainer.groups import Episode, Group, GroupStream
from specactor_ray.transport.messages import RequestStats
from tests import tiny
from tests.fakes.trajectories import trajectory

SEED = 7


class Scripted:
    """A rollout and its queue: it says what a function of the prompt and the parameters makes of them."""

    def __init__(self, says: Callable[[list[int], SamplingParams], str]) -> None:
        self.queue, self.progress, self.tokenizer = self, (0, 0), load_tokenizer(str(tiny.tiny_target()))
        self.asked: list[tuple[list[int], SamplingParams, str]] = []
        self._says = says

    def wake_verifiers(self) -> None:
        pass

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[int]:
        yield 7

    async def begin(self, prompt: list[int], sampling: SamplingParams, *, session: str, stream: int) -> Any:
        assert stream == 7
        return self.generate(prompt, sampling, session)

    async def generate(self, prompt: list[int], sampling: SamplingParams, session: str | None = None) -> Trajectory:
        assert session is not None
        self.asked.append((prompt, sampling, session))
        text, eos = self._says(prompt, sampling), self.tokenizer.eos_token_id
        if text == "lost":
            raise ActorLostError("no verifier")
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], eos][: sampling.max_tokens]
        return trajectory(
            ids,
            logprobs=tuple(-0.1 * (number + 1) for number in range(len(ids))),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if ids[-1] == eos else "length",
            stats=RequestStats(2, 3, 1, 1, {"ngram": (3, 1)}),
            error="no room" if text == "fails" else "",
            weight_version=4,
        )


def script(*turns: str) -> Callable[[list[int], SamplingParams], str]:
    """Each conversation says these turns, told apart by how often the model has spoken."""
    words = load_tokenizer(str(tiny.tiny_target()))
    assistant = words.convert_tokens_to_ids(tiny.ASSISTANT)
    return lambda prompt, sampling: turns[min(prompt.count(assistant), len(turns)) - 1]


def settings(max_tokens: int = 64, reward: dict[str, Any] | None = None, **sections: Any) -> Config:
    sections["environment"] = {"name": "tests.fakes.environments:Echo", **sections.get("environment", {})}
    reward = {"functions": [{"name": "exact_match"}], **(reward or {})}
    sampling = {"max_tokens": max_tokens, "seed": SEED}
    return from_mapping({"mode": "plain", "reward": reward, "sampling": sampling, **sections})


def converse(
    rollout: Scripted, tasks: Sequence[Task], n: int = 1, max_tokens: int = 64, context: int = 512, **environment: Any
) -> list[Episode]:
    config = settings(max_tokens, environment=environment)

    def make(index: int) -> Group:
        seeds = [sample_of(config.sampling, index, number) for number in range(n)]
        return Group([Episode((index, number), tasks[index], one) for number, one in enumerate(seeds)], (0, 0))

    with Conversations(config, rollout.tokenizer, context) as conversations:
        stream = GroupStream(rollout, conversations, lambda group: setattr(group, "is_informative", True))
        groups, _ = stream.run(make, len(tasks), len(tasks))
    episodes = [episode for group in groups for episode in group.episodes]
    for episode in episodes:
        if episode.turns and not episode.error:
            assert episode.trajectory is not None and episode.trajectory.token_ids == tuple(episode.output)
    return episodes


@pytest.mark.parametrize("failure_value", [None, -1.0])
def test_samples_of_a_step(failure_value: float | None) -> None:
    """Conversations that failed have no reward, or the configured one; the others of their group go on without them."""
    said = {}
    for base, texts in ((SEED, ("bye", "raises", "the red fox", "bye")), (1, ("fails", *["raises"] * 3))):
        step = derive_seed(base, base == 1, 0)
        said |= {derive_seed(step, 0, number): text for number, text in enumerate(texts)}
    rollout = Scripted(lambda prompt, sampling: said.get(sampling.seed, "bye"))
    config = settings(data={"n": 4}, trainer={"prompts_per_step": 1}, reward={"failure_value": failure_value})
    tasks: Any = [Task(index, "Hi") for index in range(9)]
    stream = TaskStream(tasks, 0, lambda prompt: 1, 100, shuffle=False)
    with Conversations(config, rollout.tokenizer, 512) as conversations:
        maker = ExperienceMaker(config, make_recipe(config), stream, conversations)
        mixed = maker.collect(rollout, config.sampling, 0)
        failed = maker.collect(rollout, replace(config.sampling, seed=1), 1)
    (reason,) = mixed.failures["reward"]
    assert re.fullmatch(
        r"tests.fakes.environments:Echo: RuntimeError: no such move \(environments.py, line \d+\)", reason
    )
    assert [one.reward for one in mixed.samples] == [0.0, *([] if failure_value is None else [-1.0]), 1.0, 0.0]
    own = [int(one.loss_mask.sum()) for one in mixed.samples if one.reward == 1.0]
    words = len(rollout.tokenizer("the red fox bye")["input_ids"])
    assert own[0] >= words and any(not one.loss_mask.all() for one in mixed.samples)
    assert dict(mixed.failures["reward"]) == {reason: 1} and mixed.scored == 3 and not mixed.is_unusable
    assert mixed.turns == 5 and not mixed.failures["rollout"]
    assert dict(failed.failures["rollout"]) == {"no room": 1} and dict(failed.failures["reward"]) == {reason: 3}
    assert failed.is_unusable and len(failed.samples) == (0 if failure_value is None else 3)


def one(*turns: str, **settings: Any) -> Episode:
    return converse(Scripted(script(*turns)), [Task(0, "Hi", "scored")], **settings)[0]


def test_own_tokens_and_those_of_the_environment_are_told_apart() -> None:
    rollout = Scripted(script("the red fox", "bye"))
    (episode,) = converse(rollout, [Task(0, "Hi", None)])
    words, number = rollout.tokenizer, episode.sampling.seed % 97
    messages = [
        {"role": "user", "content": f"Hi {number}"},
        {"role": "assistant", "content": "the red fox"},
        {"role": "user", "content": f"{number}: the red fox"},
    ]
    expected = [*encode_prompt(words, messages, True), *words("bye<|eos|>")["input_ids"]]
    assert [*episode.prompt, *episode.output] == expected
    whole = episode.joined("text")
    assert words.decode(episode.own_token_ids) == "the red fox<|eos|>bye<|eos|>"
    lengths = [len(turn.token_ids) for turn in episode.turns]
    between = len(episode.output) - sum(lengths)
    assert list(whole.loss_mask) == [True] * lengths[0] + [False] * between + [True] * lengths[1]
    assert whole.logprobs == (*episode.turns[0].logprobs, *[0.0] * between, *episode.turns[1].logprobs)
    assert episode.reward == 1.0 and episode.finish_reason == "stop"
    assert whole.prompt_token_ids == episode.prompt and whole.num_own_tokens == sum(lengths)
    assert whole.stats == RequestStats(4, 6, 2, 2, {"ngram": (6, 2)})
    assert (whole.weight_version, whole.versions) == (4, ())


def test_seeds_follow_from_sample_and_turn_and_sessions_from_the_sample() -> None:
    rollout = Scripted(script("a", "b", "bye"))
    episodes = converse(rollout, [Task(0, "Hi"), Task(1, "Ho")], n=2)
    assert [episode.place for episode in episodes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    sessions: dict[str, list[int]] = {}
    for _, sampling, session in rollout.asked:
        sessions.setdefault(session, []).append(sampling.seed)
    first = [derive_seed(SEED, *episode.place) for episode in episodes]
    assert sorted(sessions.values()) == sorted(
        [seed, derive_seed(seed, 1, 0), derive_seed(seed, 2, 0)] for seed in first
    )
    assert rollout.progress == (4, 4)


def test_versions_of_the_weights_are_those_of_the_turns() -> None:
    episode = Episode((0, 0), Task(0, "Hi"), SamplingParams())

    def turn(tokens: int, version: int, versions: tuple[tuple[int, int], ...] = ()) -> Trajectory:
        return trajectory(range(tokens), weight_version=version, versions=versions)

    episode.parts += [turn(4, 2), [9, 9], turn(5, 3, ((2, 1),)), [9], turn(2, 3)]
    whole = episode.joined("")
    assert (whole.versions, whole.weight_version) == (((2, 7),), 3)


@pytest.mark.parametrize(
    ("settings", "turns", "own"),
    [
        ({"max_turns": 2}, 2, None),
        ({"max_tokens": 9}, None, 9),
        ({"turn_tokens": 3, "max_turns": 3}, 3, 9),
        ({"context": 40}, None, None),
    ],
)
def test_a_conversation_ends_with_its_budget(settings: dict[str, int], turns: int | None, own: int | None) -> None:
    episode = one("the red fox sleeps", **settings)
    assert not episode.failure and episode.finish_reason == "length"
    assert turns is None or len(episode.turns) == turns
    assert own is None or len(episode.own_token_ids) == own
    assert len(episode.prompt) + len(episode.output) <= settings.get("context", 512)
    assert episode.parts[-1] is episode.turns[-1], "it ends with a turn of the model"
    assert episode.reward == sum(range(len(episode.turns))), "what was given so far"


def test_a_turn_that_is_cut_is_ended_by_the_template() -> None:
    episode = one("the red fox sleeps", "bye", turn_tokens=2)
    eos = load_tokenizer(str(tiny.tiny_target())).eos_token_id
    begin = len(episode.turns[0].token_ids)
    assert begin == 2 and episode.output[begin] == eos and not episode.joined("").loss_mask[begin]


FAILURES = {
    "raises": "RuntimeError: no such move",
    "hangs": "took longer than environment.timeout_s (6 s)",
    "dies": "its process died 3 times",
    "none": "ValueError: step returned None where a Reply belongs",
    "reset fails": "RuntimeError: no board",
}


def test_a_failure_costs_its_sample(tmp_path: Path) -> None:
    """The others of the same processes go on; one whose process died once does so, too."""
    words = load_tokenizer(str(tiny.tiny_target()))
    names = [*FAILURES, "fine", "dies once"]

    def says(prompt: list[int], sampling: SamplingParams) -> str:
        text = words.decode(prompt)
        if text.count(tiny.ASSISTANT) == 1:
            return "fine"
        task = next(name for name in sorted(names, key=len, reverse=True) if f"{name} task" in text)
        return "bye" if text.count(tiny.ASSISTANT) == 3 else task

    tasks = [
        Task(index, f"{name} task", metadata={"reset": name.removeprefix("reset ")}) for index, name in enumerate(names)
    ]
    episodes = converse(Scripted(says), tasks, timeout_s=6.0, options={"marks": str(tmp_path)})
    for name, episode in zip(names, episodes, strict=True):
        turns = {"fine": 3, "dies once": 3, "reset fails": 0}.get(name, 2)
        failure = FAILURES.get(name, "")
        without_place = re.sub(r" \(environments.py, line \d+\)$", "", episode.failure)
        assert without_place == (f"tests.fakes.environments:Echo: {failure}" if failure else "")
        assert len(episode.turns) == turns and episode.environment_s > 0 and (episode.reward == 3.0) == (not failure)
    closed = list(tmp_path.glob("closed-*"))
    assert len(closed) == len(names) - 1, "each instance that was made"


def test_turns_that_fail_and_prompts_without_room() -> None:
    episode = one("a", "fails")
    assert episode.error == "no room" and not episode.failure and len(episode.turns) == 1
    episode = one("bye", context=4)
    assert "leaves no room for an output" in episode.failure and not episode.turns
    with pytest.raises(ActorLostError):  # without verifiers the rollout ends
        one("a", "lost")


def test_conversations_that_are_not_needed_are_ended_and_their_environments_closed(tmp_path: Path) -> None:
    """Those of the tasks behind the first one, which would never end, when that has ended."""
    words = load_tokenizer(str(tiny.tiny_target()))

    def says(prompt: list[int], sampling: SamplingParams) -> str:
        text = words.decode(prompt)
        return "bye" if "short" in text and text.count(tiny.ASSISTANT) == 4 else "a"

    environment = {"options": {"marks": str(tmp_path)}, "max_turns": 10_000, "keep_outputs": False}
    config, tasks = settings(100_000, environment=environment), [Task(0, "short"), Task(1, "long"), Task(2, "long")]
    rollout = Scripted(says)

    def make(index: int) -> Group:
        seeds = [sample_of(config.sampling, index, number) for number in range(2)]
        return Group([Episode((index, number), tasks[index], one) for number, one in enumerate(seeds)], (0, 0))

    with Conversations(config, rollout.tokenizer, 10**6) as conversations:
        stream = GroupStream(rollout, conversations, lambda group: setattr(group, "is_informative", True))
        counted, others = stream.run(make, 1, 3, 1 / 3)
    begun = [episode for group in (*counted, *others) for episode in group.episodes if episode.state is not None]
    closed = {int(mark.name.split("-")[1]): int(mark.name.split("-")[2]) for mark in tmp_path.glob("closed-*")}
    assert len(counted) == 1 and len(others) == 2 and len(begun) > 2
    assert {episode.sampling.seed for episode in begun} == set(closed)
    assert all(closed[one.sampling.seed] >= len(one.turns) - 1 for one in begun), "the last state is closed"
    assert all(one.trajectory is None for group in others for one in group.episodes)
    assert stream.tokens == sum(len(one.own_token_ids) for group in (*counted, *others) for one in group.episodes)


def test_an_interruption_does_not_wait_for_environments(tmp_path: Path) -> None:
    def interrupt() -> None:
        end = time.monotonic() + 60.0
        while not list(tmp_path.iterdir()) and time.monotonic() < end:
            time.sleep(0.02)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes no wait of the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        one("hangs", timeout_s=3600.0, options={"marks": str(tmp_path)})
    thread.join()
