"""Endpoints that TRL's server mode (`trl.generation.vllm_client.VLLMClient`) calls besides OpenAI's to generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from specactor_ray.serve.sglang import server_args

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()

    @routes.get("/server_info")
    async def server_info(config_format: str = "text") -> dict[str, Any]:
        """Server information in vLLM's form (log-probabilities are those after temperature) and in SGLang's."""
        del config_format
        model = {"model": service.model, "max_model_len": service.context, "logprobs_mode": "processed_logprobs"}
        return {"vllm_config": {"model_config": model, "weight_transfer_config": None}, **server_args(service)}

    @routes.get("/get_world_size")
    async def world_size(include_dp: bool = True) -> dict[str, int]:
        """Number of ranks of all verifiers."""
        del include_dp
        target = service.rollout.config.target
        return {"world_size": target.replicas * max(1, target.gpus)}

    return routes
