"""Outputs of a rollout that never ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import Trajectory


def trajectory(token_ids: Sequence[int], place: tuple[int, int] = (0, 0), **fields: Any) -> Trajectory:
    """An output of these tokens; all else has a default."""
    defaults = {"prompt_token_ids": (1, 2), "text": "", "finish_reason": "stop", "sampling": SamplingParams()}
    logprobs = (0.0,) * len(token_ids)
    return Trajectory("r", *place, **{**defaults, "token_ids": tuple(token_ids), "logprobs": logprobs, **fields})
