"""Endpoints of other servers that are not supported: each is refused by name, and the error names a replacement."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter

from specactor_ray.serve.refusal import Refusal

BY_DIRECTORY = (
    'Weights come as the directory of a Hugging Face checkpoint: POST /update_weights {"weight_dir": ...} or '
    '/update_weights_from_disk {"model_path": ...}'
)
NO_ADAPTERS = f"adapters are not served; merge them into the weights. {BY_DIRECTORY}"


def refuse_paths(routes: APIRouter, absent: Mapping[str, str]) -> None:
    """Answer these paths with status 400 and the reason."""
    for path, reason in absent.items():
        routes.add_api_route(path, _refuser(path, reason), methods=["POST"], include_in_schema=False)


def _refuser(path: str, reason: str):  # type: ignore[no-untyped-def]
    async def refuse() -> None:
        raise Refusal(f"{path} is not available: {reason}")

    return refuse
