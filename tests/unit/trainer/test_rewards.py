"""Reward functions and how they are found."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.load import from_mapping, load_config
from specactor_ray.config.rules import validate_training
from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.trainer.data import has_reference, open_source
from specactor_ray.trainer.rewards import (
    NEED_ANSWERS,
    REWARDS,
    RewardSample,
    Score,
    Scorer,
    extract_answer,
    find_reward,
    reward_sample,
)
from tests.fakes.reward_forms import RETURNED
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
    score = Scorer(RewardConfig(functions=terms)).score(sample("42", "42", token_ids=(1,), max_tokens=4))
    assert score == Score(1.75, {"exact_match": 1.0, "length": 0.25})
    for name, weight, number in (
        ("tests.fakes.reward_functions:not_a_number", 1.0, "nan"),
        ("length", 1e19, r"1e\+18"),
    ):
        scorer = Scorer(RewardConfig(functions=[RewardFunctionConfig(name, weight)]))
        with pytest.raises(ValueError, match=number):
            scorer.score(sample("x", token_ids=(1,)))


FORMS = "tests.fakes.reward_forms:"


def scorer_of(*names: str) -> Scorer:
    return Scorer(RewardConfig([RewardFunctionConfig(name) for name in names]))


NUMBERS = {"float": 0.25, "int": 1.0, "true": 1.0, "fraction": 0.25, "float32": 0.25, "int64": -2.0, "bool_": 1.0}
NUMBERS |= {"array0": 0.25, "tensor0": 0.25}
NONE = "ValueError: no reward function applies to it: each returned None"
"""For a batch; a function of one output has no such value."""


@pytest.mark.parametrize("form", ["value_of", "batch_of", "compute_score"])
@pytest.mark.parametrize("value", [name for name in RETURNED if not name.startswith("whole")])
def test_what_counts_as_a_number(value: str, form: str) -> None:
    """In all forms; a bad value costs its own sample, not the others of its batch."""
    samples = [sample("x", value, metadata={"data_source": value})] * 2
    (score, problem), (other, _) = scorer_of(FORMS + form)(samples)
    if value in NUMBERS:
        assert score == Score(NUMBERS[value], {FORMS + form: NUMBERS[value]}) and not problem
        assert all(type(one) is float for one in (score.reward, *score.rewards.values()))
    elif (value, form) == ("dict", "compute_score"):
        assert score is None  # it has a data source of this name
    elif (value, form) == ("none", "batch_of"):
        assert problem == NONE
    else:
        assert score is None and re.match(rf"ValueError: {FORMS}{form} \(reward_.*\) returned .*, which is no", problem)
    assert (form != "batch_of") or other == Score(0.5, {FORMS + form: 0.5})


def test_errors_without_a_text_cost_their_own_sample_alone() -> None:
    samples = [sample(text, metadata={"level": "easy"}) for text in ("no text", "fine", "half")]
    outcomes = scorer_of(FORMS + "raises_for", FORMS + "above_mean")(samples)
    assert [score is not None for score, _ in outcomes] == [False, True, False]
    assert outcomes[0][1].startswith("NoTextError: its text raises RuntimeError (reward_forms.py, line ")
    assert outcomes[2][1].startswith(r"ValueError: \ud83d (reward_forms.py, line ") and outcomes[2][1].isprintable()


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("whole none", "returned None for 2 completions"),
        ("whole number", "returned 0.5 for 2 completions"),
        ("whole text", "returned '12' for 2 completions"),
        ("whole dict", r"returned \{'a': 1.0, .* for 2 completions"),
        ("whole short", "returned 1 values for 2 completions"),
        ("whole long", "returned 3 values for 2 completions"),
        ("whole tensor", [1.0, 0.5]),
        ("whole array", [1.0, 0.5]),
        ("whole tuple", [1.0, None]),
        ("whole generator", [0.0, 1.0]),
    ],
)
def test_what_a_batch_may_return(value: str, outcome: str | list[float | None]) -> None:
    outcomes = scorer_of(FORMS + "batch_of")([sample("x", value)] * 2)
    if isinstance(outcome, str):
        assert len({problem for _, problem in outcomes}) == 1 and re.search(outcome, outcomes[0][1])
    else:
        assert [score and score.reward for score, _ in outcomes] == outcome


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prompt", ["hi", MESSAGES])
def test_functions_of_trl_beside_one_of_one_output(prompt: Any) -> None:
    """Each has its value, None where it does not apply. The first one reads messages alone."""
    pytest.importorskip("trl", reason="TRL is not installed")
    rows = [("<think>a</think>b", 1.0, 1.0, 0.0, 0.0), ("b", 0.0, 0.0, 1.0, 0.25), ("<think>a", 0.0, 0.0, 0.0, 0.5)]
    names = ("trl.rewards:think_format_reward", FORMS + "above_mean", "exact_match", FORMS + "lengths")
    first = int(prompt == "hi")
    for level in ("easy", "hard"):
        samples = [
            replace(sample(row[0], "b", token_ids=tuple(range(number)), metadata={"level": level}), prompt=prompt)
            for number, row in enumerate(rows)
        ]
        found = [score.rewards for score, _ in scorer_of(*names[first:])(samples)]
        expected = [dict(zip(names[first:], row[first + 1 :], strict=True)) for row in rows]
        if level == "hard":
            expected = [one | {FORMS + "above_mean": None} for one in expected]
        assert found == expected


def test_a_function_of_verl_gets_the_columns_that_verl_reads() -> None:
    metadata = {"data_source": "dict", "reward_model": {"ground_truth": "72"}, "extra_info": {"index": 3}}
    ((score, _),) = scorer_of(FORMS + "compute_score")([sample("72", None, metadata=metadata)])
    assert score.reward == 1.0
    ((score, _),) = scorer_of(FORMS + "compute_score")(
        [sample("72", "71", metadata={"data_source": "dict", "index": 3})]
    )
    assert score.reward == 0.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("takes_two", "missing a required argument: 'answer', completions, solution_str"),
        ("RETURNED", "is not a function"),
    ],
)
def test_functions_of_another_form_are_refused(name: str, problem: str) -> None:
    with refused("reward.functions", *problem.split(", ")):
        scorer_of(FORMS + name)
    with refused("reward.functions", "length is there twice"):
        scorer_of("length", "length")


def test_an_argument_that_is_missing_is_named() -> None:
    ((_, problem),) = scorer_of(FORMS + "uses_trainer_state")([sample("x", metadata={"level": "easy"})])
    assert "missing 1 required positional argument: 'trainer_state'" in problem


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


def test_the_recipe_for_gsm8k(tmp_path: Path) -> None:
    """On a file with the columns of the data set."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    solution = "She sold 48 / 2 = <<48/2=24>>24 clips.\n#### 1,072"
    file = tmp_path / "gsm8k.parquet"
    datasets.Dataset.from_list([{"question": "How many clips?", "answer": solution}]).to_parquet(file)
    config = load_config("train_gsm8k", [f"data.path={file}"])
    task, score = open_source(config.data, 0)[0], Scorer(config.reward).score
    assert task.answer == "1072" and str(task.prompt).startswith("How many clips? ")
    outputs = {
        "48 / 2 = 24\n#### 1072": 1.0,
        "#### 1,072": 1.0,
        "####$1072.": 1.0,
        "#### 107": 0.0,
        "1072": 0.0,
        solution: 1.0,
    }
    assert {text: score(reward_sample(task, text, (1,), "stop", 9)).reward for text in outputs} == outputs


def test_names_that_are_refused() -> None:
    for name in ("no.such.module:f", "tests.fakes.reward_functions:no_such", "tests.fakes.reward_functions:__name__"):
        with refused("reward.functions", name):
            find_reward(name)
