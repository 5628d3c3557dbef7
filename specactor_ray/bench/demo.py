"""`specactor demo`: plain decoding and drafting by turns, then a short GRPO run (`conf/train_demo.yaml`), on this
machine and in the minutes given."""

from __future__ import annotations

import copy
import difflib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specactor_ray.bench.rollout_modes import Bench, Workload
from specactor_ray.bench.variants import Variant
from specactor_ray.config import Config, load_config
from specactor_ray.config.schema import ModeName
from specactor_ray.core.console import say
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.files import write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.signals import interruption, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import read_jsonl, read_prompts
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.mode import settle
from specactor_ray.trainer.rewards import RewardSample

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import Trajectory
    from specactor_ray.trainer.steps import Training

REPORT_FILE = "report.json"
_MOST_CORES = 8
"""Most cores of the demo; the built-in model gains nothing from more."""
_SPEED_SHARE = 0.45
"""Share of the time for the first half."""
_PROMPTS, _GROUPS = "conf/prompts/repetition.jsonl", 8
"""Edits of code, tables and texts: most of an output repeats its prompt, so drafts pay. A round takes every eighth."""
_EXAMPLE = 2
"""The round whose first `auto` output is shown."""
_GREEDY = SamplingParams(temperature=0.0, max_tokens=96, seed=7)
_LEAST_ROUNDS, _LEAST_STEPS = 5, 2
_END_S = 12.0
"""Seconds reserved for the checkpoint and the end of the cluster."""


@dataclass
class Demo:
    """Arguments and measurements of the demo."""

    model: str
    minutes: float
    folder: Path
    """Folder of the report and the training run."""
    console: Console
    trains: bool = True
    began: float = field(default_factory=time.monotonic)
    status: str = "complete"
    bench: Bench = field(init=False)
    example: Mapping[str, Any] | None = None
    """A prompt, and its output in pieces of text, each with whether it was drafted."""
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Records of the training steps."""
    held_out: list[list[tuple[str, float]]] = field(default_factory=list)
    """Outputs for prompts that are not trained on, with their rewards: before the training, and after."""

    def __post_init__(self) -> None:
        self.bench = Bench(self.console)

    @property
    def results(self) -> list[dict[str, Any]]:
        """Results of `Bench` of plain decoding and of auto; none before both have a round."""
        return self.bench.results() if len(self.bench.measured) > 1 else []

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
            _run(demo)
    except KeyboardInterrupt as error:
        demo.status = "interrupted"
        demo.say(f"{interruption(error)}: what was measured until now follows")
    except SpecActorError as error:
        if not demo.results:
            raise
        demo.status = "failed"
        demo.say(f"error: {error}")
    report = {
        "status": demo.status,
        "model": demo.model,
        "seconds": round(demo.seconds, 1),
        "load": os.getloadavg()[0],
        "results": demo.results,
        "example": demo.example,
        "training": training_figures(demo.steps, demo.held_out),
        "versions": versions(),
        "hardware": hardware(),
    }
    if report["results"]:
        demo.folder.mkdir(parents=True, exist_ok=True)
        write_json(demo.folder / REPORT_FILE, report)
    return report


def _run(demo: Demo) -> None:
    """Both halves, on one Ray cluster."""
    from specactor_ray.cluster.connection import connect

    layout = ("cluster.address=local", f"target.model={demo.model}", f"target.cores={demo.cores}", "target.max_batch=1")
    items = ["mode=auto", *layout, "target.dtype=float32", "target.max_model_len=512"]
    auto, lines = settle(load_config(None, items), Machine.here())
    for line in lines:
        demo.say(line)
    auto.cluster.num_cpus = 2 * demo.cores  # one of the two rollouts runs at a time
    with connect(auto.cluster):
        _measure_speed(demo, auto)
        if demo.trains:
            _train(demo)


def _measure_speed(demo: Demo, auto: Config) -> None:
    """Decode rounds of prompts without and with drafts, by turns."""
    plain = copy.deepcopy(auto)
    plain.mode = ModeName.plain
    demo.say(f"edits of code, tables and texts, T=0, one request at a time, on {demo.cores} cores by turns")
    demo.bench.measure([Variant("plain", 1, plain), Variant("auto", 1, auto)], _rounds(demo), "")


def _rounds(demo: Demo) -> Iterator[Workload]:
    """The prompts of each round, until the time of the first half is over. Keeps the example when it is there."""
    until_s, prompts = 60.0 * demo.minutes * (_SPEED_SHARE if demo.trains else 1.0), read_prompts(_PROMPTS)
    groups = [Workload("edits T=0", tuple(prompts[first::_GROUPS]), _GREEDY, n=1) for first in range(_GROUPS)]
    begin = demo.seconds
    for done in count():
        if done >= _LEAST_ROUNDS and demo.seconds + (demo.seconds - begin) / done > until_s:
            return
        if done == _EXAMPLE:
            output, tokenizer = demo.bench.outputs["auto"][0, 0], load_tokenizer(demo.model)
            demo.example = {"prompt": output.prompt, "pieces": pieces(output, tokenizer)}
        yield groups[done % _GROUPS]


def _train(demo: Demo) -> None:
    """A short GRPO run on this machine's cores, in its own run folder: outputs of one line."""
    from specactor_ray.runs.records import METRICS_FILE, read_records
    from specactor_ray.trainer.run import train

    demo.say("training: GRPO on 4 lines of code to repeat with one name replaced; reward: similarity to them")
    newline = load_tokenizer(demo.model)("\n", add_special_tokens=False)["input_ids"]
    places = (f"run.dir={demo.folder}", "run.name=training", f"target.model={demo.model}", f"target.cores={demo.cores}")
    config = load_config(
        "train_demo", [*places, f"sampling.stop_token_ids={list(newline) if len(newline) == 1 else []}"]
    )
    tasks = [row for _, row in read_jsonl(str(config.data.path))][config.data.limit :]
    begin = 0.0

    def watch(training: Training) -> None:
        nonlocal begin
        done, trainer = training.state.step, training.config.trainer
        if done == 1:
            step_s = demo.seconds - begin
            trainer.steps = plan_steps(step_s, 60.0 * demo.minutes - _END_S - demo.seconds, trainer.steps)
            demo.say(f"step 1 took {step_s:.1f} s: {trainer.steps} steps in the time left")
        if done in (0, trainer.steps):
            outputs = training.rollout.generate([task["prompt"] for task in tasks])
            answers = (tasks[one.prompt_index]["answer"] for one in outputs)
            scored = zip(outputs, answers, strict=True)
            demo.held_out.append([(one.text, similarity(RewardSample("", one.text, answer))) for one, answer in scored])
        if done == 0:
            begin = demo.seconds

    outcome = train(config, demo.console, watch)
    demo.steps += read_records(outcome.folder / METRICS_FILE)
    demo.status = outcome.status


def plan_steps(step_s: float, left_s: float, most: int) -> int:
    """Number of training steps, at most `most`, after a first one that took `step_s` seconds."""
    return max(_LEAST_STEPS, min(1 + math.floor(left_s / step_s), most))


def training_figures(
    records: Sequence[Mapping[str, Any]], held_out: Sequence[Sequence[tuple[str, float]]] = ()
) -> dict[str, Any] | None:
    """Rewards of the steps and of prompts that are not trained on, each a mean and its standard error; shares of the
    time, and drafts. None without a step."""
    if not records:
        return None
    drafted, accepted = (
        sum(pair[which] for one in records for pair in one["speed"]["by_method"].values()) for which in (0, 1)
    )
    return {
        "steps": len(records),
        "samples": records[0]["train"]["sampled"],
        "rewards": [
            (one["train"]["reward_mean"], one["train"]["reward_std"] / math.sqrt(max(one["train"]["sampled"], 1)))
            for one in records
            if one["train"]["reward_mean"] is not None
        ],
        "held_out": [_mean([reward for _, reward in outputs]) for outputs in held_out],
        "outputs": held_out,
        "rollout_share": fmean(one["speed"]["rollout_share"] for one in records),
        "acceptance_rate": accepted / max(drafted, 1),
        "acceptance_lengths": [one["speed"]["acceptance_length"] for one in records],
    }


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def pieces(output: Trajectory, tokenizer: Any) -> list[tuple[str, bool]]:
    """The output in pieces of text, each with whether it was drafted."""
    found, shown, end = list[tuple[str, bool]](), "", 0
    for drafted, run in groupby(output.drafted):
        end += len(list(run))
        text = output.text if end == len(output.token_ids) else tokenizer.decode(output.token_ids[:end])
        found.append((text[len(shown) :], drafted))
        shown = text
    return found


def similarity(sample: RewardSample) -> float:
    """Similarity of the first line of an output to the answer, by characters: 1.0 where they are equal, 0.0 for an
    empty one."""
    line = sample.text.strip().partition("\n")[0]
    return difflib.SequenceMatcher(None, line, sample.answer or "", autojunk=False).ratio() if line else 0.0


def similar_lines(sample: RewardSample) -> float:
    """Similarity of an output to the answer, by lines: 1.0 where they are equal, 0.0 for an empty one."""
    text, answer = sample.text.strip(), sample.answer or ""
    return difflib.SequenceMatcher(None, text.split("\n"), answer.split("\n"), autojunk=False).ratio() if text else 0.0
