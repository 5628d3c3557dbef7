"""Environments: the shipped ones, what a reply may be, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.config import Config, load_config
from specactor_ray.config.training_schema import EnvironmentConfig, RewardConfig, RewardFunctionConfig
from specactor_ray.core.errors import InputError, UserError
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.environment import (
    Calculator,
    Environment,
    EnvironmentWorker,
    Reply,
    Retry,
    Turn,
)
from specactor_ray.trainer.rewards import RewardSample
from specactor_ray.trainer.run import checked_tasks, prepared
from tests.fakes.environments import BAD_REPLIES
from tests.tiny import tiny_target

ECHO = "tests.fakes.environments:Echo"
ANSWER = r"-?\d+$"
NO_EXPRESSIONS = ['{"expression": ["1+1"]}', '{"expression": {"a": 1}}', '{"expression": null}', "[1]", '{"a": "1"}']


def turn(text: str, number: int = 0, is_last: bool = False, reward: float = 1.0) -> Turn:
    return Turn(text, (1,), number, is_last, "stop", lambda: reward)


def replied(environment: Environment, *turns: Turn) -> list[Reply]:
    """What an instance replies to each of these turns alone."""
    return [asyncio.run(environment.step(one)) for one in turns]


def test_arithmetic_and_what_is_none() -> None:
    values = {"2 * (3 + 4)": "14", " 7/2 ": "3.5", "6 / 2": "3", "-7 // 2 + 5 % 3": "-2", "1 / 3": "0.3333333333"}
    wrong = ("", "x", "1 +", "__import__('os')", "9 ** 9 ** 9", "1e400", "True", "'a' * 9", "1" * 300, "[1][0]")
    values |= dict.fromkeys(wrong, "error: not an arithmetic expression")
    for expression, value in values.items():
        (reply,) = replied(Calculator(), turn(f"<calc>{expression}</calc>"))
        assert reply == Reply([{"role": "user", "content": value}]), expression


def test_a_calculator_answers_calls_and_scores_what_is_none() -> None:
    turns = (turn("First <calc>3 + 4</calc>, then\n<calc>1 / 0</calc>"), turn("It is 7.", reward=0.5))
    assert replied(Calculator(), *turns, turn("<calc>3 + 4</calc>", is_last=True, reward=0.25)) == [
        Reply([{"role": "user", "content": "7\nerror: division by zero"}]),
        Reply(reward=0.5, done=True),
        Reply(reward=0.25, done=True),
    ]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 4"}}\n</tool_call>'
    other = "".join(f'<tool_call>{{"name": {name}</tool_call>' for name in ('"search"}', r'"\ud800"}', "3"))
    odd = [f'<tool_call>{{"name": "calculator", "arguments": {one}}}</tool_call>' for one in NO_EXPRESSIONS]
    (reply,) = replied(Calculator("tool_call", role="tool"), turn(call + other))
    answers = ("12", "error: there is no tool 'search'", r"error: there is no tool '\ud800'")
    assert reply.messages == [{"role": "tool", "content": answer} for answer in answers]
    for reply in replied(Calculator("tool_call"), *map(turn, odd)):
        assert reply.messages == [{"role": "user", "content": "error: not an arithmetic expression"}]


def test_wrong_answers_may_be_corrected() -> None:
    turns = (turn("7"), turn("8", reward=0.1), turn("7", 1), turn("8", 2, reward=0.1), turn("8", 0, True, 0.1))
    assert replied(Retry(tries=3, discount=0.5), *turns) == [
        Reply(reward=1.0, done=True),
        Reply([{"role": "user", "content": "That is not right. Tries left: 2. Give another answer."}]),
        Reply(reward=0.5, done=True),
        Reply(reward=0.025, done=True),
        Reply(reward=0.1, done=True),
    ]


def test_the_environment_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    module: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], module)  # type: ignore[index]
    game = module["GuessNumber"](highest=9)
    (first,) = asyncio.run(game.reset(Task(0, "unused"), seed=4))
    assert "from 1 to 9" in first["content"]
    *wrong, right, other = replied(game, *(turn(f"{n}.", n - 1) for n in range(1, game.number + 1)), turn("ten"))
    assert not any(reply.done for reply in wrong) and right == Reply(reward=1.0 / game.number, done=True)
    assert other == Reply(reward=-1.0, done=True)


def ask(name: str, method: str, *arguments: Any, options: dict[str, Any] | None = None) -> Any:
    """Answer of an environment, as in its process."""
    reward = RewardConfig([RewardFunctionConfig("exact_match")], answer_pattern=ANSWER)
    return EnvironmentWorker(EnvironmentConfig(name, options or {}), reward)((method, arguments))


def step(name: str, state: bytes, text: str, number: int = 0, answer: str | None = "7") -> Any:
    sample = RewardSample("p", text, answer, finish_reason="stop")
    return ask(name, "step", state, sample, (1, 2), number, False)


def test_turns_are_scored_by_the_reward_functions() -> None:
    """By the reward functions and the pattern of the configuration; their errors are the environment's failure."""
    state, _ = ask("retry", "reset", Task(0, "3 + 4", "7"), 1)
    assert step("retry", state, "it is 7")[1] == Reply([], 1.0, True)
    state, reply, rewards = step("retry", state, "it is 8")
    assert not reply.done and rewards == {"exact_match": 0.0}
    with pytest.raises(ValueError, match="reference"):
        step("retry", state, "8", 1, answer=None)


@pytest.mark.parametrize("text", [*BAD_REPLIES, "unpicklable"])
def test_bad_replies_are_named(text: str) -> None:
    state, _ = ask(ECHO, "reset", Task(0, "Hi"), 1)
    with pytest.raises((ValueError, InputError)):
        step(ECHO, state, text)


def check(config: Config) -> None:
    checked_tasks(resolve(prepared(config), Machine(2)))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("environment.name=calcs", "environment.name.*calculator, retry"),
        ("environment.name=tests.fakes.environments:Nothing", "environments:Nothing"),
        ("environment.name=tests.fakes.environments:NoStep", "no step"),
        ("environment.name=tests.fakes.environments:BAD_REPLIES", "BAD_REPLIES"),
        ("environment.options={trials: 2}", "tries, discount"),
        ("environment.options={tries: 0}", "tries"),
        ("environment.options={discount: '0.5'}", r"options.*discount"),
        ("environment.options={discount: .nan}", r"options.*discount"),
        ("environment.name=tests.fakes.environments:Echo", r"^environment.name: .*no board"),
        ("environment.name=tests.fakes.environments:Locked", r"^environment.name: .*cannot be kept"),
        ("environment.name=tests.fakes.environments:Speechless", r"^environment.name: .*KeyError"),
        ("data.chat=false", "data.chat"),
        ("environment={name: calculator, options: {role: 5}}", "role"),  # the template of the model has no such role
    ],
)
def test_refused_configurations(override: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        check(settings(tmp_path, override, answer="7", reset="fails" if "Echo" in override else ""))


def settings(tmp_path: Path, *overrides: str, **row: str) -> Config:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "Add 3 and 4.", **row}) + "\n")
    tasks = [f"data.path={tmp_path / 'tasks.jsonl'}", "data.n=4", f"target.model={tiny_target()}"]
    return load_config(None, ["mode=plain", *tasks, "environment.name=retry", *overrides])


def test_an_environment_of_ones_own_needs_no_answers_unless_it_scores(tmp_path: Path) -> None:
    (tmp_path / "others.jsonl").write_text('{"prompt": "Add 4 and 5."}\n')
    evaluation, echo = f"evaluation.path={tmp_path / 'others.jsonl'}", f"environment.name={ECHO}"
    check(settings(tmp_path, evaluation, echo))
    for overrides, row, problem in (
        ((), {}, r"data.path: .*line 1.*'answer'"),
        ((evaluation,), {"answer": "7"}, r"evaluation.path: .*line 1.*'answer'"),
        (("environment.name=tests.fakes.environments:Sums",), {}, "no reference answer"),
    ):
        with pytest.raises(UserError, match=problem):
            check(settings(tmp_path, *overrides, **row))


def test_a_failure_that_has_a_reward_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(settings(tmp_path, f"environment.name={ECHO}", "reward.failure_value=0", reset="fails"))
    assert "environment.name: " in caplog.text and "no board" in caplog.text
