"""Measurements of unmodified vLLM beside the variants of `bench rollout`: plain, and with its own draft methods.

Each peer is `vllm.LLM` in a process of its own, bound to its cores. The prompts, lengths and sampling parameters are
those of the workloads; the sampled tokens are vLLM's own above temperature 0. Plain decoding is measured on all cores
and on one, everything else on all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from specactor_ray.bench.variants import BenchMode, plan_variants
from specactor_ray.config.methods import WINDOW
from specactor_ray.config.schema import Config
from specactor_ray.core.child import Report, run_in_child
from specactor_ray.core.console import say
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams

TokenIds = tuple[int, ...]
EncodedWorkload = tuple[str, tuple[TokenIds, ...], tuple[SamplingParams, ...]]
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


@dataclass(frozen=True)
class PeerMeasured:
    """Measurements of one workload."""

    workload: str
    seconds: float
    requests: int
    tokens: int
    draft_steps: int
    """Steps that verified drafts, summed over requests."""
    drafted: int
    row_steps: int
    """Steps that gave tokens, summed over requests. (vLLM's count of accepted tokens includes those after the end.)"""


def measure_peers(
    config: Config,
    batches: Sequence[int],
    workloads: Sequence[EncodedWorkload],
    console: Console,
) -> list[dict[str, Any]]:
    """All peers at all batch sizes; rows as those of `Bench`, with the mode `peer` (plain decoding: `plain`).

    A peer that fails (for example because vLLM refuses a drafter) is named and left out.
    """
    from specactor_ray.bench.vllm_peer import measure_peer

    results = []
    for batch in batches:
        for label, speculative, cores in _peers(config, batch):
            title = f"batch {batch}, {label}"
            say(console, f"{title}: starting")
            work = PeerWork(label, speculative, cores, batch, config, tuple(workloads))
            try:
                done = run_in_child(measure_peer, work, label, _shown(console, title))
            except SpecActorError as error:
                say(console, f"{title}: left out, it failed: {str(error).strip().splitlines()[-1]}")
                continue
            results += [_row(work, measured) for measured in done]
    return results


def _shown(console: Console, title: str) -> Report:
    return lambda text: say(console, f"{title}, {text}")


def _peers(config: Config, batch: int) -> Iterator[tuple[str, dict[str, Any] | None, tuple[int, ...]]]:
    """Label, speculation and cores of every peer."""
    plain = plan_variants(config, [BenchMode.plain], [batch])[0]
    usable = sorted(os.sched_getaffinity(0))[: plain.total_cores]
    for count in dict.fromkeys((len(usable), 1)):
        yield f"vllm plain 1x{count}", None, tuple(usable[:count])
    for method, speculative in _own_methods(config):
        yield f"vllm {method} 1x{len(usable)}", speculative, tuple(usable)


def _own_methods(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """vLLM's counterparts of the configured methods; its `suffix` needs a package that vLLM does not install."""
    for drafter in config.drafters:
        window = drafter.window or config.speculation.window or WINDOW
        counterparts: dict[str, dict[str, Any]] = {
            "ngram": {"prompt_lookup_min": drafter.min_match, "prompt_lookup_max": drafter.max_match},
            "draft_model": {"model": drafter.model},
            "eagle": {"method": "eagle3", "model": drafter.model, "num_speculative_tokens": min(window, 3)},
        }
        if importlib.util.find_spec("arctic_inference") is not None:
            counterparts["suffix"] = {}
        if drafter.method in counterparts:
            common = {"method": drafter.method, "num_speculative_tokens": window}
            settings = {**common, **counterparts[drafter.method]}
            yield settings["method"], settings


def _row(work: PeerWork, measured: PeerMeasured) -> dict[str, Any]:
    steps, accepted = measured.row_steps, measured.tokens - measured.row_steps
    metrics = {
        "committed_tokens": measured.tokens,
        "row_steps": steps,
        "drafted_tokens": measured.drafted,
        "accepted_tokens": accepted,
        "acceptance_length": measured.tokens / max(steps, 1),
        "acceptance_rate": accepted / max(measured.drafted, 1),
        "supply": measured.drafted / max(steps, 1),
        "supply_share": measured.draft_steps / max(steps, 1),
        "steps": 0,
    }
    return {
        "variant": work.label,
        "mode": "plain" if work.speculative is None else "peer",
        "batch": work.batch,
        "verifiers": 1,
        "cores_per_verifier": len(work.cores),
        "rows_per_verifier": work.batch,
        "draft_cores": 0,
        "total_cores": len(work.cores),
        "workload": measured.workload,
        "start_seconds": 0.0,
        "seconds": round(measured.seconds, 3),
        "requests": measured.requests,
        "tokens": measured.tokens,
        "tokens_per_s": round(measured.tokens / max(measured.seconds, 1e-9), 3),
        "ms_per_step": dict.fromkeys(("forward", "sampling", "protocol", "waiting"), 0.0),
        "metrics": metrics,
        "failures": {},
        "actors": [],
        "differences": None,
        "peer": True,
    }
