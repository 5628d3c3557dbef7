"""Comparison of `specactor bench rollout`: the modes one after the other on the same prompts, seeds and cores.

Every variant has its own actors, which start and end with it, on one Ray cluster. A short warm-up on its own prompt is
not counted, and leaves nothing that a drafter could look up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.bench.micro import refuse_existing
from specactor_ray.bench.variants import BenchMode, Variant, plan_variants
from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config, to_yaml
from specactor_ray.config.schema import ModeName
from specactor_ray.core.console import say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import make_folder, remove_if_empty, require_folder, write_json
from specactor_ray.core.progress import ProgressState, rollout_progress, start_phase
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.preflight import check_target, refuse_early, start_notes
from specactor_ray.rollout.prompts import Prompt, encode_prompt, read_prompts
from specactor_ray.target.vllm_settings import require_vllm

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory

WARM_UP_PROMPTS: list[Prompt] = ["Name three colours.", "Count from one to five."]
WARM_UP = SamplingParams(temperature=0.0, max_tokens=8)
Place = tuple[int, int]
"""Prompt index and sample index, which identify a request in two rollouts."""
Outputs = Mapping[Place, "Trajectory"]


@dataclass(frozen=True)
class Workload:
    """Prompts and their sampling parameters."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams


def plan_workloads(config: Config, paths: Sequence[Path], temperatures: Sequence[float]) -> list[Workload]:
    """One workload for every file of prompts (default: `data.path`), with its name, at every temperature (default: that
    of the configuration). Raises UserError without prompts, for a file that cannot be read, or two of the same name."""
    if not paths and config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: --prompts prompts.jsonl")
    paths = paths or [Path(str(config.data.path))]
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise InputError("--prompts: two files have the same name, which names their workload")
    prompts = {path.stem: tuple(read_prompts(str(path), config.data.limit)) for path in paths}
    return [
        Workload(f"{name} T={temperature:g}", prompts[name], replace(config.sampling, temperature=temperature))
        for name in names
        for temperature in temperatures or [config.sampling.temperature]
    ]


def run_bench(
    config: Config,
    modes: Sequence[BenchMode],
    batches: Sequence[int],
    workloads: Sequence[Workload],
    output: Path | None,
    console: Console,
    peers: bool = False,
) -> dict[str, Any]:
    """Measure all variants (see `plan_variants`), and with `peers` vLLM itself, on all workloads. Returns the report,
    which is written to `output` (default: `bench.json` in a new folder under `run.dir`), never over another file; after
    an interruption it has what was measured. UserError: the configuration, the prompts or the cluster are wrong."""
    output = output or Path(config.run.dir).expanduser() / f"bench-{new_run_name()}" / "bench.json"
    refuse_existing(output, "--output")
    require_folder(output.parent, "--output")
    variants = _checked_variants(config, modes, batches, peers)
    for note in start_notes(config):
        say(console, note)
    made = make_folder(output.parent, "--output")
    report = _head(config, workloads, output)
    bench = Bench(workloads, console)
    from specactor_ray.cluster.connection import connect  # takes seconds, so only after the checks

    try:
        with sigterm_interrupts():
            with connect(config.cluster):
                for number, variant in enumerate(variants, start=1):
                    bench.measure(variant, f"[{number}/{len(variants)}]")
            if peers:
                bench.measure_peers(config, batches)
        report["status"] = "complete"
    except KeyboardInterrupt:
        report["status"] = "interrupted"
    finally:
        report["results"] = bench.results()
        if report["results"]:
            refuse_existing(output, "--output")
            write_json(output, report)
        else:
            remove_if_empty(*made)
    return report


@start_phase("checking the model")
def _checked_variants(
    config: Config, modes: Sequence[BenchMode], batches: Sequence[int], peers: bool
) -> Sequence[Variant]:
    """The variants to measure, after all checks that are possible before Ray starts."""
    refuse_early(config)  # every variant has the same devices
    variants = plan_variants(config, modes, batches)
    if peers:
        require_vllm()
        if config.target.tensor_parallel > 1:
            problem = f"{config.target.tensor_parallel} ranks, and --peers measures vLLM with one."
            raise ConfigError("target.tensor_parallel", problem, "use 1, or leave --peers out.")
    check_target(config)  # imports transformers, which takes seconds
    return variants


class Bench:
    """Measures variants, keeps their figures, and compares them with plain decoding of the same workload and batch."""

    def __init__(self, workloads: Sequence[Workload], console: Console) -> None:
        self._workloads, self._console = list(workloads), console
        self.measured: list[dict[str, Any]] = []
        """Figures of every variant and workload so far."""
        self._references: dict[tuple[str, int], Outputs] = {}

    def measure(self, variant: Variant, title: str) -> None:
        """Start the variant's actors, warm up, time each workload, compare its tokens, end the actors."""
        with signals_deferred():
            from specactor_ray.rollout.rollout import Rollout

        name = f"{title} batch {variant.batch}, {variant.label}"
        say(self._console, f"{name}: starting")
        begin = time.monotonic()
        with Rollout(variant.config) as rollout:
            rollout.generate(WARM_UP_PROMPTS, WARM_UP, n=1)
            start_seconds = time.monotonic() - begin
            for workload in self._workloads:
                self.measure_running(rollout, variant, workload, start_seconds, f"{name}, {workload.name}")

    def measure_running(
        self, rollout: Rollout, variant: Variant, workload: Workload, start_seconds: float, title: str
    ) -> None:
        """Time a workload on a rollout that has started, and compare its tokens."""
        rollout.forget_history()  # drops outputs of the same prompts at another temperature
        rollout.reset_metrics()
        begin = time.monotonic()
        outputs, failures = self._roll_out(rollout, workload, title)
        seconds, metrics, actors = time.monotonic() - begin, rollout.metrics(), rollout.status()
        reference = self._references.setdefault((workload.name, variant.batch), outputs)
        tokens = sum(len(output.token_ids) for output in outputs.values())
        self.measured.append(
            {
                **variant.facts(),
                "workload": workload.name,
                "start_seconds": round(start_seconds, 2),
                **figures_of(len(outputs), tokens, seconds, metrics),
                "failures": dict(failures),
                "actors": actors,
                "differences": differences(reference, outputs),
            }
        )

    def measure_peers(self, config: Config, batches: Sequence[int]) -> None:
        """Measure vLLM alone on the same workloads."""
        from specactor_ray.bench.peers import measure_peers
        from specactor_ray.models.loading import load_tokenizer

        tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
        encoded = []
        for workload in self._workloads:
            prompts = [encode_prompt(tokenizer, prompt, config.data.chat) for prompt in workload.prompts]
            prompts *= config.data.n
            encoded.append((workload.name, tuple(prompts), (workload.sampling,) * len(prompts)))
        self.measured += measure_peers(config, batches, encoded, self._console)

    def results(self) -> list[dict[str, Any]]:
        """All figures so far, by batch and workload, with the ratio to the fastest plain variant of both."""
        order = [workload.name for workload in self._workloads]
        return with_ratios(sorted(self.measured, key=lambda m: (m["batch"], order.index(m["workload"]))))

    def _roll_out(self, rollout: Rollout, workload: Workload, title: str) -> tuple[Outputs, Counter[str]]:
        outputs, failures = dict[Place, "Trajectory"](), Counter[str]()
        before = rollout.committed_tokens  # tokens of the warm-up

        def read() -> ProgressState:
            metrics = rollout.metrics()
            tokens = rollout.committed_tokens - before
            return ProgressState(len(outputs), failures.total(), tokens, metrics.acceptance_length, metrics.supply)

        with rollout_progress(self._console, title, len(workload.prompts) * rollout.config.data.n, read):
            for one in rollout.stream(workload.prompts, workload.sampling):
                outputs[one.prompt_index, one.sample_index] = one
                if one.finish_reason == "error":
                    failures[one.error] += 1
        return outputs, failures


# ---- comparison ----


def differences(reference: Outputs, outputs: Outputs) -> list[dict[str, Any]]:
    """Every request with other tokens or another end than in the reference: `position` of the first differing token
    with both tokens and margins, or None and a `note` if the request is missing or ended otherwise, for example with an
    error."""
    found = []
    for place in sorted(reference.keys() | outputs.keys()):
        facts = _difference(reference.get(place), outputs.get(place))
        if facts:
            found.append({"prompt_index": place[0], "sample_index": place[1], "position": None, "note": "", **facts})
    return found


def _difference(expected: Trajectory | None, got: Trajectory | None) -> dict[str, Any]:
    """What differs in one request; empty if nothing does."""
    if expected is None or got is None:
        return {"note": f"{'the reference' if expected is None else 'this variant'} has no such request"}
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    position = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if position is not None:
        margin, own = (one.margins[position] if one.margins is not None else None for one in (expected, got))
        tokens = {"token": got.token_ids[position], "reference_token": expected.token_ids[position]}
        return {"position": position, **tokens, "margin": margin, "own_margin": own}
    ends = [f"{len(one.token_ids)} tokens ({one.finish_reason})" for one in (got, expected)]
    return {"note": f"{' in place of '.join(ends)} {got.error or expected.error}".strip()} if ends[0] != ends[1] else {}


def figures_of(requests: int, tokens: int, seconds: float, metrics: RolloutMetrics) -> dict[str, Any]:
    """Speed, counters, and the mean step split into its parts (milliseconds of a verifier's step)."""
    steps = max(metrics.steps, 1)
    parts = ("forward", "sampling", "protocol", "waiting")
    return {
        "seconds": round(seconds, 3),
        "requests": requests,
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 3),
        "ms_per_step": {part: round(1e3 * getattr(metrics, f"{part}_s") / steps, 4) for part in parts},
        "metrics": metrics.to_dict(),
    }


def with_ratios(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results with `identical`, `ratio`, `baseline` (the fastest plain variant of its batch size and workload) and
    `last_of_group` added."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in measured:
        groups.setdefault((result["batch"], result["workload"]), []).append(result)
    results = []
    for group in groups.values():
        base = max((one for one in group if one["mode"] == ModeName.plain.value), key=lambda one: one["tokens_per_s"])
        for result in group:
            added = {
                "identical": None if result.get("peer") else result["requests"] - len(result["differences"]),
                "ratio": round(result["tokens_per_s"] / max(base["tokens_per_s"], 1e-9), 4),
                "baseline": result is base,
                "last_of_group": result is group[-1],
            }
            results.append({**result, **added})
    return results


def all_identical(report: Mapping[str, Any]) -> bool:
    """Whether every variant gave the tokens of plain decoding, in every request. Peers are not compared."""
    return not any(result["differences"] for result in report["results"])


def _head(config: Config, workloads: Sequence[Workload], output: Path) -> dict[str, Any]:
    return {
        "benchmark": "rollout modes",
        "status": "failed",
        "output": str(output),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "workloads": [
            {
                "name": workload.name,
                "prompts": len(workload.prompts),
                "samples_each": config.data.n,
                "sampling": asdict(workload.sampling),
            }
            for workload in workloads
        ],
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }
