"""The modes one after the other on the same prompts, seeds and cores: what `specactor bench rollout` does.

Every variant has actors of its own, started for it and gone after it, on one Ray cluster. A short warm-up on a
prompt of its own is not counted, and leaves nothing behind that a drafter could look up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.benchmarks.comparison import Output, Place, differences
from specactor_ray.benchmarks.variants import Variant, plan_variants
from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config, to_yaml
from specactor_ray.config.schema import ModeName
from specactor_ray.errors import ConfigError, InputError
from specactor_ray.messages import SamplingParams
from specactor_ray.observability.console import say
from specactor_ray.observability.environment import hardware, versions
from specactor_ray.observability.progress import ProgressState, RolloutProgress
from specactor_ray.rollout.metrics import RolloutMetrics
from specactor_ray.rollout.output import remove_if_empty, write_json
from specactor_ray.rollout.prompts import Prompt, read_prompts
from specactor_ray.rollout.run import sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout

WARM_UP_PROMPTS: list[Prompt] = ["Name three colours.", "Count from one to five."]
WARM_UP = SamplingParams(temperature=0.0, max_tokens=8)
TIME_PARTS = ("forward", "sampling", "protocol", "waiting")


def run_bench(
    config: Config, modes: Sequence[ModeName], batches: Sequence[int], output: Path | None, console: Console
) -> dict[str, Any]:
    """Measure all variants and write the report as JSON.

    Args:
        config: The decoupled configuration; `data.path` names the prompts.
        modes: Modes to compare; plain must be among them.
        batches: Values of `target.max_batch`, each measured in every mode.
        output: The JSON file; default `bench.json` in a new folder under `run.dir`. Never overwritten.
        console: Where progress is shown.

    Returns:
        The report, as in the file. An interruption leaves a report of the variants measured so far
        (`status` is `interrupted`).

    Raises:
        UserError: Something in the configuration, the prompts or the cluster is wrong.
    """
    if config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: --prompts prompts.jsonl")
    output = output or Path(config.run.dir).expanduser() / f"bench-{new_run_name()}" / "bench.json"
    _reject_existing(output)
    prompts = read_prompts(config.data.path, config.data.limit)
    variants = plan_variants(config, modes, batches)
    made = _make_folder(output.parent)
    report = _head(config, len(prompts), output)
    bench = Bench(prompts, console)
    from specactor_ray.cluster.connection import connect  # takes seconds, so only after the checks

    try:
        with sigterm_interrupts(), connect(config.cluster):
            for number, variant in enumerate(variants, start=1):
                bench.measure(variant, f"[{number}/{len(variants)}]")
        report["status"] = "complete"
    except KeyboardInterrupt:
        report["status"] = "interrupted"
    finally:
        report["results"] = bench.results()
        if report["results"]:
            _reject_existing(output)
            write_json(output, report)
        else:
            remove_if_empty(*made)
    return report


class Bench:
    """Measures variants, keeps what each gave, and compares it with plain decoding of the same batch size."""

    def __init__(self, prompts: Sequence[Prompt], console: Console) -> None:
        self._prompts, self._console = list(prompts), console
        self._measured: list[dict[str, Any]] = []
        self._references: dict[int, Mapping[Place, Output]] = {}

    def measure(self, variant: Variant, title: str) -> None:
        """Start the variant's actors, warm up, time the rollout, compare its tokens, end the actors."""
        from specactor_ray.rollout.rollout import Rollout

        name = f"{title} batch {variant.batch}, {variant.label}"
        say(self._console, f"{name}: starting")
        begin = time.monotonic()
        with Rollout(variant.config) as rollout:
            rollout.generate(WARM_UP_PROMPTS, WARM_UP, n=1)
            rollout.reset_metrics()
            start_seconds, begin = time.monotonic() - begin, time.monotonic()
            outputs, failures = self._roll_out(rollout, name)
            seconds, metrics, actors = time.monotonic() - begin, rollout.metrics(), rollout.status()
        reference = self._references.setdefault(variant.batch, outputs)
        self._measured.append(
            {
                **describe_variant(variant),
                "start_seconds": round(start_seconds, 2),
                **measured_figures(outputs, seconds, metrics),
                "failures": dict(failures),
                "actors": actors,
                "differences": differences(reference, outputs),
            }
        )

    def results(self) -> list[dict[str, Any]]:
        """All figures so far, with the ratio to the fastest plain variant of the same batch size."""
        return with_ratios(self._measured)

    def _roll_out(self, rollout: Rollout, title: str) -> tuple[dict[Place, Output], Counter[str]]:
        outputs: dict[Place, Output] = {}
        failures: Counter[str] = Counter()
        before = rollout.committed_tokens  # of the warm-up

        def read() -> ProgressState:
            metrics = rollout.metrics()
            tokens = rollout.committed_tokens - before
            return ProgressState(len(outputs), failures.total(), tokens, metrics.acceptance_length, metrics.supply)

        with RolloutProgress(self._console, title, len(self._prompts) * rollout.config.data.n, read):
            for one in rollout.stream(self._prompts):
                place = (one.prompt_index, one.sample_index)
                outputs[place] = Output(one.token_ids, one.finish_reason, one.error, one.margins)
                if one.finish_reason == "error":
                    failures[one.error] += 1
        return outputs, failures


def describe_variant(variant: Variant) -> dict[str, Any]:
    """What was measured: mode, layout and cores."""
    target = variant.config.target
    return {
        "variant": variant.label,
        "mode": variant.mode.value,
        "batch": variant.batch,
        "verifiers": target.replicas,
        "cores_per_verifier": target.cores,
        "rows_per_verifier": target.max_batch,
        "draft_cores": variant.draft_cores,
        "total_cores": variant.total_cores,
    }


def measured_figures(outputs: Mapping[Place, Output], seconds: float, metrics: RolloutMetrics) -> dict[str, Any]:
    """Speed, counters, and the mean step split into its parts (milliseconds of a verifier's step)."""
    tokens = sum(len(output.token_ids) for output in outputs.values())
    steps = max(metrics.steps, 1)
    totals = (metrics.forward_s, metrics.sampling_s, metrics.protocol_s, metrics.waiting_s)
    split = {name: round(1e3 * total / steps, 4) for name, total in zip(TIME_PARTS, totals, strict=True)}
    return {
        "seconds": round(seconds, 3),
        "requests": len(outputs),
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 3),
        "ms_per_step": {**split, "protocol_median": round(1e3 * metrics.protocol_median_s, 4)},
        "metrics": metrics.to_dict(),
    }


def with_ratios(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results with `identical`, `ratio`, `baseline` (the fastest plain variant of its batch size) added."""
    best: dict[int, Mapping[str, Any]] = {}
    for result in measured:
        batch = result["batch"]
        faster = batch not in best or result["tokens_per_s"] > best[batch]["tokens_per_s"]
        if result["mode"] == ModeName.plain.value and faster:
            best[batch] = result
    results = []
    for number, result in enumerate(measured):
        base = best[result["batch"]]
        following = measured[number + 1]["batch"] if number + 1 < len(measured) else None
        added = {
            "identical": result["requests"] - len(result["differences"]),
            "ratio": round(result["tokens_per_s"] / max(base["tokens_per_s"], 1e-9), 4),
            "baseline": result is base,
            "last_of_batch": following != result["batch"],
        }
        results.append({**result, **added})
    return results


def all_identical(report: Mapping[str, Any]) -> bool:
    """Whether every variant gave the tokens of plain decoding for every request."""
    return all(result["identical"] == result["requests"] for result in report["results"])


def _reject_existing(output: Path) -> None:
    if output.exists():
        raise InputError(f"--output: {output} exists and is never overwritten; name another file")


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder; returns those that did not exist, the deepest first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: {folder} cannot be made ({error.strerror})") from None
    return made


def _head(config: Config, prompts: int, output: Path) -> dict[str, Any]:
    return {
        "benchmark": "rollout modes",
        "status": "failed",
        "output": str(output),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "prompts": {"path": config.data.path, "count": prompts, "samples_each": config.data.n},
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }
