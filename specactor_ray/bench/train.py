"""`specactor bench train`: every step of a training is rolled out twice, without drafts and with, before its update.

Both rollouts have the same weights, prompts and seeds, so their tokens are equal and their seconds are a pair. They
take turns on the same cores, in an order that alternates; the update is the same work for both.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.bench.rollout_modes import differences
from specactor_ray.bench.variants import with_cores_of
from specactor_ray.bench.verdict import verdict
from specactor_ray.config import Config, to_yaml
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import ModeName
from specactor_ray.core import plot
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.files import refuse_existing, require_folder, write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.runs.records import METRICS_FILE, read_records
from specactor_ray.startup.machine import Machine, devices_of
from specactor_ray.startup.mode import settle
from specactor_ray.transport.messages import RequestStats

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
    from specactor_ray.trainer.experience import Experience, ExperienceMaker
    from specactor_ray.transport.messages import WeightSet

REPORT_FILE = "bench.json"
PLAIN, DRAFTED = "plain", "drafted"


@dataclass
class StepPair:
    """One step, rolled out in both ways. Seconds are by name of the way, `plain` or `drafted`."""

    step: int
    """Number of the step, from 1."""
    epoch: float
    """Share of the tasks that were taken before the step; above 1 they were seen before."""
    tokens: int
    rollout_s: dict[str, float] = field(default_factory=dict)
    sync_s: dict[str, float] = field(default_factory=dict)
    """Seconds of handing over the step's weights, without their export."""
    stats: RequestStats = field(default_factory=RequestStats)
    """Counters of the drafted outputs."""
    judged: dict[str, list[int]] = field(default_factory=dict)
    """Draft method → draft tokens that followed right ones, and those of them that were right."""
    supplied: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Requests with a draft, summed over steps, and all requests in steps in which drafts were not suspended."""
    longest: int = 0
    """Tokens of the longest output."""
    differences: list[dict[str, Any]] = field(default_factory=list)
    """Outputs that differ from plain decoding."""


class PairedRollout:
    """The rollout of the training, and a plain one beside it that gets the same weights."""

    def __init__(self, drafted: Rollout, plain: Rollout) -> None:
        self._drafted, self._plain = drafted, plain
        self.pairs: list[StepPair] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafted, name)

    def update_weights(self, weights: WeightSet, policy: str | None = None) -> int:
        for way, rollout in ((PLAIN, self._plain), (DRAFTED, self._drafted)):
            begin = time.perf_counter()
            version = rollout.update_weights(weights, policy)
            if self.pairs:  # else the weights of the beginning
                self.pairs[-1].sync_s[way] = time.perf_counter() - begin
        return version

    def sleep(self, keep_weights: bool = True) -> None:
        self._plain.sleep(keep_weights)
        self._drafted.sleep(keep_weights)

    def wake(self) -> None:
        self._plain.wake()
        self._drafted.wake()

    def ways(self, step: int) -> list[tuple[str, Rollout]]:
        """Both rollouts, in an order that alternates from step to step."""
        ways = [(PLAIN, self._plain), (DRAFTED, self._drafted)]
        return ways[::-1] if step % 2 else ways


class PairedMaker:
    """Makes the experience of a step twice, and keeps the pair; the drafted one is trained on."""

    def __init__(self, maker: ExperienceMaker, rollout: PairedRollout) -> None:
        self._maker, self._rollout = maker, rollout

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """The drafted experience of this step; see `ExperienceMaker.collect`."""
        stream, made, seconds = self._maker.stream, dict[str, "Experience"](), dict[str, float]()
        position, skipped = stream.position, stream.skipped
        for way, one in self._rollout.ways(step):
            stream.position, stream.skipped = position, skipped
            before = one.drafters(), one.metrics()
            begin = time.perf_counter()
            made[way] = self._maker.collect(one, sampling, step)
            seconds[way] = time.perf_counter() - begin - made[way].reward_wait_s
            if way == DRAFTED:
                judged = judged_between(before[0], one.drafters())
                supplied = supplied_of(one.metrics().since(before[1]))
        drafted = made[DRAFTED]
        lengths = [one.num_own_tokens for one in drafted.trajectories]
        self._rollout.pairs.append(
            StepPair(
                step + 1,
                position / stream.size,
                sum(lengths),
                seconds,
                stats=RequestStats.total(one.stats for one in drafted.trajectories),
                judged=judged,
                supplied=supplied,
                longest=max(lengths, default=0),
                differences=differences(_by_place(made[PLAIN]), _by_place(drafted)),
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
    """`StepPair.supplied` by the counters of verifiers."""
    drafting = 1.0 - metrics.suspended_steps / max(metrics.steps, 1)
    return [float(metrics.supplied_row_steps), metrics.row_steps * drafting]


def _by_place(experience: Experience) -> dict[tuple[int, int], Trajectory]:
    """Trajectories by the indices of task and sample, which identify them in both rollouts of a step."""
    return {(one.prompt_index, one.sample_index): one for one in experience.trajectories}


def run_bench(config: Config, output: Path | None, console: Console, plain: Sequence[str] = ()) -> dict[str, Any]:
    """Train by `config`, each step rolled out in both ways. Returns the report, which is written to `output` (default:
    `bench.json` in the run's folder), also after an interruption.

    Args:
        plain: Overrides for the plain rollout, such as `target.replicas=2`: its best layout on the same cores.

    Raises:
        ConfigError: The configuration has no drafts to compare, or continues a run, besides the errors of `train`.
    """
    refuse_existing(output, "--output")
    if output is not None:
        require_folder(output.parent, "--output")
    _refuse_incomparable(config)
    settled, _ = settle(config, Machine.here())
    cores = sum(devices_of(one).cores for one in (settled, _without_drafts(settled, plain)))
    with signals_deferred():  # takes seconds, so only after the checks
        from specactor_ray.cluster.connection import connect
        from specactor_ray.rollout.rollout import Rollout
        from specactor_ray.trainer.run import train

    held: list[PairedRollout] = []

    @contextlib.contextmanager
    def beside(rollout: Rollout, maker: ExperienceMaker) -> Iterator[tuple[PairedRollout, PairedMaker]]:
        with Rollout(_without_drafts(rollout.config, plain)) as other:
            held.append(PairedRollout(rollout, other))
            yield held[0], PairedMaker(maker, held[0])

    say(console, "each step is rolled out twice, by turns: rollout seconds of lines and metrics.jsonl are of both")
    cluster = copy.copy(config.cluster)
    if cluster.address == "local":  # room for both, of which one rolls out at a time
        cluster.num_cpus = max(cores, cluster.num_cpus or 0)
    with sigterm_interrupts(), connect(cluster):
        outcome = train(config, console, beside=beside)
    steps = figures_of(held[0].pairs, read_records(outcome.folder / METRICS_FILE))
    output = output or outcome.folder / REPORT_FILE
    report = {
        "benchmark": "train",
        "status": outcome.status,
        "output": str(output),
        "run": str(outcome.folder),
        "steps": steps,
        "thirds": parts_of(steps, thirds(len(steps))),
        "epochs": parts_of(steps, [int(one["epoch"]) for one in steps]),
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }
    write_json(output, report, new=True)
    return report


def _without_drafts(config: Config, items: Sequence[str]) -> Config:
    """The plain configuration on the same cores, those of draft actors included, with these overrides."""
    plain = with_cores_of(config, from_mapping(yaml.safe_load(to_yaml(config)), ["mode=plain", "run.name=null"]))
    return from_mapping(yaml.safe_load(to_yaml(plain)), items)


def _refuse_incomparable(config: Config) -> None:
    if config.mode is ModeName.plain or not config.drafters:
        raise ConfigError("mode", "there are no drafts to compare with plain decoding.", "use mode=auto and drafters.")
    if config.resume != "never":
        raise ConfigError("resume", f"is {config.resume!r}, and a comparison is one run.", "leave it out.")
    if config.trainer.max_staleness:
        problem = "is above 0: rollouts beside the update have no seconds of their own."
        raise ConfigError("trainer.max_staleness", problem, "leave it out.")


# ---- figures ----


def figures_of(pairs: Sequence[StepPair], records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps that both the pairs and the records of `metrics.jsonl` have, as plain data.

    `plain_s` and `drafted_s` are seconds of the rollout, `shared_s` those of update and export of the weights, which
    are the same work for both; `plain_step_s` and `drafted_step_s` are whole steps: rollout, shared work, hand-over of
    the weights, and with drafts the training of the drafter."""
    by_step = {record["step"]: record for record in records}
    steps = []
    for pair in pairs:
        if (record := by_step.get(pair.step)) is None or len(pair.sync_s) < 2:
            continue
        seconds = record["seconds"]
        shared = seconds["update"] + max(seconds["sync"] - sum(pair.sync_s.values()), 0.0)
        whole = {way: pair.rollout_s[way] + pair.sync_s[way] + shared for way in (PLAIN, DRAFTED)}
        steps.append(
            {
                "step": pair.step,
                "epoch": pair.epoch,
                "tokens": pair.tokens,
                "longest": pair.longest,
                "reward": record["train"]["reward_mean"],
                "plain_s": pair.rollout_s[PLAIN],
                "drafted_s": pair.rollout_s[DRAFTED],
                "shared_s": shared,
                "plain_step_s": whole[PLAIN],
                "drafted_step_s": whole[DRAFTED] + seconds.get("drafter", 0.0),
                "acceptance_length": (pair.tokens + pair.stats.discarded) / max(pair.stats.steps, 1),
                "by_method": {method: list(counts) for method, counts in pair.stats.by_method.items()},
                "judged": pair.judged,
                "supplied": pair.supplied,
                "differences": pair.differences,
            }
        )
    return steps


def thirds(count: int) -> list[int]:
    """The third, from 0, of each of `count` steps."""
    return [3 * number // count for number in range(count)]


def parts_of(steps: Sequence[Mapping[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
    """Sums and ratios over the steps of each part; `parts` has the part of each step. `rollout` and `step` are verdicts
    on the pairs of its steps; see `verdict`."""
    found = []
    for part in dict.fromkeys(parts):
        chosen = [one for one, place in zip(steps, parts, strict=True) if place == part]
        steps_s = {name: sum(one[name] for one in chosen) for name in _SECONDS}
        tokens = sum(one["tokens"] for one in chosen)
        length = tokens / sum(one["tokens"] / one["acceptance_length"] for one in chosen)
        found.append(
            {
                "part": part,
                "steps": [chosen[0]["step"], chosen[-1]["step"]],
                "tokens": tokens,
                "plain_tokens_per_s": tokens / steps_s["plain_s"],
                "drafted_tokens_per_s": tokens / steps_s["drafted_s"],
                "rollout_share": steps_s["plain_s"] / steps_s["plain_step_s"],
                "acceptance_length": length,
                "by_method": _summed([one["by_method"] for one in chosen]),
                "judged": _summed([one["judged"] for one in chosen]),
                "supplied": [sum(pair) for pair in zip(*(one["supplied"] for one in chosen), strict=True)],
                "rollout": _ratio(chosen, "plain_s", "drafted_s", length, "rollout"),
                "step": _ratio(chosen, "plain_step_s", "drafted_step_s", length, "whole steps"),
            }
        )
    return found


_SECONDS = ("plain_s", "drafted_s", "plain_step_s", "drafted_step_s")


def _ratio(steps: Sequence[Mapping[str, Any]], plain: str, drafted: str, length: float, subject: str) -> dict[str, Any]:
    """The verdict on pairs of steps; they are of the same tokens, so their speeds are reciprocals of the seconds."""
    return verdict([(1.0 / one[plain], 1.0 / one[drafted]) for one in steps], length, subject)


def _summed(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Sums of two counts by draft method."""
    methods = dict.fromkeys(method for one in counts for method in one)
    return {method: [sum(one.get(method, (0, 0))[at] for one in counts) for at in (0, 1)] for method in methods}


def write_plot(report: Mapping[str, Any]) -> str:
    """Write the speed of each step and the acceptance of each method as `bench.png` beside the report. Returns a line
    for the user."""
    steps = report["steps"]
    numbers = [one["step"] for one in steps]

    def speed(axes: Any) -> None:
        for name, label in (("", "rollout"), ("_step", "whole step")):
            ratios = [one[f"plain{name}_s"] / one[f"drafted{name}_s"] for one in steps]
            axes.plot(numbers, ratios, "o-", label=label)
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set(ylabel="times plain decoding", ylim=(0, None))

    def right(axes: Any) -> None:
        for method in dict.fromkeys(method for one in steps for method in one["by_method"]):
            counts = [one["by_method"].get(method, (0, 0)) for one in steps]
            axes.plot(numbers, [accepted / max(drafted, 1) for drafted, accepted in counts], "o-", label=method)
        axes.set(xlabel="step", ylabel="draft tokens right", ylim=(0, 1))

    return plot.write_plot(Path(report["output"]).with_suffix(".png"), speed, right)
