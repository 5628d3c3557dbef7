"""Reward functions and how they are found."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import validate_training
from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.trainer.data import has_reference
from specactor_ray.trainer.rewards import (
    NEED_ANSWERS,
    REWARDS,
    RewardSample,
    Score,
    Scorer,
    extract_answer,
    find_reward,
)
from tests.refused import refused

BLANK = " \t\n\u00a0\u2003\u3000\u200b\ufeff\u00ad\u2800\u3164\ufe0f\u0301"
EXPENSIVE = (
    "9^{9^{9}}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "10^{-10^{10}}",
    "1000000000!",
    r"\binom{10^{10}}{10^5}",
    r"\sum_{i=1}^{100000} \frac{1}{i}",
    r"7^{10^{10}} \mod 3",
    r"\gamma(10^{10})",
    r"\log_{2}{2^{10^{10}}}",
    r"\sqrt{7^{10000}+1}",
    "(x+1)^{63}(x+2)^{63}(x-y)^{63}",
    "(" * 2000 + "1" + ")" * 2000,
)


def sample(text: str, answer: str | None = None, **values: object) -> RewardSample:
    return RewardSample("prompt", text, answer, response=text.strip(), **values)  # type: ignore[arg-type]


def math_answers() -> list[tuple[str, str, str]]:
    """Reference, output and reward; `-`: the reference is unusable."""
    lines = (Path(__file__).parent / "math_answers.tsv").read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")[1:]) for line in lines[1:]]  # type: ignore[misc]


@pytest.mark.parametrize(("reference", "output", "reward"), math_answers())
def test_math(reference: str, output: str, reward: str) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    if reward == "-":
        with pytest.raises(ValueError, match="reference"):
            REWARDS["math"](sample(output, reference))
    else:
        assert REWARDS["math"](sample(output, reference)) == float(reward)


@pytest.mark.parametrize("answer", EXPENSIVE)
def test_what_would_take_long_to_evaluate_is_wrong_unevaluated(answer: str) -> None:
    """Without the refusal each of them takes longer than anyone waits."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert REWARDS["math"](sample(f"\\boxed{{{answer}}}", "5")) == 0.0


def test_functions_and_their_weighted_sum() -> None:
    assert REWARDS["exact_match"](sample(" 42\n", "42 ")) == 1.0 and REWARDS["exact_match"](sample("42.", "42")) == 0.0
    with pytest.raises(ValueError, match="reference"):
        REWARDS["exact_match"](sample(""))
    terms = [RewardFunctionConfig("exact_match", 2.0), RewardFunctionConfig("length", -1.0)]
    score = Scorer(RewardConfig(functions=terms))(sample("42", "42", token_ids=(1,), max_tokens=4))
    assert score == Score(1.75, {"exact_match": 1.0, "length": 0.25})
    for name, weight, number in (
        ("tests.fakes.reward_functions:not_a_number", 1.0, "nan"),
        ("length", 1e19, r"1e\+18"),
    ):
        scorer = Scorer(RewardConfig(functions=[RewardFunctionConfig(name, weight)]))
        with pytest.raises(ValueError, match=number):
            scorer(sample("x", token_ids=(1,)))


@given(
    text=st.text(st.sampled_from(BLANK)),
    answer=st.one_of(
        st.text(max_size=8), st.text(st.sampled_from(BLANK)), st.sampled_from(["42", "\\boxed{}", "0", "{}"])
    ),
    pattern=st.sampled_from([None, r"answer: (\d+)", r"\d*", r"(\d)?", r"(.*)", ""]),
    name=st.sampled_from([name for name in REWARDS if name != "math" or importlib.util.find_spec("math_verify")]),
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_nothing_earns_nothing(text: str, answer: str, pattern: str | None, name: str) -> None:
    one = replace(sample(text, answer, token_ids=(2,), max_tokens=4), response=extract_answer(text, pattern))
    problem, reward = "", None
    try:
        reward = REWARDS[name](one)
    except ValueError as error:  # the sample is left out
        problem = str(error)
    assert reward == 0.0 or (name in NEED_ANSWERS and "reference" in problem)
    assert reward is None or name not in NEED_ANSWERS or has_reference(answer)


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    entry = gym.create_dataset("chain_sum", seed=1, size=3)[0]
    right, wrong = (sample(text, metadata={"entry": entry}) for text in (entry["answer"], "nothing of the sort"))
    assert REWARDS["reasoning_gym"](right) == 1.0 > REWARDS["reasoning_gym"](wrong)


def test_extract_answer() -> None:
    expected = {
        None: "so 3 or <answer>4</answer>",
        r"<answer>(.*?)</answer>": "4",
        r"none (\d+)": "",
        r"\d*": "4",
        r"(\d) or|answer": "",
    }
    assert {pattern: extract_answer("  so 3 or <answer>4</answer> ", pattern) for pattern in expected} == expected


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999}", "(" * 20_000 + ")" * 20_000], ids=str.__len__)
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    config = from_mapping({"mode": "plain", "data": {"n": 2}, "reward": {"answer_pattern": pattern}})
    with refused("reward.answer_pattern"):
        validate_training(config)


def test_the_recipe_for_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    (pattern,) = re.findall(r"'reward.answer_pattern=(.*?)'", page)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    score = Scorer(RewardConfig([RewardFunctionConfig("my_rewards:gsm8k")], answer_pattern=pattern))
    reference = "She sold 48 / 2 = <<48/2=24>>24 clips.\n#### 1,072"
    texts = ("It is 48, so 1072.", "**1,072**", "107", "none")
    assert [score(sample(text, reference)).reward for text in texts] == [1.0, 1.0, 0.0, 0.0]


def test_names_that_are_refused() -> None:
    for name in ("no.such.module:f", "tests.fakes.reward_functions:no_such", "tests.fakes.reward_functions:__name__"):
        with refused("reward.functions", name):
            find_reward(name)
