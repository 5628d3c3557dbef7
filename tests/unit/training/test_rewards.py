"""Reward functions and how they are found."""

from __future__ import annotations

import pytest

from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.errors import ConfigError
from specactor_ray.training.rewards import REWARDS, RewardSample, Scorer, extract_answer, find_reward


def sample(text: str, answer: str | None = None, **values: object) -> RewardSample:
    return RewardSample("prompt", text, text.strip(), answer, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["exact_match"])
def test_nothing_is_right_without_a_reference_answer(name: str) -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        REWARDS[name](sample(""))


def test_exact_match_and_length() -> None:
    assert REWARDS["exact_match"](sample(" 42\n", "42 ")) == 1.0
    assert REWARDS["exact_match"](sample("42.", "42")) == 0.0
    assert REWARDS["length"](sample("x", token_ids=(1, 2, 3), max_tokens=12)) == 0.25


@pytest.mark.parametrize(
    ("given", "gold", "score"), [("$\\frac{1}{2}$", "0.5", 1.0), ("The answer is 7", "8", 0.0), ("", "8", 0.0)]
)
def test_math(given: str, gold: str, score: float) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert REWARDS["math"](sample(given, gold)) == score


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    entry = gym.create_dataset("chain_sum", seed=1, size=3)[0]
    metadata = {"entry": entry}
    assert REWARDS["reasoning_gym"](sample(entry["answer"], metadata=metadata)) == 1.0
    assert REWARDS["reasoning_gym"](sample("nothing of the sort", metadata=metadata)) < 1.0


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        (None, "so 3 or <answer>4</answer>"),
        (r"<answer>(.*?)</answer>", "4"),
        (r"\d+", "4"),
        (r"none (\d+)", ""),
    ],
)
def test_extract_answer(pattern: str | None, answer: str) -> None:
    assert extract_answer("  so 3 or <answer>4</answer> ", pattern) == answer


def test_the_users_own_function() -> None:
    assert find_reward("tests.reward_functions:sleepy")(sample("the fox sleeps.")) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", "exact_match, length, math, reasoning_gym"),
        ("no.such.module:f", "cannot be imported"),
        ("tests.reward_functions:no_such_function", "cannot be imported"),
        ("tests.reward_functions:__name__", "not a function"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def test_a_weighted_sum() -> None:
    terms = [RewardFunctionConfig("exact_match", 2.0), RewardFunctionConfig("length", -1.0)]
    scorer = Scorer(RewardConfig(functions=terms))
    assert scorer(sample("42", "42", token_ids=(1,), max_tokens=4)) == 1.75


def test_a_reward_that_is_no_number_is_an_error() -> None:
    scorer = Scorer(RewardConfig(functions=[RewardFunctionConfig("tests.reward_functions:not_a_number")]))
    with pytest.raises(ValueError, match="nan"):
        scorer(sample("x"))
