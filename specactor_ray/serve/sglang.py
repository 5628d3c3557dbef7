"""SGLang's endpoints that slime calls; miles calls the same ones to generate."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response

from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.dialect import Dialect
from specactor_ray.serve.outputs import Form, Part, answer, finite
from specactor_ray.serve.requests import (
    Directory,
    Integer,
    JsonRoute,
    Label,
    Refusal,
    Text,
    TextBody,
    TokenId,
    Wanted,
)
from specactor_ray.serve.service import Service, Serving

_SAMPLING = Dialect(
    known=(
        *("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "first_position", "logprobs"),
        "skip_special_tokens",
    ),
    renamed={"max_new_tokens": "max_tokens", "sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"},
    ignored=("spaces_between_special_tokens", "stream_interval"),
)
"""Its ignored parameters change no token id."""
_IGNORED = (
    *("log_metrics", "conversation_id", "data_parallel_rank", "routed_dp_rank"),
    *("priority", "modalities", "extra_key", "return_weight_versions"),
)
"""Fields of a request that change no token."""

router = APIRouter(route_class=JsonRoute)


# ---- generation ----


class SglangGenerateBody(TextBody):
    """Body of `/generate`."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: Text = None
    return_logprob: bool | None = None
    logprob_start_len: Integer | None = None
    stream: bool | None = None


@router.post("/generate")
async def generate(service: Serving, body: SglangGenerateBody, request: Request) -> Response:
    """The output of one prompt."""
    body.require_only(_IGNORED, "/generate")
    if body.return_logprob and body.logprob_start_len not in (None, -1):
        raise Refusal("logprob_start_len must be -1: prompts get no log-probabilities", param="logprob_start_len")
    if body.text is not None and body.input_ids is None:
        prompt = (await service.prompts(body.text, "text", **body.text_options()))[0]
    elif body.text is None and body.input_ids is not None:
        prompt = tuple(body.input_ids)
    else:
        raise Refusal("send either text or input_ids", param="input_ids")
    form = SglangForm(service, body, prompt, _wanted(service, body, len(prompt)))
    session = request.headers.get("x-smg-routing-key")
    return await answer(request, form, stream=body.stream, name=form.name, session=session)


def _wanted(service: Service, body: SglangGenerateBody, num_prompt: int) -> Wanted:
    """The seed applies to positions of the whole text, so that an output that was cut off and is resent as part of the
    prompt continues with the same tokens."""
    given = {"no_stop_trim": False, "first_position": num_prompt, **(body.sampling_params or {})}
    if body.return_logprob:
        given["logprobs"] = 0
    return service.wanted(given, _SAMPLING)


class SglangForm(Form):
    """Answers of `/generate`; each event repeats the content of the earlier ones."""

    trims = True

    def __init__(self, service: Service, body: SglangGenerateBody, prompt: Sequence[int], wanted: Wanted) -> None:
        super().__init__(service, [prompt], wanted)
        self.name = body.rid or secrets.token_hex(16)
        self._so_far = Part(0, "")
        """Content of the earlier events."""

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        return self._choice(parts[0])

    def event(self, part: Part) -> dict[str, Any]:
        self._so_far.text += part.text
        self._so_far.tokens += part.tokens
        self._so_far.output = part.output
        return self._choice(self._so_far)

    def _choice(self, part: Part) -> dict[str, Any]:
        output, control = part.output, self.service.control
        meta: dict[str, Any] = {
            "id": self.name,
            "finish_reason": None if output is None else _finish_reason(output),
            "completion_tokens": len(part.tokens),
            "cached_tokens": 0,
            "weight_version": control.label,
        }
        if output is not None:
            spans = self.spans(output)
            meta |= {"prompt_tokens": len(output.prompt_token_ids), "seed": output.sampling.seed}
            meta |= {"weight_version": spans[-1]["version"] if spans else control.label, "weight_versions": spans}
        if self.wanted.logprobs is not None:
            meta["output_token_logprobs"] = [(finite(token.logprob), token.token_id, None) for token in part.tokens]
        return {"text": part.text, "output_ids": part.token_ids, "meta_info": meta}


def _finish_reason(output: Trajectory) -> dict[str, Any]:
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    matched = output.token_ids[-1] if output.stop_reason is None else output.stop_reason
    return {"type": "stop", "matched": matched}


# ---- the server, also in the place of a router ----


@router.get("/server_info")
async def server_info(service: Serving) -> dict[str, Any]:
    """Fields of SGLang's ServerArgs that trainers compare with their own, and those of vLLM that TRL reads."""
    target = service.rollout.config.target
    ranks = max(1, target.gpus)
    model = {"model": service.model, "max_model_len": service.context, "logprobs_mode": "processed_logprobs"}
    return {
        "vllm_config": {"model_config": model, "weight_transfer_config": None},
        "dtype": target.dtype,
        "tp_size": ranks,
        "pp_size": 1,
        "num_gpus": ranks * target.replicas,
        "enable_memory_saver": False,
    }


@router.get("/health_generate")
async def health_generate(service: Serving) -> dict[str, str]:
    """Some verifier serves, by the controller's health checks."""
    if not (await service.view()).verifiers:
        raise Refusal("no verifier serves; the controller's log has the reason", 503)
    return {"status": "ok"}


@router.get("/v1/loads")
async def loads(service: Serving) -> dict[str, Any]:
    """Numbers of running and waiting requests."""
    running, waiting = service.load
    figures = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_total_reqs": running + waiting}
    return {"loads": [{"dp_rank": 0, **figures}]}


@router.get("/workers")
async def workers(service: Serving, request: Request) -> dict[str, Any]:
    """This server as the only worker, for trainers that use it in a router's place."""
    url = _url(request)
    worker = {"id": url, "url": url, "worker_type": "regular", "is_healthy": True, "model_id": service.model}
    return {"workers": [worker], "total": 1}


@router.post("/workers")
async def add_worker(url: Annotated[str, Body(embed=True)], request: Request) -> dict[str, Any]:
    """Accept this server's own address."""
    if url.rstrip("/") != _url(request):
        raise Refusal(f"this server routes to itself only, {_url(request)}", param="url")
    return {"status": "accepted", "worker_id": url}


def _url(request: Request) -> str:
    return str(request.base_url).rstrip("/")


# ---- pauses and weights; `vllm_rl` has those that both dialects send in one form ----


@router.post("/pause_generation")
async def pause_generation(
    service: Serving, mode: Annotated[Literal["abort", "retract", "in_place"] | None, Body(embed=True)] = None
) -> dict[str, str]:
    """Hold new requests until `/continue_generation`; `abort` (default) ends the present ones, the other modes let them
    continue then."""
    await service.control.pause(WeightPolicy.ABORT if mode in (None, "abort") else WeightPolicy.KEEP)
    return {"message": "Generation paused successfully.", "status": "ok"}


@router.post("/abort_request")
async def abort_request(
    service: Serving, rid: Annotated[str | None, Body()] = None, abort_all: Annotated[bool | None, Body()] = None
) -> dict[str, Any]:
    """Abort the requests with one name, or all."""
    if not rid and not abort_all:
        raise Refusal("send rid, or abort_all true", param="rid")
    await service.control.end(None if abort_all else rid)
    return {"success": True}


@router.post("/update_weights_from_disk")
async def update_from_disk(
    service: Serving,
    model_path: Annotated[Directory, Body()],
    load_format: Annotated[Literal["auto", "safetensors"] | None, Body()] = None,
    abort_all_requests: Annotated[bool | None, Body()] = None,
    weight_version: Annotated[Label | None, Body()] = None,
) -> dict[str, Any]:
    """Update the weights of the target. Unless paused, running requests end first, or are aborted."""
    policy = WeightPolicy.ABORT if abort_all_requests else WeightPolicy.WAIT
    await service.control.update(model_path, policy, weight_version)
    message = f"Weight version updated to {service.control.label}."
    return {"success": True, "message": message, "num_paused_requests": 0}
