"""Measurements of vLLM beside the variants of `bench rollout`: plain, and with its own draft methods.

Each peer is `vllm.LLM` in its own process, bound to its cores, unmodified except for two repairs of its CPU build. The
prompts, lengths and sampling parameters are those of the workloads; the sampled tokens are vLLM's own above temperature
0. Plain decoding is measured on all cores and on one, everything else on all.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from specactor_ray.bench.rollout_modes import figures_of
from specactor_ray.bench.stock import stock_llm
from specactor_ray.bench.variants import BenchMode, plan_variants
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.methods import WINDOW
from specactor_ray.config.schema import Config
from specactor_ray.core.child import Report, run_in_child
from specactor_ray.core.console import say
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams

EncodedWorkload = tuple[str, tuple[tuple[int, ...], ...], tuple[SamplingParams, ...]]
"""Name, encoded prompts, and sampling parameters of each prompt."""


@dataclass(frozen=True)
class PeerWork:
    """One peer and its workloads."""

    label: str
    speculative: dict[str, Any] | None
    """vLLM's `speculative_config`; None is plain decoding."""
    cores: tuple[int, ...]
    batch: int
    config: Config
    workloads: tuple[EncodedWorkload, ...]


def measure_peers(
    config: Config, batches: Sequence[int], workloads: Sequence[EncodedWorkload], console: Console
) -> list[dict[str, Any]]:
    """All peers at all batch sizes; rows as those of `Bench`, with the mode `peer` (plain decoding: `plain`).

    A peer that fails (for example because vLLM refuses a drafter) is named and left out.
    """
    results = []
    for work in _peers(config, batches, workloads):
        show = functools.partial(_show, console, f"batch {work.batch}, {work.label}")
        show("starting")
        try:
            results += run_in_child(measure_peer, work, work.label, show)
        except SpecActorError as error:
            show(f"left out, it failed: {str(error).strip().splitlines()[-1]}")
    return results


def _show(console: Console, title: str, text: str) -> None:
    say(console, f"{title}: {text}")


def _peers(config: Config, batches: Sequence[int], workloads: Sequence[EncodedWorkload]) -> Iterator[PeerWork]:
    for batch in batches:
        plain = plan_variants(config, [BenchMode.plain], [batch])[0]
        usable = tuple(sorted(os.sched_getaffinity(0))[: plain.total_cores])
        methods: list[tuple[str, dict[str, Any] | None, tuple[int, ...]]] = [
            ("plain", None, usable[:count]) for count in dict.fromkeys((len(usable), 1))
        ]
        methods += [(settings["method"], settings, usable) for settings in _own_methods(config)]
        for name, speculative, cores in methods:
            label = f"vllm {name} 1x{len(cores)}"
            yield PeerWork(label, speculative, cores, batch, config, tuple(workloads))


def _own_methods(config: Config) -> Iterator[dict[str, Any]]:
    """vLLM's counterparts of the configured methods, without `suffix`: it needs a package that vLLM has not."""
    for drafter in config.drafters:
        window = drafter.window or config.speculation.window or WINDOW
        counterparts: dict[str, dict[str, Any]] = {
            "ngram": {"prompt_lookup_min": drafter.min_match, "prompt_lookup_max": drafter.max_match},
            "draft_model": {"model": drafter.model},
            "eagle": {"method": "eagle3", "model": drafter.model, "num_speculative_tokens": min(window, 3)},
        }
        if drafter.method in counterparts:
            common = {"method": drafter.method, "num_speculative_tokens": window}
            yield {**common, **counterparts[drafter.method]}


def measure_peer(work: PeerWork, report: Report) -> list[dict[str, Any]]:
    """Start vLLM in this process, warm it up, and time every workload: a row each."""
    bind_to_cores(work.cores)
    llm = _start(work)
    from specactor_ray.rollout.trajectory import RolloutMetrics  # imports numba; vLLM sets its threads first

    _generate(llm, [(1, 2, 3)], [SamplingParams(temperature=0.0, max_tokens=8)])
    rows = []
    for name, prompts, sampling in work.workloads:
        llm.reset_prefix_cache()
        before, begin = _counters(llm), time.perf_counter()
        outputs = _generate(llm, prompts, sampling)
        seconds = time.perf_counter() - begin
        draft_steps, drafted, steps = (now - then for now, then in zip(_counters(llm), before, strict=True))
        tokens = sum(map(len, outputs))
        metrics = RolloutMetrics(
            row_steps=steps,
            committed_tokens=tokens,
            supplied_tokens=drafted,
            supplied_row_steps=draft_steps,
            drafted_tokens=drafted,
            accepted_tokens=tokens - steps,  # vLLM's count of accepted tokens includes those after the end
        )
        rows.append(
            {
                "variant": work.label,
                "mode": "peer" if work.speculative else "plain",
                "batch": work.batch,
                "total_cores": len(work.cores),
                "workload": name,
                "failures": {},
                "differences": None,
                "peer": True,
                **figures_of(len(outputs), tokens, seconds, metrics),
            }
        )
        report(f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    llm.llm_engine.engine_core.shutdown()
    return rows


def _start(work: PeerWork) -> Any:
    """`vllm.LLM` of the configured target."""
    from specactor_ray.models.cache_size import cache_bytes, room_here
    from specactor_ray.models.loading import locate_model

    target = work.config.target
    source, revision = locate_model(target.model)
    llm = stock_llm(
        target,
        model=str(source),
        revision=revision,
        tokenizer_revision=revision,
        max_num_seqs=work.batch,
        max_num_batched_tokens=max(target.max_step_tokens, target.max_model_len or 0),
        kv_cache_memory_bytes=int(cache_bytes(target, room_here(target))),
        speculative_config=work.speculative,
        disable_log_stats=False,
    )
    _repair_expand_kernel()
    return llm


def _generate(llm: Any, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams]) -> list[Sequence[int]]:
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
    return [one.outputs[0].token_ids for one in llm.generate(inputs, params, use_tqdm=False)]


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
