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
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from specactor_ray.bench.rollout_modes import Bench, Workload, paired_rounds
from specactor_ray.bench.variants import Variant
from specactor_ray.bench.verdict import why_stop
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
_SPEED_SHARE = 0.5
"""Largest share of the time for the first half, as long as it has its least rounds."""
_TRAINING_STARTS = 5.0
"""Time of a training of two steps in starts of a rollout, which take longer on a slow or busy machine, too."""
_PROMPTS, _GROUPS = "conf/prompts/repetition.jsonl", 8
"""Edits of code, tables and texts: most of an output repeats its prompt, so drafts pay. A round takes every eighth."""
_EXAMPLE = 2
"""The round whose first `auto` output is shown."""
_GREEDY = SamplingParams(temperature=0.0, max_tokens=72, seed=7)
_LEAST_ROUNDS, _LEAST_STEPS = (5, 3), 2
"""Rounds that suffice at least, and those at which the end of the time ends them."""
_END_STEPS = 1.5
"""Time of the last answers, the checkpoint and the end of the cluster, in training steps."""


class ScoredText(NamedTuple):
    """An output for a task."""

    prompt: str
    text: str
    expected: str
    reward: float


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
    answers: list[list[ScoredText]] = field(default_factory=list)
    """Outputs for prompts that are not trained on: before the training, and after."""
    load: float = 0.0
    """Load average at the end of the rounds."""

    def __post_init__(self) -> None:
        self.bench = Bench(self.console, shows_turns=False)

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
        "minutes": demo.minutes,
        "seconds": round(demo.seconds, 1),
        "load": demo.load,
        "cores": demo.cores,
        "results": demo.results,
        "example": demo.example,
        "training": training_figures(demo.steps, demo.answers),
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
    demo.say(f"plain decoding and auto by turns on {demo.cores} cores: edits of code, tables and texts, T=0, batch 1")
    demo.bench.measure([Variant("plain", 1, plain), Variant("auto", 1, auto)], _rounds(demo), "")


def _rounds(demo: Demo) -> Iterator[Workload]:
    """The prompts of each round, until `why_stop` says why not. Keeps the example when it is there."""
    prompts = read_prompts(_PROMPTS)
    groups = [Workload("edits T=0", tuple(prompts[first::_GROUPS]), _GREEDY, n=1) for first in range(_GROUPS)]
    start_s, begin = demo.bench.start_seconds, demo.seconds
    until_s = 60.0 * demo.minutes - start_s
    if demo.trains:
        until_s = min(60.0 * demo.minutes * _SPEED_SHARE, 60.0 * demo.minutes - _TRAINING_STARTS * start_s)
    for done in count():
        if done:
            plain, auto = demo.results
            demo.say(_round_line(plain, auto))
            round_s, left_s = (demo.seconds - begin) / done, until_s - demo.seconds
            rounds, length = paired_rounds(plain, auto)
            least = _LEAST_ROUNDS[0], _LEAST_ROUNDS[1] - (done - len(rounds))  # those without tokens take time, too
            demo.bench.stopped = why_stop(rounds, length, round_s, left_s, least)
            demo.load = os.getloadavg()[0]
        if done == _EXAMPLE:
            output, tokenizer = demo.bench.outputs["auto"][0, 0], load_tokenizer(demo.model)
            demo.example = {"prompt": output.prompt, "pieces": pieces(output, tokenizer)}
        if demo.bench.stopped:
            return
        yield groups[done % _GROUPS]


def _round_line(plain: Mapping[str, Any], auto: Mapping[str, Any]) -> str:
    """Speeds of the latest round, and the ratio of all."""
    number, ratio = len(auto["rounds"]), f"{auto['ratio']:.2f}"
    if number > 2 and auto["interval"] is not None:
        ratio += " (95%: {:.2f} to {:.2f})".format(*auto["interval"])
    speeds = f"plain {plain['rounds'][-1]:.1f}, auto {auto['rounds'][-1]:.1f} tokens/s"
    return f"round {number}: {speeds}; auto / plain until now {ratio}"


def _train(demo: Demo) -> None:
    """A short GRPO run on this machine's cores, in its own run folder: outputs of one line."""
    from specactor_ray.runs.records import METRICS_FILE, read_records
    from specactor_ray.trainer.run import train

    demo.say("training: GRPO on 4 lines of code to repeat with one name replaced; reward: similarity to the right line")
    newline = load_tokenizer(demo.model)("\n", add_special_tokens=False)["input_ids"]
    places = (f"run.dir={demo.folder}", "run.name=training", f"target.model={demo.model}", f"target.cores={demo.cores}")
    config = load_config(
        "train_demo", [*places, f"sampling.stop_token_ids={list(newline) if len(newline) == 1 else []}"]
    )
    tasks = [row for _, row in read_jsonl(str(config.data.path))][config.data.limit :]
    most, begin = config.trainer.steps, 0.0

    def watch(training: Training) -> None:
        nonlocal begin
        done, trainer = training.state.step, training.config.trainer
        if 0 < done < trainer.steps:  # else its last checkpoint is written
            step_s = demo.seconds - begin
            trainer.steps = plan_steps(done, step_s, 60.0 * demo.minutes - demo.seconds, most)
            if done == 1:
                demo.say(f"step 1 took {step_s:.1f} s: {trainer.steps} steps in the time left")
        if done in (0, trainer.steps):
            outputs = training.rollout.generate([task["prompt"] for task in tasks])
            demo.answers.append([answer(tasks[one.prompt_index], one.text) for one in outputs])
        begin = demo.seconds

    outcome = train(config, demo.console, watch)
    demo.steps += read_records(outcome.folder / METRICS_FILE)
    demo.status = outcome.status


def answer(task: Mapping[str, str], text: str) -> ScoredText:
    """An output for a task, with its reward."""
    line = text.strip().partition("\n")[0]
    return ScoredText(task["prompt"], line, task["answer"], similarity(RewardSample("", line, task["answer"])))


def plan_steps(done: int, step_s: float, left_s: float, most: int) -> int:
    """Number of training steps in all, at most `most`, when the last one of those done took `step_s` seconds."""
    return max(_LEAST_STEPS, done, min(done + math.floor(left_s / step_s - _END_STEPS), most))


def training_figures(
    records: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[ScoredText]] = ()
) -> dict[str, Any] | None:
    """Rewards of the steps and of prompts that are not trained on, each a mean and its standard error; `gain` of the
    latter from before to after, each output beside the one with its prompt and seed; shares of the time, and drafts.
    None without a step."""
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
        "held_out": [_mean([one.reward for one in outputs]) for outputs in answers],
        "gain": _mean([new.reward - old.reward for old, new in zip(*answers, strict=True)]) if answers[1:] else None,
        "answers": [[one._asdict() for one in outputs] for outputs in answers],
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
    """Similarity of an output to the answer: 1.0 where they are equal, 0.0 for an empty output. An answer of one line
    is compared with the first line of the output by characters, a longer one with the whole output by lines."""
    text, answer = sample.text.strip(), sample.answer or ""
    if not text:
        return 0.0
    lines, right = text.split("\n"), answer.split("\n")
    pair: tuple[Sequence[str], Sequence[str]] = (lines[0], answer) if len(right) == 1 else (lines, right)
    return difflib.SequenceMatcher(None, *pair, autojunk=False).ratio()
