"""Scenarios: machines, models and requests, and the package's configuration for them.

Files are in `conf/simulation/`; this module has every key with its default and meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from specactor_ray.config.accelerators import KIND_LABEL, allows
from specactor_ray.config.fields import at_least, limited, not_empty, positive
from specactor_ray.config.load import load_as
from specactor_ray.config.methods import BUILT_IN, acting_drafters, traits
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, DrafterConfig, ModeName, TargetConfig
from specactor_ray.core.errors import ConfigError, keys_of
from specactor_ray.core.files import expanded, parse_json, read_foreign
from specactor_ray.plan.hardware import load_hardware
from specactor_ray.plan.search import RIGHT_BEHIND_WRONG
from specactor_ray.startup.machine import Devices, Machine, devices_of
from specactor_ray.startup.mode import settle

_SECOND, _THIRD, _FOURTH, _FIFTH = RIGHT_BEHIND_WRONG


def _within(least: float, most: float, default: Any) -> Any:
    """A field of numbers from `least` to `most`."""
    fix = f"use {least:g} or more, at most {most:g}."
    return limited(lambda value: least <= value <= most, fix, default)


def _share(default: float) -> Any:
    return _within(0, 1, default)


def _amount(default: float | None, most: float = 1e9) -> Any:
    return _within(0, most, default)


class Arrival(str, Enum):
    """Arrival of requests."""

    at_once = "at_once"
    """All requests arrive at the start of a step; the step ends with the last of them."""
    continuous = "continuous"
    """New requests wait at any time; the run ends when `workload.requests` of them have ended."""


@dataclass
class WorkloadConfig:
    """The requests of one rollout."""

    requests: int = at_least(1, 256)
    """Requests of a rollout; each sample of a group counts."""
    group: int = at_least(1, 8)
    """Samples per prompt."""
    prompt_tokens: int = at_least(1, 256)
    """Tokens of each prompt."""
    median_tokens: int = at_least(1, 1000)
    """Median of the output lengths, which are log-normal."""
    sigma: float = _amount(0.8, most=10)
    """Standard deviation of the logarithm of the lengths; 0 makes all outputs equally long."""
    max_tokens: int = at_least(1, 8192)
    """Tokens of the longest output; longer draws are cut."""
    arrival: Arrival = Arrival.at_once
    """Arrival of requests: `at_once` or `continuous`."""


@dataclass
class SkillConfig:
    """Accuracy of a draft method, given that it was right so far; see `world.GeneratedText`."""

    method: str = "draft_model"
    """Draft method, as in `config.drafters`."""
    mean: float = _share(0.7)
    """Mean probability over requests and positions that a draft token is right, given that those before it are."""
    spread: float = _amount(0.0, most=10)
    """Standard deviation of the threshold over requests; with 0.5 at a mean of 0.7 the middle two thirds of requests
    are between 0.55 and 0.85."""
    burst: float = _amount(0.0, most=10)
    """Standard deviation of the threshold over stretches of 32 tokens of one output."""
    decay: float = _share(0.0)
    """Share of `mean` that is lost per 1,000 output tokens."""
    coverage: float = _share(1.0)
    """Share of stretches with guesses: lookups find matches in some places only."""
    second: float = _share(_SECOND)
    """Probability that the second candidate is right where the first is wrong: the mean over ranges of the gap between
    their scores, 0.3 where the gap is small, 0.5 where it is large."""
    third: float = _share(_THIRD)
    """Probability that the third candidate is right where the first two are wrong."""
    fourth: float = _share(_FOURTH)
    """Probability that the fourth candidate is right where those before it are wrong."""
    fifth: float = _share(_FIFTH)
    """Probability that the fifth candidate is right where those before it are wrong."""
    forward_ms: float | None = _amount(None)
    """Milliseconds of a draft forward of one row (or of a lookup) in place of the hardware's figure; more rows and
    context add what they add on the hardware."""


@dataclass
class PythonConfig:
    """Time of the package's Python; the defaults were measured by `scripts/bench_protocol.py` at 128 rows on two
    cores."""

    verify_row_us: float = _amount(1.1)
    """Microseconds per row of a verify step with drafts."""
    plain_row_us: float = _amount(0.3)
    """Microseconds per row of a verify step without drafts."""
    draft_row_us: float = _amount(0.7)
    """Microseconds per chain of a draft step: `model_proposer_us_128_rows` of that script."""


@dataclass
class NetworkConfig:
    """Network of calls between actors."""

    call_ms: float = _amount(0.55)
    """Milliseconds of a call, one way."""
    jitter: float = _share(0.3)
    """Share by which calls take at most longer or shorter."""


@dataclass
class TrainingConfig:
    """The other parts of a training step, on the GPUs of the rollout after it; see `training.py`."""

    utilisation: float = _share(0.0)
    """Share of the GPUs' peak that the update reaches; 0: there are rollouts alone."""
    forwards: int = _amount(1, most=10)
    """Forwards without a gradient over all tokens: 1 for the old log-probabilities, 2 with those of a reference."""
    recompute: bool = True
    """Whether the backward computes activations again (gradient checkpointing)."""
    fixed_s: float = _amount(0.0)
    """Seconds of a step that do not depend on its tokens: optimizer step, data, the switch of memory."""
    sync_gb_s: float = positive(50.0)
    """GB/s at which verifiers get the new weights, all at once."""


@dataclass
class LinkConfig:
    """The way from nodes of a kind to nodes of other kinds. On the way between two kinds, latencies add up, and the
    lower rate counts. The driver and the controller are beside the nodes of the first kind."""

    latency_ms: float = _amount(0.0)
    """Milliseconds, one way, in addition to `network.call_ms`."""
    gbit_s: float | None = positive(None)
    """Gbit/s of each node, each way; its messages pass one after the other. Null: messages take no time by size."""


@dataclass
class MachineConfig:
    """Nodes of one kind."""

    nodes: int = at_least(1, 1)
    gpus: float = _amount(8.0)
    """GPUs of each node."""
    cpus: float = at_least(1, 64.0)
    """CPU cores of each node."""
    accelerator: str | None = not_empty(None)
    """Cost models, as `hardware`, which is the default. `config.target.accelerator` and `config.drafters.N.accelerator`
    name it in capitals: `H100`."""
    price: float | None = _amount(None)
    """Dollars per GPU-hour; of nodes without GPUs, per hour of a CPU core. Default: that of the hardware file."""
    link: LinkConfig = field(default_factory=LinkConfig)


@dataclass
class ScenarioConfig:
    """One simulated cluster and its workload."""

    description: str = ""
    """Description in one line."""
    hardware: str = "h100"
    """Cost models of machines without `accelerator`: a file in `conf/simulation/hardware/` by its name, a file by
    its path, or the `summary.json` of a run."""
    part: int = at_least(1, 1)
    """Divisor of the cluster: 1/part of it is simulated, and figures are those of that part."""
    seed: int = _amount(0)
    """Seed of all draws; the same seed gives the same run."""
    cache_share: float = positive(0.85, up_to=1.0)
    """Share of a verifier's device memory for weights and cache."""
    correlation: float = _share(0.0)
    """Share of variance that the guesses of all methods have in common; at 1 they are right at the same positions."""
    machines: list[MachineConfig] = field(default_factory=lambda: [MachineConfig()])
    """Kinds of nodes. Actors get nodes in this order, as far as there is room."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    skills: list[SkillConfig] = field(default_factory=list)
    """Skills, one for each draft method."""
    python: PythonConfig = field(default_factory=PythonConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    load_s: float = _amount(30.0)
    """Seconds in which an actor loads its model."""
    config: Config = field(default_factory=Config)
    """Configuration of the package. `target.model` and `drafters.N.model` are names of shapes in
    `conf/simulation/hardware/models.yaml`."""
    variants: dict[str, Any] = field(default_factory=dict)
    """Compared variants: name → overrides of the scenario, such as [config.mode=plain, config.target.replicas=2]."""


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> ScenarioConfig:
    """Read a scenario, check it, and resolve `config.mode: auto` by its machines. Raises ConfigError if a file cannot
    be read, or a key is invalid."""
    scenario = load_as(ScenarioConfig, path, overrides, folder="simulation")
    _check(scenario)
    return scenario


def variant_of(path: Path, overrides: Sequence[str], name: str) -> ScenarioConfig:
    """One of the scenario's variants, checked. `overrides`: `KEY=VALUE` items for all variants, which take precedence
    over those of the variant itself. Raises ConfigError if there is no such variant, or its overrides do not fit."""
    variants = load_as(ScenarioConfig, path, overrides, folder="simulation").variants
    if name not in variants:
        have = ", ".join(variants) or "none"
        raise ConfigError("--compare", f"the scenario has no variant {name!r}.", f"use some of: {have}.")
    items = variants[name] or []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"variants.{name}", "is no list of KEY=VALUE items.", f"write {name}: [config.mode=plain].")
    return load_scenario(path, [*items, *overrides])


def measured_skills(path: Path, skills: Sequence[SkillConfig]) -> list[str]:
    """Overrides of skills by the last third of a measured training: the `bench.json` of `specactor bench train`. A mean
    is the share of right draft tokens among those after right ones; the coverage of a lookup is the share of requests
    with a draft, if no other method drafted. ConfigError: the file has none of these methods, or cannot be read."""
    key, fix = "--acceptance", "name the bench.json of specactor bench train, with drafters of the scenario's skills."
    try:
        last = parse_json(read_foreign(expanded(path)))["thirds"][-1]
        counts = {method: (int(tried), int(right)) for method, (tried, right) in last["judged"].items() if tried}
        supplied, requests = last["supplied"]
        means = {method: right / tried for method, (tried, right) in counts.items()}
        coverage = supplied / requests if means else 0.0
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read ({error.strerror}).", fix) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{path} has no acceptance ({type(error).__name__}: {error}): it is damaged, or of an older version."
        raise ConfigError(key, problem, fix) from None
    items = []
    for number, skill in enumerate(skills):
        if skill.method in means:
            items.append(f"skills.{number}.mean={means[skill.method]:.4f}")
            if len(means) == 1 and traits(skill.method).looks_up:
                items.append(f"skills.{number}.coverage={min(coverage, 1.0):.4f}")
    if not items:
        measured = ", ".join(means) or "no method"
        problem = f"{path} measured {measured}, and the scenario has skills of "
        raise ConfigError(key, problem + ", ".join(skill.method for skill in skills) + ".", fix)
    return items


def _check(scenario: ScenarioConfig) -> None:
    machines = scenario.machines
    if not machines:
        raise ConfigError("machines", "there are none.", "give a kind of nodes at least: 'machines=[{nodes: 1}]'.")
    for number, one in enumerate(machines):
        key = f"machines.{number}.accelerator" if one.accelerator else "hardware"
        one.accelerator = one.accelerator or scenario.hardware
        with keys_of(key):
            load_hardware(one.accelerator)
    try:
        validate(scenario.config)
        cores, kinds = sum(int(one.cpus) * one.nodes for one in machines), Counter[str]()
        for one in machines:
            kinds[labels_of(one).get(KIND_LABEL, "")] += int(one.gpus) * one.nodes
        there = Devices(cores, kinds.total(), +kinds)
        scenario.config, _ = settle(scenario.config, Machine(there.cores, there.gpus), there)
    except ConfigError as error:
        raise ConfigError(f"config.{error.key}", error.problem, error.fix) from None
    _check_skills(scenario)
    _check_room(scenario, there)


def _check_room(scenario: ScenarioConfig, there: Devices) -> None:
    """Refuse a layout that does not fit the machines."""
    target, machines, needed = scenario.config.target, scenario.machines, devices_of(scenario.config)
    for name, count in (("gpus", needed.gpus), ("cpus", 0 if target.gpus else target.cores * target.replicas)):
        if count > sum(getattr(one, name) * one.nodes for one in machines):
            have = " and ".join(f"{one.nodes} x {getattr(one, name):g}" for one in machines)
            problem = f"{have} {name} are there, and the layout needs {count:g}."
            raise ConfigError("machines", problem, "raise machines.0.nodes, or lower config.target.replicas.")
    sizes = sizes_of(scenario.config)
    for key, size in sizes.items():
        fitting = [one for one in machines if fits(one, size)]
        if not fitting or size.replicas * size.gpus > sum(one.gpus * one.nodes for one in fitting):
            gpus = f"{size.gpus} GPUs" + (f" ({size.accelerator})" if size.accelerator else "")
            kinds = ", ".join(label for one in machines for label in labels_of(one).values())
            problem = f"there are not enough nodes with {gpus} and {size.cores:g} cores for {size.replicas} actors."
            fix = f"give machines more nodes, gpus or cpus; their kinds are {kinds or 'none'}."
            raise ConfigError(f"config.{key}", problem, fix)
    if shared := needed.lacking(there):
        key = next(key for key, size in sizes.items() if size.accelerator in shared)
        problem = f"the layout needs {needed.shortage(there)}."
        raise ConfigError(f"config.{key}.accelerator", problem, "leave it out, or give machines more nodes or gpus.")


def sizes_of(config: Config) -> dict[str, TargetConfig | DrafterConfig]:
    """The sections of verifiers and draft actors, by key."""
    return {"target": config.target, **{one.key: one for one in acting_drafters(config) if one.replicas}}


def labels_of(machine: MachineConfig) -> dict[str, str]:
    """The labels of nodes of this kind: Ray's accelerator type, the name of the hardware in capitals."""
    return {KIND_LABEL: Path(machine.accelerator or "").stem.upper()} if machine.gpus else {}


def fits(machine: MachineConfig, size: TargetConfig | DrafterConfig) -> bool:
    """Whether an empty node of this kind has room for a verifier, or a draft actor."""
    has_room = machine.gpus >= size.gpus and machine.cpus >= (size.cores or 0)
    return has_room and allows(size.accelerator, labels_of(machine))


def _check_skills(scenario: ScenarioConfig) -> None:
    used = {drafter.method for drafter in scenario.config.drafters}
    for index, skill in enumerate(scenario.skills):
        if skill.method not in BUILT_IN and skill.method not in used:
            problem = f"{skill.method!r} is no draft method."
            raise ConfigError(f"skills.{index}.method", problem, f"use one of {', '.join(BUILT_IN)}.")
    known = {skill.method for skill in scenario.skills}
    if len(known) < len(scenario.skills):
        raise ConfigError("skills", "a method is named twice.", "keep one element per method.")
    for index, drafter in enumerate(scenario.config.drafters if scenario.config.mode is not ModeName.plain else ()):
        if drafter.method not in known:
            problem = f"the skill of {drafter.method} is missing."
            fix = f"add an element to skills: {{method: {drafter.method}}}"
            raise ConfigError(f"config.drafters.{index}", problem, fix)
