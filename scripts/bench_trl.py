#!/usr/bin/env python
"""GRPO steps of TRL with three ways to generate: TRL's own, rollouts without drafts, and rollouts with drafts.

    python scripts/bench_trl.py --steps 10

The same trainer, tasks and seeds each time. Prints seconds per step and for generating (pushing weights included), the
mean reward and length, and the largest difference between log-probabilities of the same tokens as the rollout returned
them and as the trainer computes them, over all steps. Rewards and lengths of every step must be equal with drafts and
without: else the exit code is 1. TRL's own generation samples other tokens. For an attached engine TRL corrects the
importance of each output, which takes one more forward over all of them; `--no-correction` switches that off.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

with warnings.catch_warnings(action="ignore"):  # about the version of vLLM, which is not used
    import trl

from specactor_ray import Rollout
from specactor_ray.config.load import from_mapping
from specactor_ray.integrations.trl import attach
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.rollout.prompts import read_prompts

VARIANTS = ("trl", "plain", "coupled")
EQUAL = ("reward", "reward_std", "completions/mean_length")
GAP = "sampling/sampling_logp_difference/max"


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """The share of the output's words that stand in the prompt: the tasks are to edit or to repeat a text."""
    pairs = [(_words(prompt), _words(output)) for prompt, output in zip(prompts, completions, strict=True)]
    return [sum(word in known for word in made) / max(len(made), 1) for known, made in pairs]


def _words(messages: Any) -> list[str]:
    return re.findall(r"\w+", " ".join(message["content"] for message in messages))


class Clock(TrainerCallback):
    """Seconds of every step, and of generating in it."""

    def __init__(self, trainer: Any, variant: str) -> None:
        self._variant = variant
        self.steps: list[float] = []
        self.generating: list[float] = []
        self._begin = 0.0
        self._inner = trainer._generate_single_turn
        trainer._generate_single_turn = self._generate

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
        times = f"{self.steps[-1]:.1f} s, {self.generating[-1]:.1f} s of them for generating"
        print(f"{self._variant}: step {len(self.steps)}, {times}", file=sys.stderr)


def make_trainer(options: argparse.Namespace, folder: Path) -> Any:
    messages = [[{"role": "user", "content": prompt}] for prompt in read_prompts(options.prompts)]
    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=options.prompts_per_step * options.samples,
        num_generations=options.samples,
        max_completion_length=options.max_tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        vllm_importance_sampling_correction=not options.no_correction,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=options.seed,
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model=load_model(options.model).requires_grad_(True),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": messages}),
        processing_class=load_tokenizer(options.model),
    )


def measure(variant: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(options, folder)
    rollout = None if variant == "trl" else Rollout(from_mapping(settings(variant, options)))
    metrics, held = None, contextlib.ExitStack()
    try:
        if rollout is not None:
            with_server = serving(rollout) if options.server else contextlib.nullcontext(rollout)
            attach(trainer, held.enter_context(with_server))
        clock = Clock(trainer, variant)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        metrics = rollout.metrics() if rollout is not None else None
    finally:
        held.close()
        if rollout is not None:
            rollout.close()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "variant": variant,
        "step s": mean(clock.steps[1:]),  # the first one warms up
        "generating s": mean(clock.generating[1:]),
        "reward": mean([row["reward"] for row in rows]),
        "length": mean([row["completions/mean_length"] for row in rows]),
        "log-prob gap": max((row[GAP] for row in rows if GAP in row), default=None),
        "accepted/drafted": f"{metrics.accepted_tokens}/{metrics.drafted_tokens}" if metrics else "",
        "rows": [tuple(row[name] for name in EQUAL) for row in rows],
    }


@contextlib.contextmanager
def serving(rollout: Rollout) -> Iterator[str]:
    """A server in a thread of this process; its URL."""
    from specactor_ray.serve.run import listening_socket, server_of
    from specactor_ray.serve.service import Service

    listener, server = listening_socket("127.0.0.1", 0), server_of(Service.of(rollout, "policy"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def settings(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    target = {
        "model": options.model,
        "cores": torch.get_num_threads(),
        "max_model_len": options.max_tokens + 960,
        "dtype": "float32",
    }
    drafters = [{"method": "suffix"}] if variant != "plain" else []
    return {"mode": variant, "target": target, "drafters": drafters, "cluster": {"address": "local"}}


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def show(results: list[dict[str, Any]]) -> None:
    names = [name for name in results[0] if name != "rows"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for result in results:
        cells = [result[name] for name in names]
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell if cell is not None else "") for cell in cells]
        print("| " + " | ".join(texts) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default="conf/prompts/editing.jsonl")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--no-correction", action="store_true", help="without TRL's importance correction")
    parser.add_argument("--server", action="store_true", help="over HTTP, as with `specactor serve`")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in options.variants:
            results.append(measure(variant, options, Path(folder)))
            gc.collect()
    show(results)
    ours = [result["rows"] for result in results if result["variant"] != "trl"]
    same = all(rows == ours[0] for rows in ours)
    if len(ours) > 1:
        print(
            f"rewards and lengths of all {options.steps} steps with and without drafts: {'equal' if same else 'DIFFER'}"
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
