"""Ground truth of one simulation: outputs of requests, guesses of drafters, and durations.

A request is identified by its seed. A token of the target is a function of (seed, weights, position), as with keyed
sampling; the candidates of a draft method at a position, given that the tokens before it are right, are functions of
(method, seed, weights, position). So runs of different policies have the same tokens and the same guesses.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from specactor_ray.config.methods import acting_drafters, hosted_drafters, traits
from specactor_ray.config.schema import DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError, keys_of
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import GAPS, ranges_of
from specactor_ray.plan.hardware import (
    MERGE_LAYER_S,
    DeviceSpec,
    DraftTime,
    MeasuredHardware,
    RooflineCost,
    StepSeconds,
    find_model,
    load_hardware,
)
from specactor_ray.simulation._kernels import NO_GUESS
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.scenario import (
    Arrival,
    MachineConfig,
    PythonConfig,
    ScenarioConfig,
    SkillConfig,
    WorkloadConfig,
    fits,
)

FIRST_SEED = 1_000_000
"""Seed of the first request of a rollout; the others follow."""
STRETCH = 32
"""Output tokens over which coverage and bursts are constant."""
_STANDARD = NormalDist()
_BLUR = 1.5
"""Noise of the gap, see `_gaps`, fitted to SmolLM2: top-1 accuracy by quartile of the gap between the top-2 scores:
0.35, 0.45, 0.63, 0.88 (mean 0.58)."""
_SECOND_BY_GAP = np.linspace(0.8, 1.55, GAPS)
"""`(GAPS,)`: chance of the second candidate by range of the gap, relative to its mean."""


def _positions(sampling: SamplingParams) -> slice:
    """Positions of the request in the output of its seed."""
    return slice(sampling.first_position, sampling.first_position + sampling.max_tokens)


def guesses(ranks: np.ndarray, output: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 `(n,)`: the first candidates, or `NO_GUESS`; a wrong one is the next token of the vocabulary."""
    return np.where(ranks == NO_GUESS, NO_GUESS, (output.astype(np.int32) + (ranks > 0)) % vocab_size)


class GeneratedText:
    """Outputs of given lengths, with guesses drawn from the skill of each method.

    A guess is right where a standard normal draw of (request, position) is below a threshold (a probit model). The
    threshold varies over requests and over stretches of an output such that its mean probability stays `mean`.

    Args:
        lengths: Seed of a request → number of its output tokens.
        skills: Accuracy of the draft methods.
        correlation: Share of variance that all methods have in common, in requests, stretches and single positions: at
            1 methods of equal mean are right and wrong at the same positions, and a race of them gains nothing.
        seed: Seed of all draws.
        methods: Used methods; guesses of others are not drawn. None: all.
    """

    vocab_size = 255
    """Vocabulary size of the tokens."""

    def __init__(
        self,
        lengths: Mapping[int, int],
        skills: Sequence[SkillConfig],
        correlation: float = 0.0,
        seed: int = 0,
        methods: Container[str] | None = None,
    ) -> None:
        numbered = enumerate(sorted(skills, key=lambda skill: skill.method))
        self._skills = [(n, skill) for n, skill in numbered if methods is None or skill.method in methods]
        self._lengths, self._seed = lengths, seed
        self._common, self._own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
        self._requests: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        """Seed → tokens, and by draft method `ranks`, int8."""

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(n,)`: the whole output of a request with these weights, at most `sampling.max_tokens` tokens."""
        tokens, _ = self._request(sampling.seed)
        return tokens[_positions(sampling)]

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(2, n)`: the right candidate of a drafter of this method at each output position after a right
        prefix (0: the first; `RANKS + 1`: none; `NO_GUESS`: there are none), and the range of the gap between the
        scores of the first two."""
        _, ranks = self._request(sampling.seed)
        return ranks[method][:, _positions(sampling)]

    def _request(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        found = self._requests.get(seed)
        if found is None:
            found = self._requests[seed] = self._make(seed)
        return found

    def _make(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        length = self._lengths[seed]
        stretches = -(-length // STRETCH)
        rng = np.random.default_rng([self._seed, seed])
        tokens = rng.integers(0, self.vocab_size, length, dtype=np.uint8)
        ranks = {}
        shared = [rng.standard_normal(size) for size in (1, stretches, length)] if self._skills else []
        for number, skill in self._skills:
            rng = np.random.default_rng([self._seed, seed, number])
            request, stretch, position = (
                self._common * common + self._own * rng.standard_normal(len(common)) for common in shared
            )
            scale = math.sqrt(1.0 + skill.spread**2 + skill.burst**2)
            base = _thresholds(skill.mean, skill.decay, 1 << stretches.bit_length())[:stretches] * scale
            threshold = base + skill.spread * request + skill.burst * stretch
            margin = np.repeat(threshold, STRETCH)[:length] - position
            covered = np.repeat(rng.random(stretches) < skill.coverage, STRETCH)[:length]
            gaps = _gaps(margin, rng)
            second, third = rng.random((2, length))
            rank = 1 + (second >= skill.second * _SECOND_BY_GAP[gaps]) * (1 + (third >= skill.third))
            fourth, fifth = rng.random((2, length))
            rank += (rank == 3) * (fourth >= skill.fourth) * (1 + (fifth >= skill.fifth))
            ranks[skill.method] = np.stack([np.where(covered, rank * (margin <= 0.0), NO_GUESS), gaps]).astype(np.int8)
        return tokens, ranks


def _gaps(margin: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranges of gaps between the first two scores: the distance of the draw below its threshold, plus noise."""
    return ranges_of(np.exp(margin - _BLUR * rng.gumbel(size=len(margin))))


@functools.lru_cache(maxsize=4096)
def _thresholds(mean: float, decay: float, stretches: int) -> np.ndarray:
    means = [mean * (1.0 - decay) ** (number * STRETCH / 1000.0) for number in range(stretches)]
    return np.array([_STANDARD.inv_cdf(min(max(p, 1e-6), 1.0 - 1e-6)) for p in means])


class RecordedText:
    """Outputs of real requests, with the candidates of real drafters. `requests`: seed → tokens, integers `(n,)`, and
    by method `ranks`, as those of `GeneratedText`."""

    def __init__(self, vocab_size: int, requests: Mapping[int, tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> None:
        self.vocab_size, self._requests = vocab_size, requests

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        """See `GeneratedText.output`."""
        return self._requests[sampling.seed][0][_positions(sampling)]

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        """See `GeneratedText.ranks`."""
        return self._requests[sampling.seed][1][method][:, _positions(sampling)]


def num_requests(scenario: ScenarioConfig) -> int:
    """Number of requests of a rollout, those included that wait at its end."""
    workload, target = scenario.workload, scenario.config.target
    if workload.arrival is Arrival.continuous:  # more than can have begun at the end of the last one that counts
        return workload.requests + 2 * target.max_batch * target.replicas
    return workload.requests


def draw_text(scenario: ScenarioConfig) -> GeneratedText:
    """The outputs of a scenario's requests, with the guesses of its drafters."""
    config, seed = scenario.config, scenario.seed
    lengths = draw_lengths(scenario.workload, num_requests(scenario), f"lengths {seed} 0")
    methods = [] if config.mode is ModeName.plain else [drafter.method for drafter in config.drafters]
    return GeneratedText(
        dict(enumerate(lengths, FIRST_SEED)), scenario.skills, scenario.correlation, scenario.seed, methods
    )


def draw_lengths(workload: WorkloadConfig, count: int, seed: str) -> list[int]:
    """Output lengths: log-normal with the workload's median and sigma, at least 1, cut at `max_tokens`."""
    rng = random.Random(seed)
    mu = math.log(workload.median_tokens)
    return [min(max(round(rng.lognormvariate(mu, workload.sigma)), 1), workload.max_tokens) for _ in range(count)]


def linear(forward_s: float, position_s: float = 0.0, row_s: float = 0.0) -> StepSeconds:
    """Fixed seconds per forward, per position, and per row."""
    return lambda rows, positions, context_tokens, prefill_tokens: (
        forward_s + row_s * rows + position_s * (positions + prefill_tokens)
    )


_STEP = linear(0.02, 0.0002)
LOOKUP = linear(0.0, row_s=5e-6)
"""Time of a lookup: 3.3 us an answer and 0.74 us a committed token
(docs/design/drafters.md)."""


_USUAL = DraftTime(linear(0.004))


@dataclass
class World:
    """Ground truth of a simulation."""

    text: GeneratedText | RecordedText
    target: StepSeconds = _STEP
    drafting: Mapping[str, DraftTime] = field(default_factory=dict)
    """Draft method → its durations; others take 4 ms per forward."""
    python: PythonConfig = field(default_factory=lambda: PythonConfig(0.0, 0.0, 0.0))
    load_s: float = 0.5
    """Seconds to load a model, for verifiers and draft actors."""
    sync_s: float = 0.5
    """Seconds to load new weights."""
    cache_tokens: float = float("inf")
    """Tokens of each verifier's cache."""
    max_model_len: int = 100_000
    state_size: int = 0
    """Numbers of the hidden states of a position, which EAGLE heads on other machines get; 0: their way is free."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of its weights."""

    def draft_time(self, method: str) -> DraftTime:
        return self.drafting.get(method) or _USUAL


def build_worlds(scenario: ScenarioConfig) -> list[World]:
    """The ground truth of a scenario on each kind of its machines: the same text, with the durations of that kind.
    ConfigError: the hardware does not exist or has no figures for a model, or a request is too long."""
    text, readers = draw_text(scenario), [one for one in acting_drafters(scenario.config) if one.traits.reads_features]
    shapes = [find_model(one.model) for one in readers if one.model and len(scenario.machines) > 1]
    states = max((shape.features * shape.hidden for shape in shapes), default=0)
    return [_world_on(machine, scenario, text, states) for machine in scenario.machines]


def _world_on(machine: MachineConfig, scenario: ScenarioConfig, text: GeneratedText, states: int) -> World:
    hardware, target = load_hardware(machine.accelerator or ""), scenario.config.target
    world = World(text, _elsewhere, python=scenario.python, load_s=scenario.load_s, state_size=states)
    verifies, hosted = fits(machine, target), {one.method: one for one in hosted_drafters(scenario.config)}
    if verifies:
        with keys_of("config.target"):
            cost = hardware.cost(target.model, target.gpus or target.cores)
        if isinstance(cost, RooflineCost):
            shapes = [find_model(drafter.model) for drafter in hosted.values() if drafter.model]
            beside = sum(shape.parameters * shape.weight_bytes for shape in shapes)
            world.target, world.cache_tokens = cost.seconds, cost.cache_tokens(scenario.cache_share, beside)
        else:
            world.target = cost
        _check_cache(world, scenario)
    drafters = scenario.config.drafters if scenario.config.mode is not ModeName.plain else []
    forwards, drafting = {skill.method: skill.forward_ms for skill in scenario.skills}, dict[str, DraftTime]()
    for index, drafter in enumerate(drafters):
        method, here = drafter.method, verifies if drafter.method in hosted else fits(machine, drafter)
        time = _draft_time(index, drafter, hardware, forwards.get(method)) if here else DraftTime(_elsewhere)
        drafting[method] = time
    world.drafting = drafting
    return world


def _elsewhere(*step: int) -> float:
    raise SimulationError("a step on machines without room for its actor")


def _check_cache(world: World, scenario: ScenarioConfig) -> None:
    """Refuse requests that a verifier cannot hold."""
    longest = scenario.workload.prompt_tokens + scenario.workload.max_tokens
    if longest > min(world.cache_tokens, world.max_model_len):
        problem = f"a request can have {longest:,} tokens, and the cache of a verifier holds {world.cache_tokens:,.0f}"
        problem += f", its context {world.max_model_len:,}."
        fix = "use shorter requests, a larger cache_share or more config.target.gpus."
        raise ConfigError("workload.max_tokens", problem, fix)


def _draft_time(
    index: int, drafter: DrafterConfig, hardware: DeviceSpec | MeasuredHardware, forward_ms: float | None
) -> DraftTime:
    is_lookup = traits(drafter.method, f"config.drafters.{index}.method").looks_up
    if forward_ms is not None and (is_lookup or drafter.model is None or isinstance(hardware, MeasuredHardware)):
        return DraftTime(linear(forward_ms / 1e3), is_lookup)
    if is_lookup:
        return DraftTime(LOOKUP, is_lookup)
    with keys_of(f"config.drafters.{index}"):
        if isinstance(hardware, MeasuredHardware):
            return DraftTime(hardware.cost(drafter.method, max(1, round(drafter.cores))))
        if drafter.model is None:
            raise ConfigError("model", "is not set.", "name a shape of conf/simulation/hardware/models.yaml.")
        cost = hardware.cost(drafter.model, max(drafter.gpus, 1))
    forward, model = cost.seconds, cost.model
    if forward_ms is not None:
        more_s = forward_ms / 1e3 - cost.seconds(1, 1, 0)
        forward = lambda *step: max(cost.seconds(*step) + more_s, 0.0)  # noqa: E731
    return DraftTime(forward, False, cost.fusion_seconds if model.features else None, model.layers * MERGE_LAYER_S)
