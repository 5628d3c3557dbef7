"""A replica of verl in this package: its configuration and requests, converted, and the actor that serves it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.control import Control
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.rollout import Rollout
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.dialect import Dialect
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.transport.messages import WeightSet

NAME = "specactor"
"""Name of the rollout, the section of `engine_kwargs` and the checkpoint engine in verl's configuration."""
_KEYS = "actor_rollout_ref."
_SETTINGS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rollout.pipeline_model_parallel_size": ((1,), "use tensor_model_parallel_size and data_parallel_size"),
    "rollout.expert_parallel_size": ((1,), "set it to 1"),
    "rollout.repetition_penalty": ((1.0,), "set it to 1.0; verification compares with the model's own logits"),
    "rollout.logprobs_mode": ((None, "processed_logprobs"), "use processed_logprobs"),
    "rollout.quantization": ((None,), "leave it out"),
    "rollout.qat.enable": ((None, False), "set it to false"),
    "rollout.enable_rollout_routing_replay": ((None, False), "set it to false; routed experts are not recorded"),
    "rollout.disaggregation.enabled": ((None, False), "set it to false"),
    "rollout.checkpoint_engine.backend": (("naive", NAME), f"use naive (hybrid) or {NAME} (apart)"),
}
"""Key → supported values, and the fix."""
_DIALECT = Dialect(
    known=("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "ignore_eos", "seed"),
    renamed={"max_new_tokens": "max_tokens"},
    ignored=(
        *("logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        "include_stop_str_in_output",
    ),
    where="verl: sampling_params.",
)
"""Parameters of verl's requests, in vLLM's or SGLang's names."""
_MOST_ABORTED = 65_536
_ANY_NUMBER = 2**31


def require_supported(rollout: Any, model: Any) -> None:
    """Refuse unsupported values in the sections `rollout` and `model` of verl's configuration, by their keys."""
    for key, (allowed, fix) in _SETTINGS.items():
        value = _value({"rollout": rollout}, key)
        if value not in allowed:
            raise ConfigError(_KEYS + key, f"{value!r} is not available with rollout.name={NAME}.", f"{fix}.")
    if not _value(model, "lora.merge"):
        for key in ("lora_rank", "lora.rank"):
            if _value(model, key):
                fix = "set model.lora.merge=true, which pushes whole weights."
                raise ConfigError(f"{_KEYS}model.{key}", f"adapters are not available with rollout.name={NAME}.", fix)


def configuration(rollout: Any, model_path: str, trust_remote_code: bool, has_gpus: bool) -> Config:
    """Our configuration of a replica from verl's section `rollout`. `engine_kwargs.specactor` holds further keys, which
    override it. A ConfigError names a wrong one."""
    ranks = _value(rollout, "tensor_model_parallel_size")
    gpus = ranks if has_gpus else 0
    length = _value(rollout, "max_model_len") or rollout.prompt_length + rollout.response_length
    settings: dict[str, Any] = {
        "cluster": {"address": "auto"},
        "target": {
            "model": model_path,
            "trust_remote_code": trust_remote_code,
            "dtype": rollout.dtype,
            "max_model_len": length,
            "replicas": rollout.data_parallel_size,
            "tensor_parallel": ranks,
            "backend": "vllm" if ranks > 1 else "hf",
            "gpus": gpus,
            "updates": True,
            "max_batch": min(rollout.max_num_seqs, TargetConfig(gpus=gpus).max_batch or _ANY_NUMBER),
        },
    }
    own = OmegaConf.create(_value(rollout, f"engine_kwargs.{NAME}") or {})
    whole: Any = OmegaConf.to_container(OmegaConf.merge(settings, own), resolve=True)
    try:
        return from_mapping(whole)
    except ConfigError as error:
        key = f"{_KEYS}rollout.engine_kwargs.{NAME}.{error.key}"
        raise ConfigError(key, error.problem, error.fix) from None


def sampling_of(
    rollout: Any, parameters: Mapping[str, Any], num_prompt: int, seed: int, max_model_len: int
) -> SamplingParams:
    """Parameters of one request from verl's; `seed` is used if these have none.

    The position in the noise is that in the whole sequence. So a request that is resent with its output so far as part
    of the prompt continues with the tokens that would have followed.
    """
    given = _DIALECT.read(parameters)
    room = max_model_len - num_prompt
    if room < 1:
        raise InputError(
            f"verl: {num_prompt} tokens leave no room for an output in {max_model_len}. Fix: raise "
            "actor_rollout_ref.rollout.max_model_len, or engine_kwargs.specactor.target.max_model_len"
        )
    most = given.pop("max_tokens", None)
    if most is None:
        most = min(rollout.response_length, rollout.prompt_length + rollout.response_length - num_prompt)
    settings = {"seed": seed, "ignore_eos": rollout.ignore_eos, **given, "max_tokens": max(1, min(most, room))}
    return SamplingParams(**settings, first_position=num_prompt)


class Seeds:
    """Seeds of requests without one: a function of verl's seed, its step, the prompt, and its repetitions.

    verl resends an aborted request with the output so far as part of the prompt and under a new name. Such a request
    keeps its seed: it is recognised by its tokens. Two replicas never use the same seed for one prompt.
    """

    def __init__(self, run_seed: int, replica: int) -> None:
        self._run_seed, self._replica, self._step = run_seed, replica, 0
        self._counts: dict[int, int] = {}
        """Prompt → number of its requests in this step."""
        self._aborted: OrderedDict[int, list[int]] = OrderedDict()
        """Prompt and output of an aborted request → its seed, or the seeds of several."""

    def begin_step(self, step: int) -> None:
        """Set the trainer's step of all further requests."""
        if step + 1 != self._step:
            self._step, self._counts = step + 1, {}

    def take(self, prompt: Sequence[int], name: str | None = None) -> int:
        """Seed of a request. With a name that is the same in every run it depends on that, and neither on the
        repetitions of the prompt nor on the replica."""
        key = _digest(prompt)
        if kept := self._aborted.get(key):
            if not kept[1:]:
                del self._aborted[key]
            return kept.pop()
        if name is not None:
            return derive_seed(derive_seed(self._run_seed, self._step, 0), key, _digest(name.encode()))
        count = self._counts[key] = self._counts.get(key, -1) + 1
        return derive_seed(derive_seed(self._run_seed, self._step, 1 + self._replica), key, count)

    def keep(self, tokens: Sequence[int], seed: int) -> None:
        """Record the seed of an aborted request; `tokens` are its prompt and its output."""
        self._aborted.setdefault(_digest(tokens), []).append(seed)
        while len(self._aborted) > _MOST_ABORTED:
            self._aborted.popitem(last=False)


class VerlServer:
    """Serves one replica of verl with its own rollout in verl's Ray cluster; an asynchronous actor. With `sleeps` it
    frees caches, and on GPUs the weights, while verl trains."""

    def __init__(self, rollout: Any, model_path: str, trust_remote_code: bool, replica_rank: int, sleeps: bool) -> None:
        self._settings, self._model = rollout, (model_path, trust_remote_code)
        self._seeds, self._sleeps = Seeds(rollout.seed, replica_rank), sleeps

    async def start(self) -> str:
        """Start the rollout; returns the name of its run."""
        self._rollout = await asyncio.to_thread(self._start)
        self._control = Control(self._rollout)
        self._rollout.queue.max_waiting = _ANY_NUMBER  # verl limits its requests
        self._rollout.queue.tokenizer = None  # it exchanges token ids
        return self._rollout.run_name

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        priority: int = 0,
        **others: Any,
    ) -> Any:
        """Generate verl's `TokenOutput`. Log-probabilities are those under softmax(logits / temperature). InputError:
        the request needs something that is not supported, such as images, or cannot run."""
        for name, value in others.items():
            if value is not None and value not in ([], {}, ()):
                raise InputError(f"verl: {name} is not available with rollout.name={NAME}; rollouts are of text only")
        if self._control.is_rejecting:
            step = self._control.labels.get(self._rollout.weight_version)
            return _token_output([], None, "aborted", {"global_steps": step})
        await self._control.ready()
        prompt = [int(token) for token in prompt_ids]
        own_seed = sampling_params.get("seed") is None
        seed = self._seeds.take(prompt, request_id if self._settings.full_determinism else None) if own_seed else 0
        length = self._rollout.config.target.max_model_len or 0
        sampling = sampling_of(self._settings, sampling_params, len(prompt), seed, length)
        output = await self._rollout.queue.generate(prompt, sampling, request_id=request_id, priority=int(priority))
        if output.error:
            raise InputError(f"verl: request {request_id} cannot run: {output.error}")
        if output.finish_reason == "abort" and own_seed:
            self._seeds.keep([*prompt, *output.token_ids], seed)
        logprobs = list(output.logprobs) if sampling_params.get("logprobs") else None
        reason = "aborted" if output.finish_reason == "abort" else "completed"
        return _token_output(list(output.token_ids), logprobs, reason, self._facts(output))

    # ---- between requests ----

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Abort all requests with their committed tokens; new ones wait for `resume_generation`, or are refused."""
        names = [handle.request_id for handle in self._rollout.queue.running()]
        await self._control.pause(WeightPolicy.ABORT, reject_request)
        return {"aborted_count": len(names), "request_ids": names}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Abort one request with its committed tokens."""
        aborted = await self._control.end(request_id)
        return {"aborted": bool(aborted), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Allow requests to begin again."""
        self._control.resume()

    async def sleep(self) -> None:
        """Free the verifiers' memory when no request runs, in hybrid mode with `free_cache_engine`."""
        if self._sleeps:
            await self._control.sleep(WeightPolicy.WAIT)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate all of the memory again, regardless of the tags."""
        if self._sleeps:
            await self._control.wake()

    release_kv_cache, resume_kv_cache = sleep, wake_up

    async def clear_kv_cache(self, **_settings: Any) -> None:
        """No operation: no cache outlives an update of the weights, and verl's profiler does not reach verifiers."""

    start_profile = stop_profile = clear_kv_cache

    # ---- weights ----

    async def weight_layout(self) -> Any:
        """Layout in which a trainer packs weights (`WeightLayout`)."""
        return await asyncio.to_thread(getattr, self._rollout, "weight_layout")

    async def update_weights(self, weights: WeightSet, global_steps: int | None = None) -> int:
        """Load weights that a trainer has put into the object store. Running requests continue with them after their
        committed tokens. Returns their version."""
        await self._control.wake()
        version = await self._control.update(weights, WeightPolicy.KEEP)
        if global_steps is not None:
            await self.set_global_steps(global_steps)
        return version

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the trainer's step that made the present weights."""
        self._control.relabel(global_steps)
        self._seeds.begin_step(global_steps)

    async def close(self) -> None:
        """End the rollout."""
        await asyncio.to_thread(self._rollout.close)

    # ---- inner parts ----

    def _start(self) -> Rollout:
        import ray
        from verl.utils.fs import copy_to_local

        path, trusted = self._model
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        return Rollout(configuration(self._settings, copy_to_local(path), trusted, has_gpus))

    def _facts(self, output: Trajectory) -> dict[str, Any]:
        steps = self._control.labels
        last, first = output.weight_version, output.versions[0][0] if output.versions else output.weight_version
        return {
            "global_steps": steps.get(last),
            "min_global_steps": steps.get(first),
            "max_global_steps": steps.get(last),
            "spec_num_draft_tokens": output.stats.drafted,
            "spec_num_accepted_tokens": output.stats.accepted,
            "spec_num_verify_steps": output.stats.steps,
        }


def _token_output(token_ids: list[int], logprobs: list[float] | None, reason: str, facts: dict[str, Any]) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(token_ids=token_ids, log_probs=logprobs, stop_reason=reason, extra_fields=facts)


def _value(section: Any, path: str) -> Any:
    """Value at a path in mappings and objects; None if there is none."""
    for name in path.split("."):
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return section


def _digest(tokens: Sequence[int] | bytes) -> int:
    data = tokens if isinstance(tokens, bytes) else np.asarray(tokens, dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
