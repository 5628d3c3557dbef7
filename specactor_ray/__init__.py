"""specactor_ray: lossless decoupled speculative decoding for RL rollouts, on Ray.

`import specactor_ray` loads nothing else; ray, torch and transformers are imported with the first use of `Rollout`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specactor_ray.core.types import SamplingParams
    from specactor_ray.rollout.actor import RolloutActor
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import Trajectory

__version__ = "0.1.0"
__all__ = ["Rollout", "RolloutActor", "SamplingParams", "Trajectory", "__version__"]


_PLACES = {
    "Rollout": "specactor_ray.rollout.rollout",
    "RolloutActor": "specactor_ray.rollout.actor",
    "SamplingParams": "specactor_ray.core.types",
    "Trajectory": "specactor_ray.rollout.trajectory",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'specactor_ray' has no attribute {name!r}")
