"""Arguments of vLLM's engine that `target.engine_arguments` may not set."""

from __future__ import annotations

from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ConfigError

SET_BY_KEYS = {
    "model": "target.model",
    "dtype": "target.dtype",
    "max_model_len": "target.max_model_len",
    "max_num_seqs": "target.max_batch",
    "max_num_batched_tokens": "target.max_step_tokens",
    "kv_cache_memory_bytes": "target.kv_cache_gb",
    "gpu_memory_utilization": "target.kv_cache_gb",
    "tensor_parallel_size": "target.tensor_parallel",
    "enforce_eager": "target.compiled",
    "trust_remote_code": "target.trust_remote_code",
    "revision": "target.model (org/name@REVISION)",
    "code_revision": "target.model (org/name@REVISION)",
    "seed": "sampling.seed",
    "speculative_config": "drafters and speculation",
    "spec_method": "drafters",
    "spec_model": "drafters",
    "spec_tokens": "speculation.window",
}
"""Argument → the key that sets it."""
_PROCESSES = "one process per verifier drives the engine and commits its tokens"
_LOGITS = "every token is sampled from the model's own logits, by keyed noise"
REFUSED = {
    "worker_cls": "keyed sampling runs in a worker of its own",
    "worker_extension_cls": "keyed sampling runs in a worker of its own",
    "additional_config": "it carries the settings of keyed sampling",
    "async_scheduling": "a step is planned with the tokens of the step before",
    "distributed_executor_backend": _PROCESSES,
    "pipeline_parallel_size": _PROCESSES,
    "data_parallel_size": _PROCESSES,
    "logits_processors": _LOGITS,
    "watermark": _LOGITS,
    "watermark_config": _LOGITS,
    "scheduler_cls": "drafts enter through vLLM's own scheduler",
    "enable_lora": "a verifier has one version of the weights",
    "enable_prefix_caching": "it is on, but where hidden states are exported: cached positions have none",
    "enable_chunked_prefill": "long prompts are read beside steps that decode",
    "skip_tokenizer_init": "prompts arrive as token ids",
    "enable_sleep_mode": "`Rollout.sleep` needs it on GPUs, and CPUs have none",
    "generation_config": "`sampling` holds how tokens are chosen",
}
"""Argument → reason why it cannot be set."""


def reject_engine_arguments(config: Config) -> None:
    given, backend = config.target.engine_arguments, config.target.backend
    if given and backend != "vllm":
        problem = f"target.backend={backend} has no such arguments."
        raise ConfigError("target.engine_arguments", problem, "leave it out, or use target.backend=vllm.")
    for name in given:
        key = f"target.engine_arguments.{name}"
        if name in SET_BY_KEYS:
            raise ConfigError(key, "another key sets it.", f"use {SET_BY_KEYS[name]}.")
        if name in REFUSED:
            raise ConfigError(key, f"it cannot be set: {REFUSED[name]}.", "leave it out.")
