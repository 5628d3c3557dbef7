#!/usr/bin/env python3
"""GRPO steps of TRL with three ways to generate: TRL's own, rollouts without drafts, and rollouts with drafts.

    python scripts/bench_trl.py --steps 10

The same trainer, tasks and seeds each time. Shows seconds per step and for generating (pushing weights included), the
mean reward and length, and the largest difference between log-probabilities of the same tokens as the rollout returned
them and as the trainer computes them. Rewards and lengths of every step must be equal with drafts and without: else the
exit code is 1. TRL's own generation samples other tokens.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

with warnings.catch_warnings(action="ignore"):  # about the version of vLLM, which is not used
    import trl

from points import JsonFile, Point, run_script, show_points
from specactor_ray import Rollout
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import EXIT_FAILED
from specactor_ray.integrations.trl import attach
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.rollout.prompts import read_prompts
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Service

MODEL, PROMPTS = "smollm2-135m", "conf/prompts/editing.jsonl"
PROMPTS_PER_STEP, SAMPLES, SEED = 2, 4, 7
VARIANTS = ("trl", "plain", "coupled")
EQUAL = ("reward", "reward_std", "completions/mean_length")
GAP = "sampling/sampling_logp_difference/max"


@dataclass(frozen=True)
class Options:
    steps: int
    max_tokens: int
    correction: bool
    server: bool


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """The share of the output's words that stand in the prompt: the tasks are to edit or to repeat a text."""
    pairs = [(_words(prompt), _words(output)) for prompt, output in zip(prompts, completions, strict=True)]
    return [sum(word in known for word in made) / max(len(made), 1) for known, made in pairs]


def _words(messages: Any) -> list[str]:
    return re.findall(r"\w+", " ".join(message["content"] for message in messages))


class StepTimes(TrainerCallback):
    """Seconds of every step, and of generating in it."""

    def __init__(self, trainer: Any) -> None:
        self.steps, self.generating, self._begin = list[float](), list[float](), 0.0
        self._inner, trainer._generate_single_turn = trainer._generate_single_turn, self._generate

    def _generate(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._inner(*arguments, **options)
        finally:
            self.generating.append(time.perf_counter() - begin)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self._begin)
        print(f"step {len(self.steps)}: {self.steps[-1]:.1f} s", file=sys.stderr)


def make_trainer(options: Options, folder: str) -> Any:
    messages = [[{"role": "user", "content": prompt}] for prompt in read_prompts(PROMPTS)]
    config = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=options.max_tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        vllm_importance_sampling_correction=options.correction,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model=load_model(MODEL).requires_grad_(True),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": messages}),
        processing_class=load_tokenizer(MODEL),
    )


def make_rollout(variant: str, options: Options) -> Rollout:
    target = {"model": MODEL, "cores": torch.get_num_threads(), "max_model_len": options.max_tokens + 960}
    drafters = [{"method": "suffix"}] if variant != "plain" else []
    settings = {"mode": variant, "target": {**target, "dtype": "float32"}, "drafters": drafters}
    return Rollout(from_mapping({**settings, "cluster": {"address": "local"}}))


def measure(variant: str, options: Options) -> tuple[Point, list[tuple[float, ...]]]:
    """Figures of a variant, and what has to be equal in every step."""
    metrics = None
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(options, stack.enter_context(tempfile.TemporaryDirectory()))
        if variant != "trl":
            rollout = stack.enter_context(make_rollout(variant, options))
            attach(trainer, stack.enter_context(serving(Service(rollout, "policy"))) if options.server else rollout)
        times = StepTimes(trainer)
        trainer.add_callback(times)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if variant != "trl":
            metrics = rollout.metrics()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    point = {
        "variant": variant,
        "step s": fmean(times.steps[1:]),  # the first one warms up
        "generating s": fmean(times.generating[1:]),
        "reward": fmean(row["reward"] for row in rows),
        "length": fmean(row["completions/mean_length"] for row in rows),
        "log-prob gap": max((row[GAP] for row in rows if GAP in row), default=None),
        "accepted/drafted": f"{metrics.accepted_tokens}/{metrics.drafted_tokens}" if metrics else "",
    }
    return point, [tuple(row[name] for name in EQUAL) for row in rows]


def main(
    steps: Annotated[int, typer.Option(min=2)] = 10,
    max_tokens: int = 64,
    correction: Annotated[bool, typer.Option(help="TRL's importance correction.")] = True,
    server: Annotated[bool, typer.Option("--server", help="Over HTTP, as with `specactor serve`.")] = False,
    own: Annotated[bool, typer.Option(help="TRL's own generation, too.")] = True,
    json_file: JsonFile = None,
) -> None:
    options = Options(steps, max_tokens, correction, server)
    points, ours = [], []
    for variant in VARIANTS[0 if own else 1 :]:
        point, rows = measure(variant, options)
        points.append(point)
        ours += [rows] if variant != "trl" else []
        gc.collect()
    show_points(f"GRPO, {steps} steps", points, json_file)
    same = all(rows == ours[0] for rows in ours)
    print(f"rewards and lengths of all {steps} steps with and without drafts: {'equal' if same else 'DIFFER'}")
    raise typer.Exit(0 if same else EXIT_FAILED)


if __name__ == "__main__":
    run_script(main)
