"""`specactor bench train`: every step of a training is rolled out twice, without drafts and with, before its update.

Both rollouts have the same weights, prompts and seeds, so their tokens are equal and their seconds are a pair. They
take turns on the same cores, in an order that alternates; the update is the same work for both. Further rollouts, with
other drafts, may join them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.bench.pairs import DRAFTED, PLAIN, DraftCounts, StepPair, figures_of, parts_of, thirds
from specactor_ray.bench.rollout_modes import acceptance_length, differences
from specactor_ray.bench.variants import with_cores_of
from specactor_ray.config import Config, to_yaml
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import online_drafter
from specactor_ray.config.schema import ModeName
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError, InputError, SpecActorError, UserError
from specactor_ray.core.files import expanded, refuse_existing, require_folder, write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.runs.records import METRICS_FILE, read_records
from specactor_ray.startup.machine import Machine, devices_of
from specactor_ray.startup.resolve import resolve
from specactor_ray.trainer.run import checked, train
from specactor_ray.transport.messages import RequestStats

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
    from specactor_ray.trainer.experience import Experience, ExperienceMaker
    from specactor_ray.transport.messages import WeightSet

REPORT_FILE = "bench.json"
_SIZES = ("replicas", "cores", "gpus", "tensor_parallel", "max_batch", "max_step_tokens", "kv_cache_gb")
_LAYOUT = tuple(f"target.{name}" for name in _SIZES)
_DRAFTS = ("mode", "drafters", "speculation.", "target.hidden_layers")
"""What the rollouts of a step may have of their own: the layout of the target, and with drafts what they are."""


class PairedRollout:
    """The rollout of the training, and others beside it that get the same weights. `rollouts`: by name, that of
    the training first; `plain_every`: steps from one plain rollout to the next, 0 without any."""

    def __init__(self, rollouts: Mapping[str, Rollout], plain_every: int = 1) -> None:
        self._rollouts, self._plain_every, self.names = rollouts, plain_every, list(rollouts)
        self.pairs: list[StepPair] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts[DRAFTED], name)

    def update_weights(self, weights: WeightSet, policy: str | None = None) -> int:
        versions = {}
        for way, rollout in self._rollouts.items():
            begin = time.perf_counter()
            versions[way] = rollout.update_weights(weights, policy)
            if self.pairs:  # else the weights of the beginning
                self.pairs[-1].sync_s[way] = time.perf_counter() - begin
        return versions[DRAFTED]

    def sleep(self, keep_weights: bool = True) -> None:
        for rollout in self._rollouts.values():
            rollout.sleep(keep_weights)

    def wake(self) -> None:
        for rollout in self._rollouts.values():
            rollout.wake()

    def ways(self, step: int) -> list[tuple[str, Rollout]]:
        """The rollouts of a step, from 0, in an order that turns from step to step and is reversed in every second
        round of turns, so that each one is as often before as behind another."""
        turn, rest = divmod(step, self._plain_every) if self._plain_every else (-1, 1)
        ways = [(way, rollout) for way, rollout in self._rollouts.items() if way != PLAIN or not rest]
        turns, first = divmod(step - turn - 1 if rest else turn, len(ways))
        return (ways[first:] + ways[:first])[:: -1 if turns % 2 else 1]


class PairedMaker:
    """Makes the experience of a step with every rollout, and keeps the pair; the drafted one is trained on."""

    def __init__(self, maker: ExperienceMaker, rollout: PairedRollout) -> None:
        self._maker, self._rollout = maker, rollout

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """The drafted experience of this step; see `ExperienceMaker.collect`."""
        stream, made, seconds = self._maker.stream, dict[str, "Experience"](), dict[str, float]()
        position, skipped, drafts = stream.position, stream.skipped, dict[str, DraftCounts]()
        for way, one in self._rollout.ways(step):
            stream.position, stream.skipped = position, skipped
            before = one.drafters(), one.metrics()
            begin = time.perf_counter()
            made[way] = self._maker.collect(one, sampling, step)
            seconds[way] = time.perf_counter() - begin - made[way].reward_wait_s
            if way != PLAIN:
                drafts[way] = DraftCounts(
                    RequestStats.total(trajectory.stats for trajectory in made[way].trajectories),
                    judged_between(before[0], one.drafters()),
                    supplied_of(one.metrics().since(before[1])),
                    max(map(acceptance_length, made[way].trajectories), default=1.0),
                )
        drafted = made[DRAFTED]
        stream.position, stream.skipped = drafted.position
        lengths = [one.num_own_tokens for one in drafted.trajectories]
        reference = _by_place(made.get(PLAIN, drafted))
        self._rollout.pairs.append(
            StepPair(
                step + 1,
                position / stream.size,
                sum(lengths),
                seconds,
                drafts={way: drafts[way] for way in self._rollout.names if way in drafts},
                longest=max(lengths, default=0),
                differences=[
                    {"rollout": way, **difference}
                    for way in drafts
                    for difference in differences(reference, _by_place(made[way]))
                ],
            )
        )
        return drafted


def judged_between(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Draft method → tried and right draft tokens of its drafters between two reports (`Rollout.drafters`). The
    counts of new weights start at 0."""
    known = {(one["id"], one["version"]): one for one in before}
    found: dict[str, list[int]] = {}
    for one in after:
        start = known.get((one["id"], one["version"]), {})
        sums = found.setdefault(one["method"], [0, 0])
        for at, name in enumerate(("tried", "right")):
            sums[at] += one[name] - start.get(name, 0)
    return found


def supplied_of(metrics: RolloutMetrics) -> list[float]:
    """`DraftCounts.supplied` by the counters of verifiers."""
    drafting = 1.0 - metrics.suspended_steps / max(metrics.steps, 1)
    return [float(metrics.supplied_row_steps), metrics.row_steps * drafting]


def _by_place(experience: Experience) -> dict[tuple[int, int], Trajectory]:
    """Trajectories by the indices of task and sample, which identify them in both rollouts of a step."""
    return {(one.prompt_index, one.sample_index): one for one in experience.trajectories}


def run_bench(
    config: Config,
    output: Path | None,
    console: Console,
    plain: Sequence[str] = (),
    also: Mapping[str, Sequence[str]] = MappingProxyType({}),
    plain_every: int = 1,
) -> dict[str, Any]:
    """Train by `config`, each step rolled out in both ways. Returns the report, which is written to `output` (default:
    `bench.json` in the run's folder), also after an interruption or a failure.

    Args:
        plain: Overrides for the plain rollout, such as `target.replicas=2`: its best layout on the same cores.
        also: Further rollouts of each step, by name, with overrides such as `drafters.0.window=8`.
        plain_every: Steps from one plain rollout to the next; 0: there is none, and the others are compared with the
            drafted one.

    Raises:
        ConfigError: The configuration has no drafts to compare or continues a run, or a name of `also` is taken.
        InputError: Overrides are wrong, or change what is the same for all rollouts; besides the errors of `train`.
    """
    refuse_existing(output, "--output")
    if output is not None:
        require_folder(output.parent, "--output")
    _refuse_incomparable(config)
    if taken := {PLAIN, DRAFTED, drafted_name(config)} & also.keys():
        raise ConfigError("--also", f"{min(taken)!r} is the name of another rollout.", "give it another name.")
    if plain and not plain_every:
        raise InputError("--plain: with --plain-every 0 there is no plain rollout")
    ready = checked(config)  # before anything starts
    common = copy.deepcopy(ready[0].config)
    common.target.hidden_layers = config.target.hidden_layers  # else all export those that one's head reads
    others = {way: _beside_it(common, f"--also {way}", also[way], drafts=True) for way in also}
    if plain_every:
        others = {PLAIN: _beside_it(common, "--plain", plain, drafts=False), **others}
    with signals_deferred():  # takes seconds, so only after the checks
        from specactor_ray.cluster.connection import connect

    held: list[PairedRollout] = []
    beside = functools.partial(_beside, others, plain_every, held)
    say(console, "each step has several rollouts, by turns: rollout seconds of lines and metrics.jsonl are of all")
    cluster = copy.copy(config.cluster)
    if cluster.address == "local":  # room for all, of which one rolls out at a time
        cores = sum(devices_of(one).cores for one in (common, *others.values()))
        cluster.num_cpus = max(cores, cluster.num_cpus or 0)
    with sigterm_interrupts(), connect(cluster):
        try:
            outcome = train(config, console, beside=beside, ready=ready)
        except SpecActorError:
            if held and held[0].pairs:  # hours of work, perhaps
                folder = expanded(config.run.dir) / held[0].run_name
                report = _report(config, held[0].pairs, folder, "failed", output)
                say(console, f"report of the steps before the failure: {report['output']}")
            raise
    return _report(config, held[0].pairs, outcome.folder, outcome.status, output)


@contextlib.contextmanager
def _beside(
    others: Mapping[str, Config],
    plain_every: int,
    held: list[PairedRollout],
    rollout: Rollout,
    maker: ExperienceMaker,
) -> Iterator[tuple[PairedRollout, PairedMaker]]:
    """The rollouts beside that of the training, which `held` gets; see `trainer.run.Beside` and `run_bench`."""
    from specactor_ray.rollout.rollout import Rollout

    with contextlib.ExitStack() as parts:
        started = {way: parts.enter_context(Rollout(other)) for way, other in others.items()}
        held.append(PairedRollout({DRAFTED: rollout, **started}, plain_every))
        yield held[0], PairedMaker(maker, held[0])


def _report(
    config: Config, pairs: Sequence[StepPair], folder: Path, status: str, output: Path | None
) -> dict[str, Any]:
    """Write the report of the steps of a run in `folder`, and return it."""
    steps = figures_of(pairs, read_records(folder / METRICS_FILE))
    output = output or folder / REPORT_FILE
    report = {
        "benchmark": "train",
        "status": status,
        "output": str(output),
        "run": str(folder),
        "drafted": drafted_name(config),
        "steps": steps,
        "thirds": parts_of(steps, thirds(len(steps))),
        "epochs": parts_of(steps, [int(one["epoch"]) for one in steps]),
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }
    write_json(output, report, new=True)
    return report


def drafted_name(config: Config) -> str:
    """Name of the rollout of this configuration in tables: its methods, and which of them is taught."""
    taught = online_drafter(config)
    return ", ".join(one.method + " taught" * (one is taught) for one in config.drafters)


def _beside_it(config: Config, option: str, items: Sequence[str], drafts: bool) -> Config:
    """The configuration of an option's rollout beside that of `config`, on the same cores, those of draft actors
    included: without drafts, or with `drafts` of its own. InputError: it cannot run, or be compared with the others."""
    tree, own = yaml.safe_load(to_yaml(config)), _LAYOUT + _DRAFTS * drafts
    base = ["run.name=null", *([] if drafts else ["mode=plain"])]
    try:
        other = from_mapping(tree, [*base, *items])
        if changed := [key for key in _changed(from_mapping(tree, base), other) if not key.startswith(own)]:
            drafting = not drafts and changed[0].startswith(_DRAFTS)
            problem = "plain decoding has no drafts." if drafting else "the rollouts of a step have it in common."
            raise ConfigError(changed[0], problem, f"override {', '.join(one.strip('.') for one in own)}.")
        if drafts:
            _refuse_incomparable(other)
            if (taught := online_drafter(other)) is not None:
                key = f"drafters.{other.drafters.index(taught)}.online.where"
                problem = f"is {taught.online.where.value!r}, and the head of the training alone is taught."
                raise ConfigError(key, problem, f"--also '{option.removeprefix('--also ')}:{key}=off'")
        if not any(item.startswith("target.cores=") for item in items):
            other = with_cores_of(config, other)
        return resolve(other, Machine.here(), sampled=False).config
    except UserError as error:
        raise InputError(f"{option}: {error}") from None


def _changed(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    """Keys with another value in the second configuration or section."""
    for name in (field.name for field in dataclasses.fields(one)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if dataclasses.is_dataclass(mine):
            yield from _changed(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            yield prefix + name


def _refuse_incomparable(config: Config) -> None:
    if config.mode is ModeName.plain or not config.drafters:
        raise ConfigError("mode", "there are no drafts to compare with plain decoding.", "use mode=auto and drafters.")
    if config.resume != "never":
        raise ConfigError("resume", f"is {config.resume!r}, and a comparison is one run.", "leave it out.")
    if config.trainer.max_staleness:
        problem = "is above 0: rollouts beside the update have no seconds of their own."
        raise ConfigError("trainer.max_staleness", problem, "leave it out.")
