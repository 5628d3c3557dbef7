"""Is the simulator right here? Measure this machine, simulate the same requests on its profile, and compare:
`specactor simulate --validate`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specactor_ray.benchmarks.comparison import Output, Place
from specactor_ray.benchmarks.profile import parse_axes, run_profile
from specactor_ray.benchmarks.rollout_modes import Bench, Workload, plan_workloads
from specactor_ray.benchmarks.variants import Variant, draft_cores
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.config.validate import validate
from specactor_ray.observability.console import say
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.rollout.target_checks import check_target
from specactor_ray.simulation.costs import profile_world
from specactor_ray.simulation.rollouts import SimulatedRollouts
from specactor_ray.simulation.schema import MachinesConfig, PythonConfig, ScenarioConfig, StepsConfig
from specactor_ray.simulation.workload import RecordedRequest, Recording

if TYPE_CHECKING:
    from rich.console import Console

MODES = (ModeName.plain, ModeName.coupled, ModeName.decoupled)
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
    measured_ms: Mapping[str, float]
    """Of a mean step: `forward` (with sampling), `waiting`, `protocol`."""
    predicted_ms: Mapping[str, float]

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
    config.target.record_margins = False
    check_target(config)
    points = []
    from specactor_ray.cluster.connection import connect

    # The cluster runs while the profile is taken, too: its own processes take their share of the cores all the time.
    with tempfile.TemporaryDirectory(prefix="specactor-validation-") as folder, connect(config.cluster):
        for batch in batches:
            profiles = [_profile(config, batch, Path(folder) / f"{batch}-before.json", console)]
            measured = _measure(config, batch, console)
            profiles.append(_profile(config, batch, Path(folder) / f"{batch}-after.json", console))
            for one in measured:
                say(console, f"{backend}, batch {batch}, {one.variant.label}: simulating")
                points.append(_simulate(one, profiles))
    return points


@dataclass(frozen=True)
class _Measured:
    """One variant on one workload."""

    variant: Variant
    workload: Workload
    figures: Mapping[str, Any]
    outputs: Mapping[Place, Output]


def _variants(config: Config, batch: int) -> Iterator[Variant]:
    """Each mode with the verifier's own cores, so that one profile holds for all of them."""
    for mode in MODES:
        chosen = copy.deepcopy(config)
        chosen.mode, chosen.target.max_batch = mode, batch
        validate(chosen)
        beside = f" + {draft_cores(config)}" if mode is ModeName.decoupled else ""
        yield Variant(f"{mode.value} {config.target.replicas}x{config.target.cores}{beside}", batch, chosen)


def _profile(config: Config, batch: int, path: Path, console: Console) -> dict[str, Any]:
    axes = parse_axes(sorted({max(1, batch // 2), batch}), WINDOWS, CONTEXTS, REPEATS)
    return run_profile(config, axes, [config.target.cores], path, console, max_requests=4)


def _measure(config: Config, batch: int, console: Console) -> list[_Measured]:
    (workload,) = plan_workloads(config, [], [])
    count = max(_LEAST_REQUESTS, _ROUNDS_PER_ROW * batch)
    times = -(-count // len(workload.prompts))
    prompts, sampling = (workload.prompts * times)[:count], (workload.sampling * times)[:count]
    workload = replace(workload, prompts=prompts, sampling=sampling)
    found = []
    for number, variant in enumerate(_variants(config, batch), start=1):
        bench = Bench([workload], console)
        bench.measure(variant, f"[{number}/{len(MODES)}]")
        found.append(_Measured(variant, workload, bench.measured[0], bench.reference(workload.name, batch)))
    return found


def _simulate(measured: _Measured, profiles: Sequence[Mapping[str, Any]]) -> Point:
    variant, figures = measured.variant, measured.figures
    config = copy.deepcopy(variant.config)
    config.cluster.address = "auto"
    scenario = ScenarioConfig(
        config=config,
        machines=MachinesConfig(nodes=1, gpus=0.0, cpus=float(variant.total_cores)),
        python=PythonConfig(measured=True),
        steps=StepsConfig(load_s=1.0),
    )
    recording = _recording(config, measured.workload, measured.outputs)
    result = SimulatedRollouts(variant.label, scenario, profile_world(scenario, profiles), recording).run()
    return Point(
        config.target.backend,
        variant.label,
        variant.batch,
        float(figures["tokens_per_s"]),
        result.tokens_per_s,
        float(figures["metrics"]["acceptance_length"]),
        result.metrics.acceptance_length,
        _step_ms(figures["metrics"]),
        _step_ms(result.metrics.to_dict()),
    )


def _step_ms(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a mean step, by what they went to."""
    steps = max(metrics["steps"], 1)
    forward_s = metrics["forward_s"] + metrics["sampling_s"]
    parts = {"forward": forward_s, "waiting": metrics["waiting_s"], "protocol": metrics["protocol_s"]}
    return {name: round(1e3 * seconds / steps, 3) for name, seconds in parts.items()}


def _recording(config: Config, workload: Workload, outputs: Mapping[Place, Output]) -> Recording:
    from specactor_ray.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    requests = []
    for (prompt, sample), output in sorted(outputs.items()):
        ids = encode_prompt(tokenizer, workload.prompts[prompt], config.data.chat)
        limit = workload.sampling[prompt].max_tokens
        requests.append(RecordedRequest(f"{prompt}/{sample}", tuple(ids), tuple(output.token_ids), limit, {}))
    return Recording(requests, len(tokenizer))
