"""Advantages and losses that are functions of the user: tried before the start, then used as the shipped ones are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.schema import Config
from specactor_ray.learner.algorithms import LossInputs, cispo_loss, function_of, rewarded_group, step_advantages
from specactor_ray.trainer.run import prepared
from tests.refused import refused
from tests.unit.learner.test_update import config as make_config
from tests.unit.learner.test_update import make_samples, trained

OWN = "tests.fakes.own_algorithms"
DOCUMENT = Path(__file__).parents[3] / "docs" / "training.md"


def settings(**algorithm: Any) -> Config:
    return from_mapping({"mode": "plain", "algorithm": algorithm, "data": {"path": "tasks.jsonl", "n": 4}})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("advantages=nowhere:at_all", "cannot be imported.*No module named 'nowhere'"),
        ("advantages=nearest", "is not known.*use one of group, leave_one_out, batch, package.module:function"),
        (f"advantages={OWN}:missing", "cannot be imported.*no attribute 'missing'"),
        (f"advantages={OWN}:not_callable", "TypeError: 'float' object is not callable"),
        (f"advantages={OWN}:raises", r"RuntimeError: lost \(own_algorithms.py, line \d+\)"),
        (f"advantages={OWN}:of_one_group", "advantages of 1 groups, and there are 3"),
        (f"advantages={OWN}:of_one_output", r"shape \(1,\) for a group that needs \(3,\), or \(3, 4\)"),
        (f"advantages={OWN}:of_few_tokens", r"shape \(3, 1\) for a group that needs"),
        (f"advantages={OWN}:divided_by_zero", "an advantage that is not finite"),
        (f"advantages={OWN}:nothing", "all advantages are 0"),
        ("loss=clipp", "is not known.*use one of clip, sequence_clip, cispo, package.module:function"),
        (f"loss={OWN}:raises", r"RuntimeError: lost"),
        (f"loss={OWN}:mean", r"the loss has the shape \(\), and the log-probabilities \(4, 4\)"),
        (f"loss={OWN}:without_metrics", "too many values to unpack"),
        (f"loss={OWN}:without_gradient", "no gradient with respect to the log-probabilities"),
        (f"loss={OWN}:of_others_gradient", "no gradient with respect to the log-probabilities"),
        (f"loss={OWN}:infinite", "the loss is not finite"),
        (f"loss={OWN}:infinite_gradient", "the gradient of the loss is not finite"),
        (f"loss={OWN}:of_a_known_name", "the metric entropy has the name of another one"),
        (f"loss={OWN}:of_one_number", r"the metric ratio has the shape \(\)"),
    ],
)
def test_functions_that_cannot_be_trained_by_are_refused_before_the_start(name: str, reason: str) -> None:
    key, value = name.split("=")
    with refused(f"algorithm.{key}") as caught:
        prepared(settings(**{key: value}))
    assert re.search(reason, str(caught.value))


def test_functions_are_used_as_they_are() -> None:
    recipe = make_recipe(settings(advantages=f"{OWN}:by_place"))
    groups = [rewarded_group(recipe, [1.0] * len(lengths), lengths, 32) for lengths in ([1, 3], [2])]
    first, second = step_advantages(groups, recipe)
    assert first[1, :3].tolist() == [100.0, 101.0, 102.0] and second[0, :2].tolist() == [1000.0, 1001.0]

    _, shipped = trained(make_config(name="grpo"), make_samples(), steps=1)
    _, own = trained(make_config(name="grpo", loss=f"{OWN}:likelihood"), make_samples(), steps=1)
    assert own["grad_norm"] == pytest.approx(shipped["grad_norm"], rel=1e-5), "the ratio is 1"
    assert own["ratio"] == pytest.approx(1.0) and "clip_fraction" not in own


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REINFORCE++ with the group's mean as its baseline; CISPO by another name."""
    (code,) = re.findall(r"```python\n(# my_algorithm\.py\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_algorithm.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)
    config = settings(advantages="my_algorithm:baseline", loss="my_algorithm:capped", clip_high=1.0)
    recipe = make_recipe(prepared(config))
    groups = [rewarded_group(recipe, rewards, [4] * len(rewards), 32) for rewards in ([1.0, 2.0, 3.0], [0.0, 5.0])]
    found = torch.cat(step_advantages(groups, recipe))
    centred = torch.tensor([-1.0, 0.0, 1.0, -2.5, 2.5], dtype=torch.float64)
    torch.testing.assert_close(found, centred / (centred.std() + 1e-6))

    logprobs = torch.randn(2, 3, requires_grad=True)
    values = [torch.randn(2, 3) for _ in range(3)]
    inputs = LossInputs(logprobs, *values, torch.ones(2, 3), torch.zeros(2, 3), 1.0, 1.0, 3.0)
    losses = [loss(inputs)[0].sum() for loss in (function_of(recipe, "loss"), cispo_loss)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, logprobs)[0] for loss in losses))
