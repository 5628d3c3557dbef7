"""specactor_ray: lossless decoupled speculative decoding for RL rollouts, on Ray.

`import specactor_ray` loads none of ray, torch or transformers; they come with the first use of `Rollout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specactor_ray.messages import SamplingParams

if TYPE_CHECKING:
    from specactor_ray.rollout.engine import Engine
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import Trajectory

__version__ = "0.1.0"
__all__ = ["Engine", "Rollout", "SamplingParams", "Trajectory", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from specactor_ray.rollout.engine import Engine

        return Engine
    if name == "Rollout":
        from specactor_ray.rollout.rollout import Rollout

        return Rollout
    if name == "Trajectory":
        from specactor_ray.rollout.trajectory import Trajectory

        return Trajectory
    raise AttributeError(f"module 'specactor_ray' has no attribute {name!r}")
