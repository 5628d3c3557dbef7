"""Endpoints that prime-rl adds to vLLM's (`vllm_rl.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.serve.absent import BY_DIRECTORY, NO_ADAPTERS, refuse_paths
from specactor_ray.serve.control import directory_of
from specactor_ray.serve.refusal import UNAVAILABLE, Refusal

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

_NO_BROADCAST = f'no weights are received over NCCL or NIXL; set weight_broadcast.type = "filesystem". {BY_DIRECTORY}'
_ABSENT = {
    "/init_broadcaster": _NO_BROADCAST,
    "/load_lora_adapter": NO_ADAPTERS,
    "/unload_lora_adapter": NO_ADAPTERS,
}


def router(service: Service) -> APIRouter:
    """The endpoints; `/update_weights` is among vLLM's."""
    routes = APIRouter()
    refuse_paths(routes, _ABSENT)

    @routes.get("/liveness")
    async def liveness() -> dict[str, str]:
        """The engine generates."""
        if not await service.control.is_live():
            raise Refusal("the engine does not answer", UNAVAILABLE)
        return {"status": "ok"}

    return routes


async def update_weights(service: Service, weight_dir: Any) -> dict[str, str]:
    """`/update_weights {"weight_dir"}`: running or paused requests continue with the new weights.

    Raises:
        Refusal: The weights do not fit, or there is no directory, as with NCCL.
    """
    if weight_dir is None:
        raise Refusal(f"weight_dir is null: {_NO_BROADCAST}", param="weight_dir")
    await service.control.update(directory_of(weight_dir, "weight_dir"), WeightPolicy.KEEP)
    return {"status": "ok"}
