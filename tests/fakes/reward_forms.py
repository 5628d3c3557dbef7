"""Reward functions in the forms of TRL and verl, and values that functions return."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from specactor_ray.trainer.rewards import RewardSample


def lengths(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Of completions alone."""
    return [len(token_ids) / 4 for token_ids in completion_ids]


async def above_mean(completions: list, level: list[str], prompts: list, **columns: object) -> list:
    """By the other completions, for one level only."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    sizes = [len(text) for text in texts]
    return [size * len(sizes) > sum(sizes) if at == "easy" else None for size, at in zip(sizes, level, strict=True)]


def rank(completions: list[str]) -> list[float]:
    """By the number of completions, and the place among them."""
    return [1000.0 * len(completions) + 100.0 * place + len(text) for place, text in enumerate(completions)]


def batch_of(completions: list, answer: list[str], **columns: object) -> object:
    """What the answer says, for every completion alike."""
    value = RETURNED[answer[0]]
    return value if answer[0].startswith("whole") else [value] * (len(completions) - 1) + [0.5]


def uses_trainer_state(completions: list, trainer_state: object, **columns: object) -> list[float]:
    return [1.0] * len(completions)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> object:
    """A value by the data source."""
    if data_source == "dict":
        return {"score": float(solution_str == ground_truth), "acc": True, "index": (extra_info or {})["index"]}
    return RETURNED[data_source]


def value_of(sample: RewardSample) -> object:
    return RETURNED[sample.answer or ""]


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raises_for(sample: RewardSample) -> float:
    """An error that has no text, or one that no file takes."""
    if sample.text == "no text":
        raise NoTextError
    if sample.text == "half":
        raise ValueError("\ud83d")
    return 1.0


def takes_two(text: str, answer: str) -> float:
    return 1.0


RETURNED: dict[str, Any] = {
    "float": 0.25,
    "int": 1,
    "true": True,
    "fraction": Fraction(1, 4),
    "float32": np.float32(0.25),
    "int64": np.int64(-2),
    "bool_": np.bool_(True),
    "array0": np.array(0.25),
    "tensor0": torch.tensor(0.25),
    "masked": np.ma.masked,
    "nan": float("nan"),
    "inf": -math.inf,
    "text": "1.0",
    "bytes": b"1.0",
    "text0": np.array("1.0"),
    "array1": np.array([1.0]),
    "tensor1": torch.tensor([1.0]),
    "complex": 1j,
    "list": [1.0],
    "dict": {"score": 1.0},
    "none": None,
    "whole none": None,
    "whole number": 0.5,
    "whole text": "12",
    "whole dict": {"a": 1.0, "b": 2.0},
    "whole short": [1.0],
    "whole long": [1.0, 0.0, 1.0],
    "whole tensor": torch.tensor([1.0, 0.5]),
    "whole array": np.array([1.0, 0.5]),
    "whole tuple": (1.0, None),
    "whole tuple of 3": (True, None, 0.5),
    "whole generator": range(2),
}
"""Name → what a function returns."""
