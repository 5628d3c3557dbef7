"""Validation of the simulator (`specactor simulate validate`): measure this machine, simulate the same requests on
its profile, and compare."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from specactor_ray.bench.profile import parse_axes
from specactor_ray.bench.profile_process import ProfileSession, Share
from specactor_ray.bench.rollout_modes import WARM_UP, WARM_UP_PROMPTS, Bench, Outputs, Workload, plan_workloads
from specactor_ray.bench.variants import Variant, draft_cores
from specactor_ray.config.methods import traits
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.console import say
from specactor_ray.plan.costs import CostPoint
from specactor_ray.rollout.preflight import check_target, require_named
from specactor_ray.rollout.prompts import encode_prompt, read_prompts
from specactor_ray.simulation.rollouts import SimulatedRollouts
from specactor_ray.simulation.scenario import MachinesConfig, PythonConfig, ScenarioConfig, StepsConfig
from specactor_ray.simulation.text import RecordedRequest
from specactor_ray.simulation.world import profile_world

if TYPE_CHECKING:
    from rich.console import Console

MODES = (ModeName.plain, ModeName.coupled, ModeName.decoupled)
WINDOWS = (1, 2, 4, 8)
CONTEXTS = (64, 192)
REPEATS = 3
ROUNDS = 3
_ROUNDS_PER_ROW = 2
"""Requests per row of a batch, so that a measurement begins, refills and ends like a rollout."""
_LEAST_REQUESTS = 4


@dataclass(frozen=True)
class Point:
    """Measured and simulated figures of one mode at one batch."""

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
    """Milliseconds of a mean step: `forward` (with sampling), `waiting`, `protocol`."""
    predicted_ms: Mapping[str, float]

    @property
    def error(self) -> float:
        """Relative error of the speed: 0.1 is a prediction that is 10% too fast."""
        return self.predicted / self.measured - 1.0


def validate_simulator(config: Config, batches: Sequence[int], console: Console) -> Iterator[Point]:
    """Profile and measure this machine in the same minutes, simulate the same requests, and compare, at each of these
    values of `target.max_batch`. Prompts, sampling, drafters and cores are those of the decoupled `config`.

    Yields:
        The points, batch by batch. An interruption is raised after the points of the finished rounds.

    Raises:
        UserError: The configuration or the prompts are wrong.
    """
    config = copy.deepcopy(config)
    config.target.record_margins = False
    require_named(config)
    check_target(config)
    from specactor_ray.cluster.connection import connect

    actors = len(MODES) * (config.target.replicas * config.target.cores + draft_cores(config))
    config.cluster.num_cpus = config.cluster.num_cpus or actors  # may exceed the machine's: one mode runs at a time
    # The cluster runs while steps are timed, too, because its own processes always take their share of the cores.
    with connect(config.cluster):
        for batch in batches:
            rounds: dict[str, list[Point]] = {}
            try:
                for point in _measure_rounds(config, batch, console):
                    rounds.setdefault(point.variant, []).append(point)
            except KeyboardInterrupt:
                yield from map(median_round, rounds.values())
                raise
            yield from map(median_round, rounds.values())


def report_of(points: Sequence[Point]) -> dict[str, Any]:
    """Points as plain data: `points` (with `error`), `median_error` and `max_error` of the absolute errors."""
    errors = [abs(point.error) for point in points]
    rows = [{**asdict(point), "error": point.error} for point in points]
    return {"points": rows, "median_error": median(errors), "max_error": max(errors)}


def _measure_rounds(config: Config, batch: int, console: Console) -> Iterator[Point]:
    """Run the three modes in turn, and time steps before and after each: a machine's speed changes within minutes."""
    from specactor_ray.rollout.rollout import Rollout

    workload, variants = _workload(config, batch), list(variants_of(config, batch))
    axes = parse_axes(sorted({max(1, batch // 2), batch}), WINDOWS, CONTEXTS, REPEATS)
    prompts = tuple(read_prompts(str(config.data.path), config.data.limit))
    share = Share(config, config.target.cores, axes, prompts, max_requests=4)
    with ExitStack() as stack:
        session = stack.enter_context(ProfileSession(share))
        running = [(variant, stack.enter_context(Rollout(variant.config))) for variant in variants]
        for _, rollout in running:
            rollout.generate(WARM_UP_PROMPTS, WARM_UP, n=1)
        before = session.verify(axes)
        for number in range(1, ROUNDS + 1):
            for variant, rollout in running:
                bench = Bench([workload], console)
                title = f"[round {number}/{ROUNDS}] {config.target.backend}, batch {batch}, {variant.label}"
                bench.measure_running(rollout, variant, workload, 0.0, title)
                after = session.verify(axes)
                outputs = bench.reference(workload.name, batch)
                point = _simulate(variant, workload, bench.measured[0], outputs, [*before, *after], session.drafting)
                say(console, f"{title}: simulated {point.predicted:.1f} tokens/s, measured {point.measured:.1f}")
                yield point
                before = after


def median_round(points: Sequence[Point]) -> Point:
    """The round with the median error; for an even number the lower of the middle two."""
    return sorted(points, key=lambda point: point.error)[(len(points) - 1) // 2]


def _workload(config: Config, batch: int) -> Workload:
    (workload,) = plan_workloads(config, [], [])
    count = max(_LEAST_REQUESTS, _ROUNDS_PER_ROW * batch)
    times = -(-count // len(workload.prompts))
    return replace(workload, prompts=(workload.prompts * times)[:count])


def variants_of(config: Config, batch: int) -> Iterator[Variant]:
    """Each mode with the verifier's own cores, so that one profile holds for all of them."""
    for mode in MODES:
        chosen = copy.deepcopy(config)
        chosen.mode, chosen.target.max_batch = mode, batch
        validate(chosen)
        beside = f" + {draft_cores(config)}" if mode is ModeName.decoupled else ""
        yield Variant(f"{mode.value} {config.target.replicas}x{config.target.cores}{beside}", batch, chosen)


def _simulate(
    variant: Variant,
    workload: Workload,
    figures: Mapping[str, Any],
    outputs: Outputs,
    verify: Sequence[CostPoint],
    drafting: Mapping[str, Sequence[CostPoint]],
) -> Point:
    """Simulate the measured variant on the workload, with its `figures` and `outputs`."""
    config = copy.deepcopy(variant.config)
    config.cluster.address = "auto"
    scenario = ScenarioConfig(
        config=config,
        machines=MachinesConfig(nodes=1, gpus=0.0, cpus=float(variant.total_cores)),
        python=PythonConfig(measured=True),
        steps=StepsConfig(load_s=1.0),
    )
    recording = _recording(config, workload, outputs, accuracy_of(config, figures["metrics"]))
    result = SimulatedRollouts(variant.label, scenario, profile_world(scenario, verify, drafting), recording).run()
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
    """Milliseconds of a mean step by part."""
    steps = max(metrics["steps"], 1)
    forward_s = metrics["forward_s"] + metrics["sampling_s"]
    parts = {"forward": forward_s, "waiting": metrics["waiting_s"], "protocol": metrics["protocol_s"]}
    return {name: round(1e3 * seconds / steps, 3) for name, seconds in parts.items()}


def accuracy_of(config: Config, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Draft method → share of right tokens among those with only right tokens before. Lookups are really done."""
    drafted, accepted = metrics["drafted_by_position"], metrics["accepted_by_position"]
    survival = [1.0, *(right / all_ for right, all_ in zip(accepted, drafted, strict=True))]
    tested = sum(all_ * before for all_, before in zip(drafted, survival, strict=False))
    rate = sum(accepted) / tested if tested else 0.0
    return {drafter.method: rate for drafter in config.drafters if not traits(drafter.method).looks_up}


def _recording(
    config: Config, workload: Workload, outputs: Outputs, accuracy: Mapping[str, float]
) -> list[RecordedRequest]:
    from specactor_ray.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    requests = []
    for (prompt, sample), output in sorted(outputs.items()):
        ids = encode_prompt(tokenizer, workload.prompts[prompt], config.data.chat)
        limit = workload.sampling.max_tokens
        requests.append(RecordedRequest(f"{prompt}/{sample}", tuple(ids), tuple(output.token_ids), limit, accuracy))
    return requests
