"""`specactor demo`: plain decoding and drafting by turns, then a short GRPO run (`conf/train_demo.yaml`), on this
machine and in the minutes given."""

from __future__ import annotations

import copy
import difflib
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from specactor_ray.bench.rollout_modes import WARM_UP, WARM_UP_PROMPTS, Bench, Workload
from specactor_ray.bench.variants import Variant
from specactor_ray.config import load_config
from specactor_ray.config.schema import ModeName
from specactor_ray.core.console import say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.files import write_json
from specactor_ray.core.signals import interruption, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import read_prompts
from specactor_ray.trainer.rewards import RewardSample

REPORT_FILE = "report.json"
_MOST_CORES = 8
"""Most cores of the demo; the built-in model gains nothing from more."""
_SPEED_SHARE = 0.35
"""Share of the time for the first half."""
_PROMPTS, _PROMPTS_PER_ROUND = "conf/prompts/repetition.jsonl", 3
"""Edits of code, tables and texts: most of an output repeats its prompt, so drafts pay."""
_LEAST_ROUNDS, _MOST_ROUNDS, _LEAST_STEPS = 2, 5, 2
_END_S = 12.0
"""Seconds reserved for the checkpoint and the end of the cluster."""

Round = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Figures of `Bench` of plain decoding and of auto on the same prompts."""


@dataclass
class Demo:
    """Arguments and measurements of the demo."""

    model: str
    minutes: float
    folder: Path
    """Folder of the report and the training run."""
    console: Console
    began: float = field(default_factory=time.monotonic)
    status: str = "complete"
    rounds: list[Round] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Records of the training steps."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def cores(self) -> int:
        return min(len(os.sched_getaffinity(0)), _MOST_CORES)

    def say(self, text: str) -> None:
        say(self.console, f"{self.seconds:5.1f} s  {text}")


def run_demo(demo: Demo) -> dict[str, Any]:
    """Measure, train, and write the report, which is returned. An interruption ends it in
    order. Raises SpecActorError for a failure before the first figure; later ones give the status `failed`."""
    try:
        with sigterm_interrupts():
            _measure_speed(demo, 60.0 * demo.minutes * _SPEED_SHARE)
            _train(demo)
    except KeyboardInterrupt as error:
        demo.status = "interrupted"
        demo.say(f"{interruption(error)}: what was measured until now follows")
    except SpecActorError as error:
        if not demo.rounds:
            raise
        demo.status = "failed"
        demo.say(f"error: {error}")
    report = {
        "status": demo.status,
        "model": demo.model,
        "seconds": round(demo.seconds, 1),
        "speed": speed_figures(demo.rounds),
        "training": training_figures(demo.steps),
        "versions": versions(),
        "hardware": hardware(),
    }
    if demo.rounds:
        demo.folder.mkdir(parents=True, exist_ok=True)
        write_json(demo.folder / REPORT_FILE, report)
    return report


def _measure_speed(demo: Demo, seconds: float) -> None:
    """Decode rounds of prompts with two runs by turns, in an order that alternates: both see the same minutes."""
    from specactor_ray.cluster.connection import connect
    from specactor_ray.rollout.planning import resolve
    from specactor_ray.rollout.rollout import Rollout

    layout = (f"target.model={demo.model}", f"target.cores={demo.cores}", "target.max_batch=1")
    auto, lines = resolve(load_config(None, ["mode=auto", *layout, "target.dtype=float32", "target.max_model_len=512"]))
    for line in lines:
        demo.say(line)
    auto.cluster.num_cpus = 2 * demo.cores  # one of them runs at a time
    plain = copy.deepcopy(auto)
    plain.mode = ModeName.plain
    demo.say(f"edits of code, tables and texts, T=0, one request at a time, on {demo.cores} cores by turns")
    bench, prompts = Bench([], demo.console), read_prompts(_PROMPTS)[: _MOST_ROUNDS * _PROMPTS_PER_ROUND]
    with connect(auto.cluster), ExitStack() as stack:
        running = [
            (Variant(name, 1, config), stack.enter_context(Rollout(config)))
            for name, config in (("plain", plain), ("auto", auto))
        ]
        for _, rollout in running:
            rollout.generate(WARM_UP_PROMPTS, WARM_UP, n=1)
        for number in range(1, _MOST_ROUNDS + 1):
            if number > _LEAST_ROUNDS and demo.seconds > seconds:
                break
            some = tuple(prompts[number - 1 :: _MOST_ROUNDS])  # of all kinds, so that rounds are alike
            workload = Workload(f"round {number}", some, SamplingParams(temperature=0.0, max_tokens=96, seed=7))
            for variant, rollout in running if number % 2 else reversed(running):
                bench.measure_running(rollout, variant, workload, 0.0, f"round {number}: {variant.label}")
            one, other = bench.measured[-2:] if number % 2 else reversed(bench.measured[-2:])
            demo.rounds.append((one, other))
            speeds = f"plain {one['tokens_per_s']:.1f}, auto {other['tokens_per_s']:.1f} tokens/s"
            demo.say(f"round {number}: {speeds}, {one['seconds'] / other['seconds']:.2f}x")


def _train(demo: Demo) -> None:
    """A short GRPO run on this machine's cores, in its own run folder: outputs of one line."""
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.runs.training import METRICS_FILE, read_metrics
    from specactor_ray.trainer.run import train

    demo.say("training: GRPO on 4 lines of code to repeat with one name replaced; reward: similarity to them")
    newline = load_tokenizer(demo.model)("\n", add_special_tokens=False)["input_ids"]
    config = load_config(
        "train_demo",
        [
            f"run.dir={demo.folder}",
            "run.name=training",
            f"cluster.num_cpus={demo.cores}",
            f"target.model={demo.model}",
            f"target.cores={demo.cores}",
            f"sampling.stop_token_ids={list(newline) if len(newline) == 1 else []}",
        ],
    )
    step_ends = list[float]()

    def enough() -> bool:
        step_ends.append(demo.seconds)
        step_s = step_ends[-1] - step_ends[-2] if len(step_ends) >= _LEAST_STEPS else -math.inf
        return step_ends[-1] + step_s > 60.0 * demo.minutes - _END_S

    outcome = train(config, demo.console, enough=enough)
    demo.steps += read_metrics(outcome.folder / METRICS_FILE)
    if outcome.status == "interrupted":
        demo.status = "interrupted"
    elif len(demo.steps) < config.trainer.steps:
        demo.say(f"the time is up after {len(demo.steps)} of {config.trainer.steps} steps (--minutes {demo.minutes:g})")


def speed_figures(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Tokens per second of both variants, and the ratio of auto to plain over pairs of rounds with its standard error
    (None for a single round); None without a round."""
    if not rounds:
        return None
    plain, auto = zip(*rounds, strict=True)
    plain_s, auto_s = ([one["seconds"] for one in variant] for variant in (plain, auto))
    requests, tokens = (sum(one[key] for one in plain) for key in ("requests", "tokens"))
    ratio, error = ratio_with_error(plain_s, auto_s)
    return {
        "rounds": len(rounds),
        "plain_tokens_per_s": tokens / sum(plain_s),
        "auto_tokens_per_s": tokens / sum(auto_s),
        "ratio": ratio,
        "error": error if math.isfinite(error) else None,
        "acceptance_length": tokens / max(sum(one["metrics"]["row_steps"] for one in auto), 1),
        "identical": requests - sum(len(one["differences"]) for one in (*plain, *auto)),
        "requests": requests,
    }


def ratio_with_error(plain: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Ratio of the other's speed to that of `plain` over pairs of turns with the same work, by their seconds, and its
    standard error, infinite for a single pair."""
    mean_s = fmean(other)
    ratio = fmean(plain) / mean_s
    if len(other) < 2:
        return ratio, math.inf
    spread = stdev(ours * ratio - theirs for ours, theirs in zip(other, plain, strict=True))
    return ratio, spread / mean_s / math.sqrt(len(other))


def training_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Mean rewards of the steps with their standard errors, and acceptance lengths; None without a step."""
    if not records:
        return None
    return {
        "steps": len(records),
        "samples": records[0]["train"]["sampled"],
        "rewards": [
            (one["train"]["reward_mean"], one["train"]["reward_std"] / math.sqrt(max(one["train"]["sampled"], 1)))
            for one in records
            if one["train"]["reward_mean"] is not None
        ],
        "acceptance_lengths": [one["speed"]["acceptance_length"] for one in records],
    }


def similarity(sample: RewardSample) -> float:
    """Similarity of the first line of an output to the answer, by characters: 1.0 where they are equal, 0.0 for an
    empty one."""
    line = sample.text.strip().partition("\n")[0]
    return difflib.SequenceMatcher(None, line, sample.answer or "", autojunk=False).ratio() if line else 0.0
