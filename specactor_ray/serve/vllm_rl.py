"""vLLM's endpoints for reinforcement learning: token ids in and out, pauses, weights, sleep."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.handle import Token
from specactor_ray.serve import prime_rl
from specactor_ray.serve.absent import BY_DIRECTORY, NO_ADAPTERS, refuse_paths
from specactor_ray.serve.bodies import Body, Integer, StreamOptions, Text
from specactor_ray.serve.control import directory_of, label_of
from specactor_ray.serve.forms import as_json, finite, prompt_report, tokens_of, with_json
from specactor_ray.serve.outputs import EventStream, Part, merged, parts_of
from specactor_ray.serve.refusal import Refusal, openai_error

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import Trajectory
    from specactor_ray.serve.parameters import Wanted
    from specactor_ray.serve.service import Service
    from specactor_ray.transport.messages import WeightSet

CONTROL = (
    *("/pause", "/resume", "/is_paused", "/abort_requests", "/inference/v1/abort_requests", "/sleep", "/wake_up"),
    *("/is_sleeping", "/start_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_info", "/reset_prefix_cache"),
)
"""Paths that are answered regardless of the number of open requests: they end waiting ones."""
_ABSENT = {
    "/init_weight_transfer_engine": f"no weights are received over NCCL or CUDA IPC. {BY_DIRECTORY}",
    "/shutdown_weight_transfer_engine": f"no weights are received over NCCL or CUDA IPC. {BY_DIRECTORY}",
    "/start_draft_weight_update": "drafters follow the target's weights by themselves, and no token depends on them",
    "/weight_checker": "a checkpoint is checked tensor by tensor when it comes",
    "/collective_rpc": f"workers run no methods of clients. {BY_DIRECTORY}",
    "/fetch_weights": f"no checkpoint deltas are applied. {BY_DIRECTORY}",
    "/skyrl/v1/generate": "routed experts are not recorded; POST /inference/v1/generate",
    "/skyrl/v1/load_lora_adapter": NO_ADAPTERS,
    "/v1/load_lora_adapter": NO_ADAPTERS,
    "/v1/unload_lora_adapter": NO_ADAPTERS,
}
_OF_FORM = (
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output"),
    *("flat_logprobs", "output_kind"),
)
"""Parameters that change neither token ids nor log-probabilities."""
_IGNORED = ("reasoning_ended", "reasoning_parser_kwargs", "token_offsets", "cache_salt")
"""Fields of a request that change no token: prefixes are never shared between versions of the weights."""

Mode = Annotated[Literal["abort", "wait", "keep"], Query()]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class VllmGenerateBody(Body):
    """Body of `/inference/v1/generate`."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any]
    model: Text = None
    request_id: Text = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    priority: Annotated[Integer | None, Field(ge=-(2**31), lt=2**31)] = None


class VllmAbortBody(Body):
    """Body of `/abort_requests`; without names all requests are aborted."""

    request_ids: list[str] | str | None = None


class UpdateBody(Body):
    """Body of `/update_weights`: prime-rl's form, or vLLM's, whose `update_info` is here `{"weight_dir": ...}`."""

    weight_dir: str | None = None
    update_info: dict[str, Any] | None = None


class FinishBody(Body):
    """Body of `/finish_weight_update`."""

    weight_version: str | Integer | None = None


class VersionBody(Body):
    """Body of `/update_weight_version`."""

    new_version: str | Integer


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes, control, transfer = APIRouter(), service.control, _Transfer(service)
    refuse_paths(routes, _ABSENT)

    @routes.post("/inference/v1/generate")
    async def generate(body: VllmGenerateBody, request: Request) -> Response:
        """Outputs of one prompt, as token ids."""
        return await _generate(service, body, request)

    @routes.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, str]:
        """Hold new requests until `/resume`. Cached prefixes belong to a weight version and need no clearing."""
        del clear_cache
        await control.pause(WeightPolicy(mode))
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> dict[str, str]:
        """End the pause."""
        control.resume()
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether requests are held."""
        return {"is_paused": control.is_paused}

    @routes.post("/abort_requests")
    @routes.post("/inference/v1/abort_requests")
    async def abort(body: VllmAbortBody | None = None) -> dict[str, Any]:
        """Abort requests by their names, or all."""
        names = body.request_ids if body else None
        each: list[str | None] = [*([names] if isinstance(names, str) else names or [])] or [None]
        return {"status": "aborted", "aborted": sum([await control.abort(name) for name in each])}

    @routes.post("/start_weight_update")
    async def start() -> dict[str, str]:
        """Hold weights received from now on until `/finish_weight_update`."""
        transfer.start()
        return {"message": "Weight update started"}

    @routes.post("/update_weights")
    async def update(body: UpdateBody) -> dict[str, str]:
        """Update the weights of the target."""
        if "weight_dir" in body.model_fields_set:
            return await prime_rl.update_weights(service, body.weight_dir)
        await transfer.update(body.update_info)
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update")
    async def finish(body: FinishBody | None = None) -> dict[str, str]:
        """Apply the weights of `/update_weights` to all further tokens."""
        await transfer.finish(label_of(body.weight_version if body else None))
        return {"message": "Weight update finished"}

    @routes.post("/update_weight_version")
    async def relabel(body: VersionBody) -> dict[str, Any]:
        """Set the name of the present weights."""
        label = label_of(body.new_version, "new_version") or ""
        control.relabel(label)
        return {"success": True, "message": f"Weight version updated to {label}", "new_version": label}

    @routes.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        """The name of the present weights."""
        return {"weight_version": control.label}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """No operation: new weights drop the prefixes of the old ones."""
        return {"success": True}

    @routes.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "abort") -> dict[str, Any]:
        """Free the verifiers' memory until `/wake_up`; the weights are restored at every level."""
        await control.sleep(WeightPolicy(mode))
        return {"status": "sleeping", "level": level}

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        """Allocate all memory again, regardless of the tags."""
        await control.wake()
        return {"status": "awake", "tags": tags}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether verifiers sleep."""
        return {"is_sleeping": control.is_asleep}

    @routes.post("/finish_session")
    async def finish_session(session_id: str = "") -> dict[str, str]:
        """No operation, for SkyRL: sessions need no end."""
        return {"status": "ok", "session_id": session_id}

    return routes


class _Transfer:
    """Weights between `/start_weight_update` and `/finish_weight_update`."""

    def __init__(self, service: Service) -> None:
        self._control = service.control
        self._is_open = False
        self._weights: WeightSet | None = None

    def start(self) -> None:
        self._is_open, self._weights = True, None

    async def update(self, info: dict[str, Any] | None) -> None:
        """Hold the weights for `finish`; apply them at once if no update was started."""
        if not info or info.keys() != {"weight_dir"}:
            strange = next((name for name in info or () if name != "weight_dir"), "update_info")[:64]
            raise Refusal(f"{strange}: no tensors are received here. {BY_DIRECTORY}", param=strange)
        directory = directory_of(info["weight_dir"], "weight_dir")
        if self._is_open:
            self._weights = await self._control.prepare(directory)
        else:
            await self._control.update(directory, WeightPolicy.KEEP)

    async def finish(self, label: str | None) -> None:
        weights, is_open = self._weights, self._is_open
        self._is_open, self._weights = False, None
        if weights is None:
            problem = "/update_weights brought no weights" if is_open else "no update was started"
            raise Refusal(f"{problem}; POST /start_weight_update, /update_weights, then /finish_weight_update")
        await self._control.update(weights, WeightPolicy.KEEP, label)


async def _generate(service: Service, body: VllmGenerateBody, request: Request) -> Response:
    service.require_model(body.model)
    for name, value in (body.model_extra or {}).items():
        if name not in _IGNORED and value is not None:
            raise Refusal(f"{name[:64]} is not available at /inference/v1/generate", param=name[:64])
    wanted = service.wanted(_sampling_of(body.sampling_params))
    headers = request.headers
    name = body.request_id or headers.get("x-request-id") or f"generate-tokens-{secrets.token_hex(16)}"
    session = headers.get("x-session-id")
    handles = service.submit([body.token_ids], wanted, name=name, session=session, priority=body.priority or 0)
    form = _VllmForm(service, body, wanted, name)
    if body.stream:
        streams = [parts_of(service, handle, index) for index, handle in enumerate(handles)]
        events = form.events(merged(streams))
        return EventStream(events, lambda refusal: as_json(openai_error(refusal)), lambda: service.drop(handles))
    return Response(form.whole(await service.outputs_for(request, handles)), media_type="application/json")


def _sampling_of(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that change token ids. Every output has one token, so `min_tokens` 1 has no effect; in vLLM that token
    cannot end the output. `logprobs` 1, which trainers send to get the sampled token's, adds no others."""
    sampling = {name: value for name, value in given.items() if name not in _OF_FORM}
    if sampling.get("min_tokens") == 1:
        del sampling["min_tokens"]
    if sampling.get("logprobs") == 1:
        sampling["logprobs"] = 0
    extra = sampling.get("extra_args")
    if isinstance(extra, dict):  # request form of prime-rl's client for log-probabilities
        sampling["extra_args"] = {name: value for name, value in extra.items() if name != "prl_compact_logprobs"}
    return sampling


class _VllmForm:
    """The answer to one request, whole or as events."""

    def __init__(self, service: Service, body: VllmGenerateBody, wanted: Wanted, name: str) -> None:
        self._service, self._body, self._wanted, self._name = service, body, wanted, name
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)

    def whole(self, outputs: Sequence[Trajectory]) -> str:
        choices = [self._choice(index, tokens_of(output), output) for index, output in enumerate(outputs)]
        answer = {
            "request_id": self._name,
            "output_mode": "tokens",
            "model": self._service.model,
            "usage": self._usage(sum(len(output.token_ids) for output in outputs)),
            "prompt_logprobs": prompt_report(self._service, outputs[0]),
            "prompt_token_ids": self._body.token_ids if self._body.return_token_ids else None,
            "kv_transfer_params": None,
        }
        return with_json(answer, "choices", f"[{','.join(choices)}]")

    async def events(self, parts: AsyncIterator[Part]) -> AsyncIterator[str]:
        tokens = 0
        event: dict[str, Any] = {"request_id": self._name, "output_mode": "tokens"}
        first = event | ({"prompt_token_ids": self._body.token_ids} if self._body.return_token_ids else {})
        async for part in parts:
            choice = self._choice(part.index, part.tokens, part.output)
            yield with_json(event if tokens else first, "choices", f"[{choice}]")
            tokens += len(part.tokens)
        if self._with_usage:
            yield as_json(event | {"choices": [], "usage": self._usage(tokens)})

    def _choice(self, index: int, tokens: Sequence[Token], output: Trajectory | None) -> str:
        """JSON of a choice; `output` is the complete output, given at its end."""
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": [token.token_id for token in tokens],
            "finish_reason": output.finish_reason if output else None,
            "stop_reason": output.stop_reason if output else None,
            "routed_experts": None,
        }
        if output is not None:
            choice |= {"weight_versions": self._service.control.spans(output), "seed": output.sampling.seed}
            if output.prompt_logprobs is not None and self._body.stream:
                choice["prompt_logprobs"] = prompt_report(self._service, output)
        if self._wanted.logprobs is None:
            return as_json(choice | {"logprobs": None})
        return with_json(choice, "logprobs", f'{{"content":[{",".join(map(_reported, tokens))}]}}')

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._body.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _reported(token: Token) -> str:
    """JSON of a token. As in vLLM, the sampled token is the first of its alternatives."""
    token_id, logprob, top = token
    own = _named(token_id, logprob)
    others = [f"{{{_named(*other)}}}" for other in top if other[0] != token_id]
    return f'{{{own},"top_logprobs":[{",".join([f"{{{own}}}", *others]) if top else ""}]}}'


def _named(token_id: int, logprob: float) -> str:
    return f'"token":"token_id:{token_id}","token_id":{token_id},"logprob":{finite(logprob)!r}'
