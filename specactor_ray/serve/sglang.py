"""SGLang's endpoints that slime calls; miles calls the same ones to generate."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response

from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.handle import Token
from specactor_ray.rollout.prompts import is_token_ids
from specactor_ray.serve.absent import BY_DIRECTORY, refuse_paths
from specactor_ray.serve.bodies import Body, Integer, Text
from specactor_ray.serve.control import directory_of, label_of
from specactor_ray.serve.forms import as_json, finite, tokens_of, with_json
from specactor_ray.serve.outputs import EventStream, Part, merged, parts_of
from specactor_ray.serve.refusal import UNAVAILABLE, Refusal

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import Trajectory
    from specactor_ray.serve.parameters import Wanted
    from specactor_ray.serve.service import Service

CONTROL = (
    *("/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk", "/flush_cache"),
    *("/get_weight_version", "/health_generate", "/v1/loads", "/workers"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
)
"""Paths that are answered regardless of the number of open requests."""
_NO_TENSORS = f"no tensors are received here; set --update-weight-transport disk. {BY_DIRECTORY}"
_ABSENT = {
    "/init_weights_update_group": _NO_TENSORS,
    "/destroy_weights_update_group": _NO_TENSORS,
    "/update_weights_from_distributed": _NO_TENSORS,
    "/update_weights_from_tensor": _NO_TENSORS,
    "/update_weights_from_ipc": _NO_TENSORS,
    "/begin_weight_update": _NO_TENSORS,
    "/end_weight_update": _NO_TENSORS,
    "/pull_weights": f"nothing is copied to disks here; leave --update-weight-local-checkpoint-dir out. {BY_DIRECTORY}",
    "/weights_checker": "a checkpoint is checked tensor by tensor when it comes",
    "/post_process_weights": "weights need no work after they are loaded",
}
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_OF_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
"""Parameters that change no token id; only the first and the third have an effect."""
_IGNORED = frozenset(
    ("log_metrics", "conversation_id", "data_parallel_rank", "routed_dp_rank", "priority", "modalities", "extra_key")
)
"""Fields of a request that change no token; `priority` is read."""
_MOST_PROMPTS = 1024


class SglangGenerateBody(Body):
    """Body of `/generate`."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: Text = None
    return_logprob: bool | None = None
    logprob_start_len: Integer | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None


class PauseBody(Body):
    """Body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class SglangAbortBody(Body):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class DiskBody(Body):
    """Body of `/update_weights_from_disk`."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | Integer | None = None


class WorkerBody(Body):
    """Body of `POST /workers`."""

    url: str


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Error in both of SGLang's forms: that of `/generate`, and that of the weight endpoints."""
    return {"error": {"message": refusal.message}, "success": False, "message": refusal.message}


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes, control = APIRouter(), service.control
    refuse_paths(routes, _ABSENT)

    @routes.post("/generate")
    @routes.put("/generate")
    async def generate(body: SglangGenerateBody, request: Request) -> Response:
        """Outputs of one or several prompts."""
        return await _generate(service, body, request)

    @routes.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        """The engine generates."""
        if not await control.is_live():
            raise Refusal("the engine does not answer", UNAVAILABLE)
        return {"status": "ok"}

    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """Fields of SGLang's ServerArgs."""
        return server_args(service)

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """The one model that is served."""
        path = service.rollout.config.target.model
        return {"model_path": path, "tokenizer_path": path, "is_generation": True, "weight_version": control.label}

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache() -> Response:
        """No operation: new weights drop the prefixes of the old ones."""
        return Response("Cache flushed.\n", media_type="text/plain")

    @routes.post("/pause_generation")
    async def pause(body: PauseBody | None = None) -> dict[str, str]:
        """Hold new requests until `/continue_generation`; `abort` (default) ends the present ones, the other modes let
        them continue then."""
        mode = (body.mode if body else None) or "abort"
        await control.pause(WeightPolicy.ABORT if mode == "abort" else WeightPolicy.KEEP)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @routes.post("/continue_generation")
    async def resume(body: Body | None = None) -> dict[str, str]:
        """End the pause."""
        del body
        control.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @routes.post("/abort_request")
    async def abort(body: SglangAbortBody) -> dict[str, Any]:
        """Abort the requests with one name, or all."""
        if not body.rid and not body.abort_all:
            raise Refusal("send rid, or abort_all true", param="rid")
        await control.abort(None if body.abort_all else body.rid)
        return {"success": True}

    @routes.post("/update_weights_from_disk")
    async def update(body: DiskBody) -> dict[str, Any]:
        """Update the weights of the target. Unless paused, running requests end first, or are aborted."""
        if body.load_format not in (None, "auto", "safetensors"):
            raise Refusal("load_format must be auto or safetensors", param="load_format")
        directory, label = directory_of(body.model_path, "model_path"), label_of(body.weight_version)
        policy = WeightPolicy.ABORT if body.abort_all_requests else WeightPolicy.WAIT
        await control.update(directory, policy, label)
        return {"success": True, "message": f"Weight version updated to {control.label}.", "num_paused_requests": 0}

    @routes.get("/get_weight_version")
    async def weight_version() -> dict[str, str]:
        """The name of the present weights."""
        return {"weight_version": control.label}

    @routes.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """Numbers of running and waiting requests."""
        total = len(service.running())
        waiting = min(total, service.waiting)
        figures = {"num_running_reqs": total - waiting, "num_waiting_reqs": waiting, "num_total_reqs": total}
        return {"loads": [{"dp_rank": 0, **figures}]}

    @routes.get("/workers")
    async def workers(request: Request) -> dict[str, Any]:
        """This server as the only worker, for trainers that use it in a router's place."""
        url = _url(request)
        worker = {"id": url, "url": url, "worker_type": "regular", "is_healthy": True, "model_id": service.model}
        return {"workers": [worker], "total": 1}

    @routes.post("/workers")
    async def add_worker(body: WorkerBody, request: Request) -> dict[str, Any]:
        """Accept this server's own address."""
        if body.url.rstrip("/") != _url(request):
            raise Refusal(f"this server routes to itself only, {_url(request)}", param="url")
        return {"status": "accepted", "worker_id": body.url}

    @routes.post("/release_memory_occupation")
    async def release(body: Body | None = None) -> dict[str, bool]:
        """Free the verifiers' memory until `/resume_memory_occupation`, regardless of the tags."""
        del body
        await control.sleep(WeightPolicy.WAIT)
        return {"success": True}

    @routes.post("/resume_memory_occupation")
    async def occupy(body: Body | None = None) -> dict[str, bool]:
        """Allocate the memory again."""
        del body
        await control.wake()
        return {"success": True}

    return routes


def server_args(service: Service) -> dict[str, Any]:
    """Fields of SGLang's ServerArgs that trainers compare with their own."""
    target = service.rollout.config.target
    ranks = max(1, target.gpus)
    return {
        "model_path": target.model,
        "tokenizer_path": target.model,
        "served_model_name": service.model,
        "context_length": service.context,
        "dtype": target.dtype,
        "tp_size": ranks,
        "pp_size": 1,
        "dp_size": target.replicas,
        "ep_size": 1,
        "num_gpus": ranks * target.replicas,
        "nnodes": 1,
        "node_rank": 0,
        "max_running_requests": target.max_batch * target.replicas,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "weight_version": service.control.label,
    }


async def _generate(service: Service, body: SglangGenerateBody, request: Request) -> Response:
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name not in _IGNORED and value not in (None, False, [], {}):
            raise Refusal(f"{name[:64]} is not available at /generate", param=name[:64])
    if body.return_logprob and body.logprob_start_len not in (None, -1):
        raise Refusal("logprob_start_len must be -1: prompts get no log-probabilities", param="logprob_start_len")
    prompts, is_batch = await _prompts(service, body)
    wanted = _wanted(service, body, prompts)
    form = _SglangForm(service, body, wanted, is_batch or wanted.n > 1)
    session, priority = request.headers.get("x-smg-routing-key"), extra.get("priority")
    if type(priority) is not int or abs(priority) >= 2**31:
        priority = 0
    handles = service.submit(prompts, wanted, name=form.name, session=session, priority=priority)
    if body.stream:
        streams = [parts_of(service, handle, index, wanted.sampling.stop) for index, handle in enumerate(handles)]
        events = form.events(merged(streams))
        return EventStream(events, lambda refusal: as_json(error_body(refusal)), lambda: service.drop(handles))
    return Response(form.whole(await service.outputs_for(request, handles)), media_type="application/json")


async def _prompts(service: Service, body: SglangGenerateBody) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of each prompt, and whether there is a list of them.

    Raises:
        Refusal: The prompt has another type.
    """
    if (body.text is None) == (body.input_ids is None):
        raise Refusal("send either text or input_ids", param="input_ids")
    given: Any = body.text if body.text is not None else body.input_ids
    is_batch = isinstance(given, list) and not is_token_ids(given)
    each = given if is_batch else [given]
    if not 0 < len(each) <= _MOST_PROMPTS:
        raise Refusal(f"the request has {len(each)} prompts; 1 to {_MOST_PROMPTS} are allowed", param="input_ids")
    for one in each:
        is_ids = isinstance(one, list) and all(type(token) is int for token in one)
        if not (isinstance(one, str) or is_ids) or not one:
            raise Refusal("input_ids must be token ids, or a list of lists of them, none empty", param="input_ids")
    return [tuple(one) if isinstance(one, list) else await service.encode(one) for one in each], is_batch


def _wanted(service: Service, body: SglangGenerateBody, prompts: Sequence[Sequence[int]]) -> Wanted:
    """Convert SGLang's names to ours. The seed applies to positions of the whole text, so that an output that was cut
    off and is resent as part of the prompt continues with the same tokens."""
    given = {_RENAMED.get(name, name): value for name, value in (body.sampling_params or {}).items()}
    given["include_stop_str_in_output"] = bool(given.get("no_stop_trim"))
    given = {name: value for name, value in given.items() if name not in _OF_TEXT}
    if given.get("seed") is not None and len(prompts) == 1:
        given.setdefault("first_position", len(prompts[0]))
    if body.return_logprob or body.top_logprobs_num:
        given["logprobs"] = body.top_logprobs_num or 0
    return service.wanted(given)


class _SglangForm:
    """Answer to one request, complete or as events, each of which repeats the earlier content."""

    def __init__(self, service: Service, body: SglangGenerateBody, wanted: Wanted, is_list: bool) -> None:
        self.name = body.rid or secrets.token_hex(16)
        self._service, self._wanted, self._is_list = service, wanted, is_list
        given = body.sampling_params or {}
        self._special, self._untrimmed = given.get("skip_special_tokens") is False, bool(given.get("no_stop_trim"))
        self._with_text = bool(body.return_text_in_logprobs)

    def whole(self, outputs: Sequence[Trajectory]) -> str:
        choices = []
        for index, output in enumerate(outputs):
            choices.append(self._choice(index, self._text(output), tokens_of(output), output))
        return f"[{','.join(choices)}]" if self._is_list else choices[0]

    async def events(self, parts: AsyncIterator[Part]) -> AsyncIterator[str]:
        texts, tokens = dict[int, str](), dict[int, list[Token]]()
        async for part in parts:
            texts[part.index] = texts.get(part.index, "") + part.text
            mine = tokens.setdefault(part.index, [])
            mine += part.tokens
            text = texts[part.index] if part.output is None else self._text(part.output)
            yield self._choice(part.index, text, mine, part.output)

    def _text(self, output: Trajectory) -> str:
        """Text as SGLang decodes it: without the token or text that ends the output, unless `no_stop_trim` is set."""
        ids, stop = list(output.token_ids), output.stop_reason
        if output.finish_reason == "stop" and not isinstance(stop, str) and not self._untrimmed:
            ids.pop()
        elif not self._special:
            return output.text
        text = str(self._service.tokenizer.decode(ids, skip_special_tokens=not self._special))
        if isinstance(stop, str) and not self._untrimmed and stop in text:
            return text[: text.rfind(stop)]
        return text

    def _choice(self, index: int, text: str, tokens: Sequence[Token], output: Trajectory | None) -> str:
        """JSON of a choice; `output` is the complete output, given at its end."""
        control = self._service.control
        meta: dict[str, Any] = {
            "id": self.name,
            "finish_reason": None if output is None else _finish_reason(output),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": control.label,
        }
        if output is not None:
            spans = control.spans(output)
            meta |= {"prompt_tokens": len(output.prompt_token_ids), "seed": output.sampling.seed}
            meta |= {"weight_version": spans[-1]["version"] if spans else control.label, "weight_versions": spans}
        if self._wanted.logprobs:
            meta["output_top_logprobs"] = [
                [(finite(p), one, self._name(one)) for one, p in token.top] for token in tokens
            ]
        whole = as_json(meta)
        if self._wanted.logprobs is not None:
            name = (lambda token_id: as_json(self._name(token_id))) if self._with_text else (lambda _token_id: "null")
            reported = [f"[{finite(token.logprob)!r},{token.token_id},{name(token.token_id)}]" for token in tokens]
            whole = with_json(meta, "output_token_logprobs", f"[{','.join(reported)}]")
        choice = {"text": text, "output_ids": [token.token_id for token in tokens]}
        return with_json({"index": index, **choice} if self._is_list else choice, "meta_info", whole)

    def _name(self, token_id: int) -> str | None:
        return self._service.token_texts[token_id].text if self._with_text else None


def _finish_reason(output: Trajectory) -> dict[str, Any]:
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    matched = output.token_ids[-1] if output.stop_reason is None else output.stop_reason
    return {"type": "stop", "matched": matched}


def _url(request: Request) -> str:
    return str(request.base_url).rstrip("/")
