"""Is the simulator right here? Measure this machine, simulate the same requests on its profile, and compare:
`specactor simulate --validate`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specactor_ray.benchmarks.comparison import Output, Place
from specactor_ray.benchmarks.profile import parse_axes, run_profile
from specactor_ray.benchmarks.rollout_modes import Bench, Workload, describe_variant, plan_workloads
from specactor_ray.benchmarks.variants import BenchMode, Variant, plan_variants
from specactor_ray.config.schema import Config
from specactor_ray.observability.console import say
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.rollout.target_checks import check_target
from specactor_ray.simulation.costs import profile_world
from specactor_ray.simulation.rollouts import SimulatedRollouts
from specactor_ray.simulation.schema import MachinesConfig, PythonConfig, ScenarioConfig, StepsConfig
from specactor_ray.simulation.workload import RecordedRequest, Recording

if TYPE_CHECKING:
    from rich.console import Console

MODES = (BenchMode.plain, BenchMode.coupled, BenchMode.decoupled)
WINDOWS = (1, 2, 4, 8)
CONTEXTS = (64, 192)
REPEATS = 5
_ROUNDS_PER_ROW = 2
"""Requests per row of a batch: what is measured begins, refills and ends like a rollout."""
_LEAST_REQUESTS = 6


@dataclass(frozen=True)
class Point:
    """One mode at one batch: what was measured, and what the simulator says of it."""

    backend: str
    variant: str
    batch: int
    measured: float
    """Tokens per second."""
    predicted: float
    measured_length: float
    """Acceptance length."""
    predicted_length: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10% too fast."""
        return self.predicted / self.measured - 1.0


def validate_simulator(
    config: Config, batches: Sequence[int], backends: Sequence[str], console: Console
) -> dict[str, Any]:
    """Profile and measure each backend in the same minutes, simulate it, and compare.

    Args:
        config: A decoupled configuration; its prompts, sampling, drafters and cores are used.
        batches: Values of `target.max_batch`.
        backends: `hf`, `vllm`.
        console: Where progress is shown.

    Returns:
        `points` (a dict each, with `error`), `median_error` and `max_error` of their absolute values.

    Raises:
        UserError: Something in the configuration or the prompts is wrong.
    """
    points = [point for backend in backends for point in _validate_backend(config, batches, backend, console)]
    errors = sorted(abs(point.error) for point in points)
    rows = [{**asdict(point), "error": point.error} for point in points]
    return {"points": rows, "median_error": median(errors), "max_error": errors[-1]}


def _validate_backend(config: Config, batches: Sequence[int], backend: str, console: Console) -> list[Point]:
    config = copy.deepcopy(config)
    config.target.backend = backend
    check_target(config)
    variants = [_first_of_each_mode(config, batch) for batch in batches]
    devices = sorted({variant.config.target.cores for group in variants for variant in group})
    measured: list[tuple[Variant, Workload, dict[str, Any], Mapping[Place, Output]]] = []
    with tempfile.TemporaryDirectory(prefix="specactor-validation-") as folder:
        profiles = [_profile(config, batches, devices, Path(folder) / "before.json", console)]
        from specactor_ray.cluster.connection import connect

        with connect(config.cluster):
            for batch, group in zip(batches, variants, strict=True):
                measured += _measure(config, batch, group, console)
        profiles.append(_profile(config, batches, devices, Path(folder) / "after.json", console))
    points = []
    for variant, workload, figures, outputs in measured:
        say(console, f"{backend}, batch {variant.batch}, {variant.label}: simulating")
        points.append(_simulate(variant, workload, figures, outputs, profiles))
    return points


def _first_of_each_mode(config: Config, batch: int) -> list[Variant]:
    """Plain decoding has several layouts; the first has all cores in one verifier, as coupled has."""
    chosen: dict[str, Variant] = {}
    for variant in plan_variants(config, MODES, [batch]):
        chosen.setdefault(variant.mode.value, variant)
    return list(chosen.values())


def _profile(
    config: Config, batches: Sequence[int], devices: Sequence[int], path: Path, console: Console
) -> dict[str, Any]:
    axes = parse_axes(sorted({1, *batches}), WINDOWS, CONTEXTS, REPEATS)
    return run_profile(config, axes, devices, path, console, max_requests=4)


def _measure(
    config: Config, batch: int, variants: Sequence[Variant], console: Console
) -> list[tuple[Variant, Workload, dict[str, Any], Mapping[Place, Output]]]:
    (workload,) = plan_workloads(config, [], [])
    count = max(_LEAST_REQUESTS, _ROUNDS_PER_ROW * batch)
    times = -(-count // len(workload.prompts))
    prompts, sampling = (workload.prompts * times)[:count], (workload.sampling * times)[:count]
    workload = replace(workload, prompts=prompts, sampling=sampling)
    found = []
    for number, variant in enumerate(variants, start=1):
        bench = Bench([workload], console)
        bench.measure(variant, f"[{number}/{len(variants)}]")
        found.append((variant, workload, bench.measured[0], bench.reference(workload.name, variant.batch)))
    return found


def _simulate(
    variant: Variant,
    workload: Workload,
    figures: Mapping[str, Any],
    outputs: Mapping[Place, Output],
    profiles: Sequence[Mapping[str, Any]],
) -> Point:
    config = copy.deepcopy(variant.config)
    config.cluster.address = "auto"
    scenario = ScenarioConfig(
        config=config,
        machines=MachinesConfig(nodes=1, gpus=0.0, cpus=float(variant.total_cores)),
        python=PythonConfig(measured=True),
        steps=StepsConfig(load_s=1.0),
    )
    world = profile_world(scenario, profiles)
    result = SimulatedRollouts(variant.label, scenario, world, _recording(config, workload, outputs)).run()
    described = describe_variant(variant)
    return Point(
        config.target.backend,
        str(described["variant"]),
        variant.batch,
        float(figures["tokens_per_s"]),
        result.tokens_per_s,
        float(figures["metrics"]["acceptance_length"]),
        result.metrics.acceptance_length,
    )


def _recording(config: Config, workload: Workload, outputs: Mapping[Place, Output]) -> Recording:
    from specactor_ray.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    requests = []
    for (prompt, sample), output in sorted(outputs.items()):
        ids = encode_prompt(tokenizer, workload.prompts[prompt], config.data.chat)
        limit = workload.sampling[prompt].max_tokens
        requests.append(RecordedRequest(f"{prompt}/{sample}", tuple(ids), tuple(output.token_ids), limit, {}))
    return Recording(requests, len(tokenizer))
