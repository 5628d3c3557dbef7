"""The tasks of `conf/bench_train_renames.yaml` are those of the script that makes its model."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.bench.demo import similarity
from specactor_ray.rollout.prompts import read_jsonl
from specactor_ray.trainer.rewards import RewardSample

_SPEC: Any = importlib.util.spec_from_file_location(
    "warm_start", Path(__file__).parents[3] / "scripts" / "warm_start.py"
)
warm_start = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(warm_start)


def test_the_shipped_tasks_are_those_of_the_script() -> None:
    assert [row for _, row in read_jsonl("conf/prompts/code_renames.jsonl")] == warm_start.held_out_tasks()


@pytest.mark.parametrize("functions", [1, 4, 25])
def test_an_answer_is_code_with_one_name_replaced(functions: int) -> None:
    task = warm_start.make_task(random.Random(functions), functions)
    old, new = re.findall("`(.*?)`", task["prompt"])
    code = task["prompt"].partition("\n\n")[2]
    compile(task["answer"], "answer", "exec")
    assert task["answer"].count("def ") == functions and not re.search(rf"\b{old}\b", task["answer"])
    assert re.sub(rf"\b{new}\b", old, task["answer"]) == code
    assert similarity(RewardSample("", f"\n{task['answer']}\n", task["answer"])) == 1.0
    assert 0.0 < similarity(RewardSample("", code, task["answer"])) < 1.0
    assert similarity(RewardSample("", "", task["answer"])) == 0.0
