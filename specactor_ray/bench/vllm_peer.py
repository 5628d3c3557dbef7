"""Measurement of one peer: `vllm.LLM` in this process, unmodified except for two repairs of its CPU build."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from specactor_ray.bench.peers import PeerMeasured, PeerWork, TokenIds
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.child import Report
from specactor_ray.core.types import SamplingParams


def measure_peer(work: PeerWork, report: Report) -> list[PeerMeasured]:
    """Start vLLM, warm it up, and time every workload."""
    bind_to_cores(work.cores)
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.update(settings)
    llm = start(work.config.target, work.batch, work.speculative)
    generate(llm, [(1, 2, 3)], [SamplingParams(temperature=0.0, max_tokens=8)])
    measured = []
    for name, prompts, sampling in work.workloads:
        llm.reset_prefix_cache()
        before, begin = _counters(llm), time.perf_counter()
        outputs = generate(llm, prompts, sampling)
        seconds = time.perf_counter() - begin
        drafts, drafted, rows = (now - then for now, then in zip(_counters(llm), before, strict=True))
        tokens = sum(map(len, outputs))
        measured.append(PeerMeasured(name, seconds, len(outputs), tokens, drafts, drafted, rows))
        report(f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    llm.llm_engine.engine_core.shutdown()
    return measured


def start(target: TargetConfig, batch: int, speculative: dict[str, Any] | None) -> Any:
    """`vllm.LLM` of the configured target.

    Args:
        batch: Most requests at once.
        speculative: vLLM's `speculative_config`.
    """
    from vllm import LLM

    from specactor_ray.models.cache_size import cache_bytes, room_here
    from specactor_ray.models.loading import locate_model
    from specactor_ray.target.vllm_bridge import kernel_scan_without_llvmlite

    source, revision = locate_model(target.model)
    with kernel_scan_without_llvmlite():
        llm = LLM(
            model=str(source),
            revision=revision,
            tokenizer_revision=revision,
            dtype=target.dtype,
            max_model_len=target.max_model_len,
            max_num_seqs=batch,
            max_num_batched_tokens=max(target.max_step_tokens, target.max_model_len or 0),
            kv_cache_memory_bytes=int(cache_bytes(target, room_here(target))),
            enforce_eager=not target.compiled,
            speculative_config=speculative,
            generation_config="vllm",
            disable_log_stats=False,
            use_tqdm_on_load=False,
            **target.engine_arguments,
        )
    _repair_expand_kernel()
    return llm


def generate(llm: Any, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams]) -> list[TokenIds]:
    """Output tokens of every prompt."""
    from vllm import SamplingParams as VllmSamplingParams

    params = [
        VllmSamplingParams(
            temperature=one.temperature,
            top_k=one.top_k or -1,
            top_p=one.top_p,
            max_tokens=one.max_tokens,
            ignore_eos=one.ignore_eos,
            stop_token_ids=list(one.stop_token_ids),
            stop=list(one.stop),
            detokenize=bool(one.stop),  # without seeds: vLLM samples seeded requests one by one, and on CPUs not always
        )
        for one in sampling
    ]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tuple(one.outputs[0].token_ids) for one in llm.generate(inputs, params, use_tqdm=False)]


def _counters(llm: Any) -> tuple[int, int, int]:
    """Drafts verified, draft tokens, and steps that gave a request tokens (its first, and every interval after that),
    since the start."""
    values = {metric.name: getattr(metric, "value", getattr(metric, "count", 0)) for metric in llm.get_metrics()}
    drafts, drafted = (int(values.get(f"vllm:spec_decode_num_{name}", 0)) for name in ("drafts", "draft_tokens"))
    steps = (f"vllm:{name}_seconds" for name in ("time_to_first_token", "inter_token_latency"))
    return drafts, drafted, sum(int(values[name]) for name in steps)


def _repair_expand_kernel() -> None:
    """vLLM 0.32's CPU build writes the result of this function into a copy (issue 55005 there), so that temperatures
    and filters of steps with drafts are uninitialised memory. A comparison with that would be unfair to vLLM."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(output: Any, values: Any, ends: Any, old: Any, new: Any, longest: int = 0) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replaced = torch.where(values == old, torch.as_tensor(new, dtype=values.dtype), values)
        output[: int(ends[-1])] = torch.repeat_interleave(replaced, counts.long()).to(output.dtype)

    if hasattr(rejection_sampler.expand_kernel, "_impl"):  # only the CPU build replaces it
        rejection_sampler.expand_kernel._impl = expand
