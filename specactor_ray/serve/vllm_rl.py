"""vLLM's endpoints for reinforcement learning: token ids in and out, pauses, weights, sleep.

prime-rl, SkyRL and TRL's server mode call these, and a few of their own; some have SGLang's path beside vLLM's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response

from specactor_ray import __version__
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.handle import Token
from specactor_ray.sampling.dialect import Dialect
from specactor_ray.serve.outputs import Form, Part, answer, finite
from specactor_ray.serve.requests import (
    OPENAI,
    Directory,
    JsonObject,
    JsonRoute,
    Label,
    Refusal,
    RequestBody,
    TokenId,
    Wanted,
)
from specactor_ray.serve.service import Service, Serving

_BY_DIRECTORY = (
    'weights come as the directory of a Hugging Face checkpoint: POST /update_weights {"weight_dir": ...} or '
    '/update_weights_from_disk {"model_path": ...}. prime-rl: weight_broadcast.type = "filesystem"; slime: '
    "--update-weight-transport disk, without --update-weight-local-checkpoint-dir"
)
_NO_ADAPTERS = f"adapters are not served; merge them into the weights, and {_BY_DIRECTORY}"
_ABSENT = {
    **dict.fromkeys(("/init_weight_transfer_engine", "/collective_rpc", "/fetch_weights"), _BY_DIRECTORY),
    **dict.fromkeys(("/init_broadcaster", "/init_weights_update_group", "/pull_weights"), _BY_DIRECTORY),
    **dict.fromkeys(("/shutdown_weight_transfer_engine", "/start_draft_weight_update"), _BY_DIRECTORY),
    **dict.fromkeys(("/update_weights_from_tensor", "/update_weights_from_distributed"), _BY_DIRECTORY),
    "/release_kv_cache_memory": "POST /sleep frees the caches",
    **dict.fromkeys(("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter"), _NO_ADAPTERS),
}
"""Trainers' calls that are refused, and the replacement. Some trainers take status 404 as permission to go on."""
_SAMPLING = Dialect(
    known=OPENAI.known,
    ignored=(
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output"),
        *("flat_logprobs", "output_kind", "stream_interval", "skip_reading_prefix_cache"),
    ),
    neutral={
        **OPENAI.neutral,
        "min_tokens": (1,),
        "extra_args": tuple({"prl_compact_logprobs": one} for one in (True, False)),
    },
)
"""Every output has one token, so `min_tokens` 1 has no effect; in vLLM that token cannot end the output. `extra_args`
has prime-rl's form of log-probabilities."""
_IGNORED = ("reasoning_ended", "reasoning_parser_kwargs", "token_offsets", "parse_context")
"""Fields of a request that change no token id."""

Mode = Annotated[Literal["abort", "wait", "keep"], Query()]
router = APIRouter(route_class=JsonRoute)


async def _refuse(request: Request) -> None:
    path = request.scope["path"]
    raise Refusal(f"{path} is not available: {_ABSENT[path]}")


for _path in _ABSENT:
    router.add_api_route(_path, _refuse, methods=["POST"], include_in_schema=False)


# ---- generation ----


class VllmGenerateBody(RequestBody):
    """Body of `/inference/v1/generate`."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any]
    output_mode: Literal["tokens"] | None = None


@router.post("/inference/v1/generate")
async def generate_tokens(service: Serving, body: VllmGenerateBody, request: Request) -> Response:
    """Outputs of one prompt, as token ids."""
    service.require_model(body.model)
    if body.stream:
        raise Refusal("/inference/v1/generate has no stream; /v1/completions with return_token_ids has", param="stream")
    body.require_only(_IGNORED, "/inference/v1/generate")
    given = body.sampling_params
    if given.get("logprobs") == 1:  # trainers send it to get the sampled token's
        given = {**given, "logprobs": 0}
    submission = body.submission(request.headers, f"generate-tokens-{secrets.token_hex(16)}")
    form = VllmForm(service, body, service.wanted(given, _SAMPLING), submission["name"])
    return await answer(request, form, stream=False, **submission)


class VllmForm(Form):
    """Answers of `/inference/v1/generate`."""

    def __init__(self, service: Service, body: VllmGenerateBody, wanted: Wanted, name: str) -> None:
        super().__init__(service, [body.token_ids], wanted)
        self._name, self._prompt_ids = name, body.token_ids if body.return_token_ids else None

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {
            "request_id": self._name,
            "output_mode": "tokens",
            "model": self.service.model,
            "choices": list(map(self._choice, parts)),
            "usage": self.usage(part.output for part in parts),
            "prompt_logprobs": self.prompt_report(parts[0].output),
            "prompt_token_ids": self._prompt_ids,
            "kv_transfer_params": None,
        }

    def _choice(self, part: Part) -> dict[str, Any]:
        choice = self.frame(part) | {"routed_experts": None}
        if self.wanted.logprobs is not None:
            choice["logprobs"] = {"content": list(map(_reported, part.tokens))}
        return choice


def _reported(token: Token) -> dict[str, Any]:
    """As in vLLM, the sampled token is the first of its alternatives."""
    own = _named(token.token_id, token.logprob)
    others = [_named(*other) for other in token.top if other[0] != token.token_id]
    return {**own, "top_logprobs": [own, *others] if token.top else []}


def _named(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": finite(logprob)}


# ---- state ----


@router.get("/is_paused")
async def is_paused(service: Serving) -> dict[str, bool]:
    """Whether new requests wait for `/resume`, or get 503."""
    return {"is_paused": service.control.is_paused}


@router.get("/is_sleeping")
async def is_sleeping(service: Serving) -> dict[str, bool]:
    """Whether the verifiers' memory is free until `/wake_up`."""
    return {"is_sleeping": service.control.is_asleep}


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Version of this package."""
    return {"version": __version__}


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """The server answers."""
    return Response()


@router.get("/load")
async def load(service: Serving) -> dict[str, int]:
    """Number of running and waiting requests."""
    return {"server_load": len(service.queue.running())}


# ---- pauses ----


@router.post("/pause")
async def pause(service: Serving, mode: Mode = "abort") -> dict[str, str]:
    """Pause until `/resume`; with `keep` new requests wait, else they get 503. Cached prefixes need no clearing: they
    belong to a weight version."""
    await service.control.pause(WeightPolicy(mode), rejects=mode != "keep")
    return {"status": "paused"}


@router.post("/resume")
@router.post("/continue_generation")
async def resume(service: Serving) -> dict[str, str]:
    """End the pause."""
    service.control.resume()
    return {"status": "resumed"}


@router.post("/abort_requests")
async def abort_requests(
    service: Serving, request_ids: Annotated[list[str] | None, Body(embed=True)] = None
) -> dict[str, Any]:
    """Abort the requests with these names, or all."""
    names: Sequence[str | None] = request_ids or (None,)
    ended = [await service.control.end(name) for name in names]
    return {"status": "aborted", "aborted": sum(map(len, ended))}


@router.post("/finish_session")
async def finish_session(session_id: str = "") -> dict[str, str]:
    """No operation, for SkyRL: sessions need no end."""
    return {"status": "ok", "session_id": session_id}


@router.get("/get_world_size")
async def world_size(service: Serving, include_dp: bool = True) -> dict[str, int]:
    """Number of ranks of all verifiers, or of one (TRL, SkyRL)."""
    target = service.rollout.config.target
    return {"world_size": (target.replicas if include_dp else 1) * max(1, target.gpus)}


# ---- weights ----


class UpdateBody(JsonObject):
    """Body of `/update_weights`: prime-rl's form, or vLLM's, with `update_info`."""

    weight_dir: Directory | None = None
    update_info: UpdateBody | None = None


@router.post("/start_weight_update")
async def start_update() -> dict[str, str]:
    """No operation: `/update_weights` brings all weights."""
    return {"message": "Weight update started"}


@router.post("/update_weights")
async def update_weights(service: Serving, body: UpdateBody) -> dict[str, str]:
    """Update the weights of the target; running or paused requests continue with them."""
    info = body.update_info or body
    if info.weight_dir is None or info.model_extra:
        strange = next(iter(info.model_extra or ()), "weight_dir")[:64]
        problem = f"{strange}: weight_dir must be given, and alone: no tensors are received, over NCCL or otherwise"
        raise Refusal(f"{problem}; {_BY_DIRECTORY}", param=strange)
    await service.control.update(info.weight_dir, WeightPolicy.KEEP)
    return {"status": "ok"}


@router.post("/finish_weight_update")
async def finish_update(
    service: Serving, weight_version: Annotated[Label | None, Body(embed=True)] = None
) -> dict[str, str]:
    """Set the name of the weights of `/update_weights`."""
    if weight_version is not None:
        service.control.relabel(weight_version)
    return {"message": "Weight update finished"}


@router.post("/update_weight_version")
async def relabel(service: Serving, new_version: Annotated[Label, Body(embed=True)]) -> dict[str, Any]:
    """Set the name of the present weights."""
    service.control.relabel(new_version)
    return {"success": True, "message": f"Weight version updated to {new_version}", "new_version": new_version}


@router.get("/get_weight_version")
@router.get("/weight_info")
async def weight_info(service: Serving) -> dict[str, str]:
    """The name of the present weights."""
    return {"weight_version": service.control.label}


@router.post("/reset_prefix_cache")
@router.get("/flush_cache")
@router.post("/flush_cache")
async def reset_prefix_cache() -> dict[str, bool]:
    """No operation: new weights drop the prefixes of the old ones."""
    return {"success": True}


# ---- sleep ----


@router.post("/sleep")
async def sleep(service: Serving, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "abort") -> dict[str, Any]:
    """Free the verifiers' memory until `/wake_up`; the weights are restored at every level."""
    await service.control.sleep(WeightPolicy(mode))
    return {"status": "sleeping", "level": level}


@router.post("/wake_up")
async def wake_up(service: Serving, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
    """Allocate all memory again, regardless of the tags."""
    await service.control.wake()
    return {"status": "awake", "tags": tags}
