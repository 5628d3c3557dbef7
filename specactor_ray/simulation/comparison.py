"""Comparison of variants of one scenario, at one or several values of one of its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specactor_ray.core.environment import versions
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.simulation.costs import build_world
from specactor_ray.simulation.jobs import run_jobs
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.rollouts import Result, SimulatedRollouts
from specactor_ray.simulation.scenario import Arrival, ScenarioConfig, load_scenario, variant_of
from specactor_ray.simulation.workload import Recording, load_recording
from specactor_ray.simulation.world import World

ORACLE = "oracle"
"""Name of the result of the clairvoyant policy."""


@dataclass(frozen=True)
class VariantJob:
    """Job of one variant of a scenario, with the package's own policy or the clairvoyant one."""

    path: Path
    overrides: Sequence[str]
    variant: str
    clairvoyant: bool = False
    value: str = ""
    """Value of the swept key; empty without a sweep."""

    @property
    def name(self) -> str:
        at = f" at {self.value}" if self.value else ""
        return f"{'clairvoyant ' if self.clairvoyant else ''}{self.variant}{at}"

    def run(self, on_progress: Callable[[float], None]) -> Result:
        return simulate_variant(self.path, self.overrides, self.variant, on_progress, self.clairvoyant)


@dataclass(frozen=True)
class Sweep:
    """A key of the scenario and its values in turn."""

    key: str
    values: Sequence[str]


@dataclass(frozen=True)
class Compared:
    """Results of the variants at one value of the swept key."""

    value: str
    """Value of the swept key; empty without a sweep."""
    results: Sequence[Result]
    """Finished results in the order of the variants, the clairvoyant one (`oracle`) last."""


def compare_along(
    sweep: Sweep | None,
    path: Path,
    overrides: Sequence[str] = (),
    names: Sequence[str] | None = None,
    oracle: bool = False,
    processes: int | None = None,
    on_progress: Callable[[Mapping[str, float]], None] = lambda shares: None,
) -> list[Compared]:
    """Simulate variants of a scenario, at every value of a sweep.

    Args:
        sweep: Values of a key; None: the unchanged scenario.
        path: The scenario's file.
        overrides: `KEY=VALUE` items that hold for all variants.
        names: Variants to simulate; default: all of the scenario.
        oracle: Add a result `oracle`: the fastest variant with the clairvoyant policy (`clairvoyant.py`).
        processes, on_progress: See `run_jobs`.

    Returns:
        One element per value. After an interruption (KeyboardInterrupt) the finished results.

    Raises:
        UserError: The scenario, a variant or a recorded file is wrong.
        SimulationError: A variant cannot end, or the package raised an error.
    """
    along = [("", tuple(overrides))]
    if sweep is not None:
        along = [(value, (*overrides, f"{sweep.key}={value}")) for value in sweep.values]
    jobs: list[VariantJob] = []
    for value, items in along:
        chosen = choose_variants(path, items, names, oracle)
        jobs += [VariantJob(path, items, name, value=value) for name in chosen]
        jobs += [VariantJob(path, items, name, True, value) for name in (chosen if oracle else ())]
    found = run_jobs(jobs, processes, on_progress)
    compared = []
    for value, items in along:
        mine = [job for job in jobs if job.overrides == items]
        results = [found[job.name] for job in mine if not job.clairvoyant and job.name in found]
        limits = [found.get(job.name) for job in mine if job.clairvoyant]
        known = [limit for limit in limits if limit is not None]
        if known and len(known) == len(limits):
            best = max(known, key=lambda result: result.tokens_per_s_and_device)
            results.append(replace(best, variant=ORACLE))
        compared.append(Compared(value, results))
    return compared


def choose_variants(
    path: Path, overrides: Sequence[str] = (), names: Sequence[str] | None = None, oracle: bool = False
) -> list[str]:
    """The variants to simulate, checked and without duplicates.

    Raises:
        ConfigError: The scenario or a variant is wrong, or there is no such variant.
    """
    available = list(load_scenario(path, overrides).variants)
    chosen = list(dict.fromkeys(available if names is None else names))
    if not chosen:
        fix = "add some, such as variants: {plain: [config.mode=plain]}."
        raise ConfigError("variants", "the scenario has none.", fix)
    if oracle and ORACLE in chosen:
        raise ConfigError(f"variants.{ORACLE}", "--oracle adds a result of this name.", "rename the variant.")
    for name in chosen:
        variant_of(path, overrides, name)
    return chosen


def flattened(path: Path, overrides: Sequence[str], sweep: Sweep | None, names: Sequence[str]) -> list[str]:
    """One line for each override or swept key that replaces a variant's own value."""
    variants = load_scenario(path).variants
    keys = [item.partition("=")[0] for item in overrides] + ([sweep.key] if sweep is not None else [])
    lines = []
    for key in dict.fromkeys(keys):
        for name in names:
            for item in variants.get(name) or ():
                own = item.partition("=")[0]
                if own == key or own.startswith(f"{key}."):
                    lines.append(f"{key} is the same in all variants now; {name} would have {item}")
    return lines


def describe(scenario: ScenarioConfig) -> str:
    """Description of a scenario's requests in one line."""
    workload = scenario.workload
    if workload.trajectories is not None:
        return f"requests recorded in {workload.trajectories} (other keys of the workload do not apply to them)"
    groups = f"in groups of {workload.group}, " if workload.group > 1 else ""
    arrivals = {Arrival.at_once: "all at once", Arrival.continuous: "more always waiting"}
    arrival = arrivals.get(workload.arrival, f"at the rates of a day of {workload.day_s:g} s")
    lengths = f"outputs of {workload.median_tokens:,} tokens (median), at most {workload.max_tokens:,}"
    return f"{workload.requests:,} requests, {groups}{arrival}; {lengths}"


def simulate_variant(
    path: Path,
    overrides: Sequence[str],
    name: str,
    on_progress: Callable[[float], None] = lambda share: None,
    clairvoyant: bool = False,
) -> Result:
    """Simulate one variant in this process, with the package's policy or the clairvoyant one.

    Raises:
        UserError: The scenario, the variant or a recorded file is wrong.
        SimulationError: The run cannot end, or the package raised an error.
    """
    scenario, recording = variant_of(path, overrides, name), None
    world, workload = build_world(scenario), scenario.workload
    if workload.trajectories is not None:
        everything = workload.arrival is Arrival.continuous  # more requests wait than are counted
        recording = load_recording(Path(workload.trajectories), None if everything else workload.requests)
    check_requests(scenario, world, recording)
    world.clairvoyant = clairvoyant
    rollouts = SimulatedRollouts(name, scenario, world, recording, on_progress)
    try:
        return rollouts.run()
    except SimulationError as error:
        raise SimulationError(f"variant {name}: {error}") from error
    finally:
        rollouts.kernel.close()


def check_requests(scenario: ScenarioConfig, world: World, recording: Recording | None) -> None:
    """Reject requests that do not fit the target model.

    Raises:
        ConfigError: A verifier's cache or the model's context is too short for a request.
        InputError: Recorded tokens are not in the model's vocabulary.
    """
    workload, key = scenario.workload, "workload.max_tokens"
    longest = workload.prompt_tokens + workload.max_tokens
    if recording is not None:
        key = "workload.trajectories"
        longest = max(len(request.prompt) + request.max_tokens for request in recording.requests)
        if world.vocab_size is not None and recording.vocab_size > world.vocab_size:
            problem = f"{workload.trajectories} holds token {recording.vocab_size - 1:,}, and the vocabulary of"
            problem += f" {scenario.config.target.model} has {world.vocab_size:,} tokens"
            raise InputError(f"{key}: {problem}; set config.target.model to the model that was recorded")
    if longest > world.cache_tokens:
        problem = f"a request can have {longest:,} tokens, and the cache of a verifier holds {world.cache_tokens:,.0f}."
        raise ConfigError(key, problem, "use shorter requests, a larger cache_share or more config.target.gpus.")
    if longest > world.max_model_len:
        problem = f"a request can have {longest:,} tokens, and the model's context {world.max_model_len:,}."
        raise ConfigError(key, problem, "use shorter requests.")


def build_report(
    path: Path, overrides: Sequence[str], names: Sequence[str], results: Sequence[Result], oracle: bool
) -> dict[str, Any]:
    """The finished results as plain data. `names`: the requested variants; the first is the baseline."""
    scenario = load_scenario(path, overrides)
    return {
        "scenario": str(path),
        "overrides": list(overrides),
        "description": scenario.description,
        "workload": describe(scenario),
        "seed": scenario.seed,
        "part": scenario.part,
        "status": "complete" if len(results) == len(names) + oracle else "interrupted",
        "variants": list(names),
        "baseline": names[0],
        "device": "GPU" if scenario.config.target.gpus else "core",
        "results": [result.to_json() for result in results],
        "ratios": _ratios(results, names[0]),
        "of_oracle": _ratios(results, ORACLE) if oracle else {},
        "versions": versions(),
    }


def build_sweep_report(
    sweep: Sweep, path: Path, overrides: Sequence[str], names: Sequence[str], found: Sequence[Compared], oracle: bool
) -> dict[str, Any]:
    """A sweep as plain data: `points` has a report (`build_report`) per value."""
    points = [
        {"value": one.value, **build_report(path, [*overrides, f"{sweep.key}={one.value}"], names, one.results, oracle)}
        for one in found
    ]
    complete = all(point["status"] == "complete" for point in points)
    return {
        "scenario": str(path),
        "overrides": list(overrides),
        "sweep": sweep.key,
        "status": "complete" if complete else "interrupted",
        "points": points,
    }


def parse_sweep(text: str) -> Sweep:
    """`KEY=V1,V2,...`.

    Raises:
        InputError: There is no key, or no value.
    """
    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not key.strip() or not found:
        raise InputError(f"--sweep: {text!r} is not KEY=V1,V2,..., such as config.target.max_batch=16,64,256")
    return Sweep(key.strip(), list(dict.fromkeys(found)))


def _ratios(results: Sequence[Result], baseline: str) -> dict[str, float]:
    """Variant → tokens per second and device, relative to the baseline; empty if the baseline did not finish."""
    speeds = {result.variant: result.tokens_per_s_and_device for result in results}
    return {name: speed / speeds[baseline] for name, speed in speeds.items()} if baseline in speeds else {}
