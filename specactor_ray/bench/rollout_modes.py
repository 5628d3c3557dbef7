"""Comparison of `specactor bench rollout`: the modes one after the other on the same prompts, seeds and cores.

Every variant has its own actors, which start and end with it, on one Ray cluster. A short warm-up on its own prompt is
not counted, and leaves nothing that a drafter could look up.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.bench.comparison import Output, Place, differences, figures_of, with_ratios
from specactor_ray.bench.micro import refuse_existing
from specactor_ray.bench.variants import BenchMode, Variant, plan_variants
from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config, to_yaml
from specactor_ray.core.console import say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import make_folder, remove_if_empty, require_folder, write_json
from specactor_ray.core.progress import ProgressState, rollout_progress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.preflight import check_target, require_gpus, require_named, start_notes
from specactor_ray.rollout.prompts import Prompt, encode_prompt, read_prompts
from specactor_ray.target.vllm_settings import require_vllm

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout

WARM_UP_PROMPTS: list[Prompt] = ["Name three colours.", "Count from one to five."]
WARM_UP = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass(frozen=True)
class Workload:
    """Prompts and their sampling parameters."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: tuple[SamplingParams, ...]
    """Sampling parameters of each prompt."""


def plan_workloads(config: Config, paths: Sequence[Path], temperatures: Sequence[float]) -> list[Workload]:
    """One workload for every file of prompts at every temperature.

    Args:
        config: Configuration of the sampling, and of the prompts where `paths` is empty.
        paths: Files of prompts; a workload is named after its file.
        temperatures: Default: that of the configuration.

    Raises:
        ConfigError: There are no prompts.
        InputError: A file cannot be read, two have the same name, or a temperature is out of range.
    """
    if not paths and config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: --prompts prompts.jsonl")
    paths = paths or [Path(str(config.data.path))]
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise InputError("--prompts: two files have the same name; workloads are told apart by it")
    prompts = {path.stem: tuple(read_prompts(str(path), config.data.limit)) for path in paths}
    return [
        Workload(
            f"{name} T={temperature:g}",
            prompts[name],
            (replace(config.sampling, temperature=temperature),) * len(prompts[name]),
        )
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
    """Measure all variants on all workloads and write the report as JSON.

    Args:
        config: The decoupled configuration.
        modes: Modes to compare; plain must be among them.
        batches: Values of `target.max_batch`, each measured in every mode.
        output: The JSON file; default `bench.json` in a new folder under `run.dir`. Never overwritten.
        peers: Measure vLLM itself, too.

    Returns:
        The report, as in the file. An interruption leaves a report of the variants measured so far
        (`status` is `interrupted`).

    Raises:
        UserError: The configuration, the prompts or the cluster are wrong.
    """
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


def _checked_variants(
    config: Config, modes: Sequence[BenchMode], batches: Sequence[int], peers: bool
) -> Sequence[Variant]:
    """The variants to measure, after all checks that are possible before Ray starts."""
    require_named(config)
    require_gpus(config)
    variants = plan_variants(config, modes, batches)
    _reject_more_cores_than_there_are(config, variants)
    check_target(config)  # imports transformers, which takes seconds
    if peers:
        require_vllm()
        if config.target.tensor_parallel > 1:
            problem = f"{config.target.tensor_parallel} ranks, and --peers measures vLLM with one."
            raise ConfigError("target.tensor_parallel", problem, "use 1, or leave --peers out.")
    return variants


def _reject_more_cores_than_there_are(config: Config, variants: Sequence[Variant]) -> None:
    """Refuse more cores than this machine has, before Ray starts, where this machine is the cluster."""
    if config.cluster.address != "local" or not config.cluster.pin_cores:
        return
    cores = config.cluster.num_cpus or len(os.sched_getaffinity(0))
    largest = max(variants, key=lambda variant: variant.total_cores)
    if largest.total_cores > cores:
        problem = (
            f"{largest.label!r} would take {largest.total_cores} cores, and there are {cores}: every variant gets the "
            "verifiers' and all drafters' cores together."
        )
        fix = "let drafters share a core (drafters.N.cores=0.5), or lower drafters.N.replicas or target.cores."
        raise ConfigError("drafters", problem, fix)


class Bench:
    """Measures variants, keeps their figures, and compares them with plain decoding of the same workload and batch."""

    def __init__(self, workloads: Sequence[Workload], console: Console) -> None:
        self._workloads, self._console = list(workloads), console
        self.measured: list[dict[str, Any]] = []
        """Figures of every variant and workload so far."""
        self._references: dict[tuple[str, int], Mapping[Place, Output]] = {}

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
        encoded = [
            (
                workload.name,
                tuple(encode_prompt(tokenizer, prompt, config.data.chat) for prompt in workload.prompts)
                * config.data.n,
                workload.sampling * config.data.n,
            )
            for workload in self._workloads
        ]
        self.measured += measure_peers(config, batches, encoded, self._console)

    def reference(self, workload: str, batch: int) -> Mapping[Place, Output]:
        """Outputs of the first variant of this batch."""
        return self._references[workload, batch]

    def results(self) -> list[dict[str, Any]]:
        """All figures so far, by batch and workload, with the ratio to the fastest plain variant of both."""
        order = [workload.name for workload in self._workloads]
        return with_ratios(sorted(self.measured, key=lambda m: (m["batch"], order.index(m["workload"]))))

    def _roll_out(self, rollout: Rollout, workload: Workload, title: str) -> tuple[dict[Place, Output], Counter[str]]:
        outputs: dict[Place, Output] = {}
        failures: Counter[str] = Counter()
        before = rollout.committed_tokens  # tokens of the warm-up

        def read() -> ProgressState:
            metrics = rollout.metrics()
            tokens = rollout.committed_tokens - before
            return ProgressState(len(outputs), failures.total(), tokens, metrics.acceptance_length, metrics.supply)

        with rollout_progress(self._console, title, len(workload.prompts) * rollout.config.data.n, read):
            for one in rollout.stream(workload.prompts, workload.sampling):
                place = (one.prompt_index, one.sample_index)
                outputs[place] = Output(one.token_ids, one.finish_reason, one.error, one.margins)
                if one.finish_reason == "error":
                    failures[one.error] += 1
        return outputs, failures


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
                "sampling": asdict(workload.sampling[0]),
            }
            for workload in workloads
        ],
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }
