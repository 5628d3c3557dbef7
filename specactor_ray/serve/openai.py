"""OpenAI's endpoints, with vLLM's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        """The server answers."""
        return {"status": "ok"}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        card = {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "specactor",
            "root": service.model,
            "parent": None,
            "max_model_len": service.context,
        }
        return {"object": "list", "data": [card]}

    return routes
