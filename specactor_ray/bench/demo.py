"""`specactor demo`: plain decoding beside drafting, then a short GRPO run, on this machine and in the minutes given."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.bench.by_turns import Round, SideBySide, measure_side_by_side
from specactor_ray.bench.comparison import ratio_with_error
from specactor_ray.bench.demo_tasks import rename_tasks
from specactor_ray.config import Config, load_config
from specactor_ray.core.child import run_in_child
from specactor_ray.core.console import say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import interruption, sigterm_interrupts
from specactor_ray.trainer.display import Column, TrainingDisplay

SEED = 7
REPORT_FILE = "report.json"
_MOST_CORES = 8
"""Most cores of the demo; the built-in model gains nothing from more."""
_SPEED_SHARE = 0.35
"""Share of the time for the first half."""
_MOST_ROUNDS, _MOST_STEPS, _LEAST_STEPS = 5, 12, 2
_END_S = 12.0
"""Seconds reserved for the checkpoint and the end of the cluster."""
_TASKS = 4
"""Number of tasks. Each step has all of them, so that rewards of steps compare, and drafts find earlier outputs."""
_BEAT_S = 5.0
"""Seconds between progress lines where there is no terminal."""
DEMO_COLUMNS: Sequence[Column] = (
    ("step", lambda r: str(r["step"])),
    ("reward", lambda r: f"{r['train']['reward_mean']:.3f}"),
    ("samples", lambda r: str(r["train"]["sampled"])),
    ("tokens/s", lambda r: f"{r['speed']['tokens_per_s']:.1f}"),
    ("acceptance length", lambda r: f"{r['speed']['acceptance_length']:.2f}"),
    ("rollout", lambda r: f"{r['seconds']['rollout']:.1f} s"),
    ("update", lambda r: f"{r['seconds']['update']:.1f} s"),
)


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
    doing: str = "starting"
    rounds: list[Round] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Records of the training steps."""
    step_ends: list[float] = field(default_factory=list)
    """Ends of the training steps, on the clock of `seconds`."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        say(self.console, f"{self.seconds:5.1f} s  {text}")

    def take(self, report: Any) -> None:
        """Record a report of the measuring process."""
        if isinstance(report, Round):
            self.rounds.append(report)
            plain, auto = report.tokens / report.plain_s, report.tokens / report.auto_s
            self.doing = f"round {len(self.rounds)}: plain {plain:.1f}, auto {auto:.1f} tokens/s, {auto / plain:.2f}x"
            self.say(f"{self.doing}, {report.identical} of {report.requests} outputs identical")
        else:
            self.say(report)
            self.doing = report.partition(" (")[0]


def run_demo(demo: Demo, training: bool) -> dict[str, Any]:
    """Measure, train unless `training` is off, and write the report. An interruption ends it in order.

    Returns:
        The report, as in the file.

    Raises:
        SpecActorError: Something failed before the first figure; later failures give a report with status `failed`.
    """
    try:
        with sigterm_interrupts():
            _measure_speed(demo, 60.0 * demo.minutes * (_SPEED_SHARE if training else 1.0))
            if training:
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
    if demo.rounds or demo.steps:
        demo.folder.mkdir(parents=True, exist_ok=True)
        write_json(demo.folder / REPORT_FILE, report)
    return report


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))[:_MOST_CORES]


def _measure_speed(demo: Demo, seconds: float) -> None:
    from specactor_ray.rollout.planning import resolve

    keys = ("target.dtype=float32", "target.max_batch=1", "target.max_model_len=512", "sampling.max_tokens=96")
    config, lines = resolve(load_config(None, ["mode=auto", f"target.model={demo.model}", *keys]))
    for line in lines:
        demo.say(line)
    demo.say("edits of code, tables and settings, T=0, one request at a time: plain and auto by turns in one process")
    drafters, most_tokens, left_s = tuple(config.drafters), config.sampling.max_tokens, seconds - demo.seconds
    work = SideBySide(config.target, drafters, _cores(), most_tokens, SEED, _MOST_ROUNDS, left_s)

    def show(progress: PhaseProgress) -> None:
        """Show progress also while models load and compile, when nothing is reported."""
        progress.update(min(progress.seconds, 0.99 * work.seconds), demo.doing)  # the last round may end later

    with PhaseProgress(demo.console, "plain and auto", work.seconds, line_interval_s=_BEAT_S, poll=show):
        run_in_child(measure_side_by_side, work, "demo", demo.take)


def _train(demo: Demo) -> None:
    """A short GRPO run on this machine's cores, in its own run folder."""
    demo.say(f"training: GRPO on {_TASKS} lines of code to repeat with one name replaced; reward: similarity to them")
    demo.folder.mkdir(parents=True, exist_ok=True)
    tasks = demo.folder / "tasks.jsonl"
    rows = itertools.islice(rename_tasks(SEED), _TASKS)
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = training_config(demo, tasks)
    from specactor_ray.trainer.run import train

    end = 60.0 * demo.minutes - _END_S

    def enough() -> bool:
        if len(demo.steps) < _LEAST_STEPS:
            return False
        return demo.seconds + demo.step_ends[-1] - demo.step_ends[-2] > end  # the first step is slower than the others

    outcome = train(config, demo.console, _Display(demo, config.trainer.steps), enough)
    if outcome.status == "interrupted":
        demo.status = "interrupted"
    elif len(demo.steps) < config.trainer.steps:
        demo.say(f"the time is up after {len(demo.steps)} of {config.trainer.steps} steps (--minutes {demo.minutes:g})")


class _Display(TrainingDisplay):
    """Keeps the records."""

    def __init__(self, demo: Demo, steps: int) -> None:
        super().__init__(demo.console, steps, DEMO_COLUMNS, line_interval_s=_BEAT_S)
        self._demo = demo

    def end(self, record: Mapping[str, Any]) -> None:
        self._demo.steps.append(record)
        self._demo.step_ends.append(self._demo.seconds)
        super().end(record)


def training_config(demo: Demo, tasks: Path) -> Config:
    """The GRPO run: `mode: auto`, outputs of one line."""
    from specactor_ray.models.loading import load_tokenizer

    newline = load_tokenizer(demo.model)("\n", add_special_tokens=False)["input_ids"]
    cores = len(_cores())
    return load_config(
        None,
        [
            "mode=auto",
            f"run.dir={demo.folder}",
            "run.name=training",
            f"cluster.num_cpus={cores}",
            f"target.model={demo.model}",
            f"target.cores={cores}",
            "target.max_model_len=128",
            "target.max_batch=16",
            "target.dtype=float32",
            f"data.path={tasks}",
            "data.chat=false",
            "data.n=4",
            "sampling.temperature=1.0",
            "sampling.max_tokens=16",
            f"sampling.stop_token_ids={list(newline) if len(newline) == 1 else []}",
            f"sampling.seed={SEED}",
            "reward.functions=[{name: 'specactor_ray.bench.demo_tasks:similarity'}]",
            "algorithm.name=grpo",
            f"trainer.steps={_MOST_STEPS}",
            f"trainer.prompts_per_step={_TASKS}",
            "trainer.learning_rate=1.0e-4",
            "trainer.micro_batch_tokens=512",
            "checkpoint.every=1000",
            "checkpoint.keep_best=false",
            "tracking.tensorboard=false",
        ],
    )


def speed_figures(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Tokens per second of both variants, and the ratio of auto to plain over pairs of rounds with its standard error
    (None for a single round); None without a round."""
    if not rounds:
        return None
    plain, auto = [one.plain_s for one in rounds], [one.auto_s for one in rounds]
    tokens = sum(one.tokens for one in rounds)
    ratio, error = ratio_with_error(plain, auto)
    return {
        "rounds": len(rounds),
        "plain_tokens_per_s": tokens / sum(plain),
        "auto_tokens_per_s": tokens / sum(auto),
        "ratio": ratio,
        "error": error if math.isfinite(error) else None,
        "acceptance_length": tokens / max(sum(one.row_steps for one in rounds), 1),
        "identical": sum(one.identical for one in rounds),
        "requests": sum(one.requests for one in rounds),
    }


def training_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Rewards of the steps with their standard errors, and the parts of the time; None without a step."""
    if not records:
        return None
    step_s = max(sum(record["seconds"]["step"] for record in records), 1e-9)
    return {
        "steps": len(records),
        "rewards": [_reward(record["train"]) for record in records],
        "acceptance_lengths": [record["speed"]["acceptance_length"] for record in records],
        **{f"{phase}_share": sum(r["seconds"][phase] for r in records) / step_s for phase in ("rollout", "update")},
    }


def _reward(train: Mapping[str, Any]) -> dict[str, Any]:
    samples = train["sampled"]
    error = train["reward_std"] / math.sqrt(samples) if samples else 0.0
    return {"mean": train["reward_mean"], "error": error, "samples": samples}
