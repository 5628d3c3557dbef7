"""`specactor drafter train` and `specactor drafter eval`, from options to files: collect, train, save, measure."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.cli.drafter_report import plot_training
from specactor_ray.config.schema import DrafterConfig
from specactor_ray.core.console import say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.distill.card import TargetIdentity, check_vocabulary, identify, read_card, write_card
from specactor_ray.distill.corpus import claim_corpus, claim_folder
from specactor_ray.distill.eagle_student import EagleStudent
from specactor_ray.distill.loop import CHECKPOINT_FILE, LoopProgress, TrainLoop
from specactor_ray.distill.measuring import head_config, measure
from specactor_ray.distill.recipe import DEVICES, CorpusRecipe, TrainRecipe, check, check_corpus
from specactor_ray.distill.rollouts import (
    HELD_OUT,
    TRAIN,
    Corpus,
    EngineLimits,
    Prompts,
    TokenIds,
    corpus_facts,
    split_prompts,
    target_config,
)
from specactor_ray.models.loading import load_model_config, load_tokenizer
from specactor_ray.rollout.preflight import require_named_model
from specactor_ray.rollout.prompts import Prompt, encode_prompt, read_prompts

METHOD = "eagle"
WORK_FOLDER, CORPUS_FOLDER, RECIPE_FILE, PLOT_FILE = "training", "corpus", "recipe.json", "training.png"


@dataclass(frozen=True, slots=True)
class TrainPaths:
    """Paths of prompts, recorded rollouts and output."""

    data: Path
    output: Path
    held_out: Path | None = None
    """Prompts to measure on. Default: a tenth of `data`."""
    corpus: Path | None = None
    """Folder of the recorded rollouts, to share it between drafters. Default: inside `output`."""


@dataclass(frozen=True, slots=True)
class EvalPaths:
    """Paths of prompts, recorded rollouts and output."""

    data: Path
    corpus: Path
    """Folder of the recorded rollouts; existing ones are used."""
    output: Path | None = None
    """JSON file for the figures."""


@dataclass(slots=True)
class DrafterOutcome:
    """Result of a command."""

    status: str
    """`finished` or `interrupted`."""
    acceptance: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def train_drafter(
    recipe: TrainRecipe, paths: TrainPaths, limits: EngineLimits, window: int, console: Console
) -> DrafterOutcome:
    """Record the target's rollouts, train an EAGLE head on them, save it and measure it.

    All checks that are possible are made beforehand. A second call with the same recipe continues where the first one
    was interrupted, or shows its result.

    Args:
        window: Draft tokens per step in the measurement.

    Raises:
        UserError: An option, the prompts, the target or the output folder cannot be used; nothing is left behind.
    """
    check(recipe)
    _check_options(limits, window)
    require_named_model("--target", recipe.corpus.target)
    data = read_prompts(paths.data)
    held_out = None if paths.held_out is None else read_prompts(paths.held_out)
    target = identify(recipe.corpus.target, recipe.corpus.trust_remote_code)
    others = None if held_out is None else _encode(held_out, recipe.corpus, target)
    prompts = split_prompts(_encode(data, recipe.corpus, target), others, _longest_prompt(recipe.corpus))
    work = paths.output / WORK_FOLDER
    facts = {**asdict(recipe), "prompts": prompts.digest(), "config": target.config_hash}
    claim_folder(paths.output, work / RECIPE_FILE, facts, "a drafter", "folder of `drafter train`", "--output: ")
    done = read_card(paths.output)
    if done is not None:
        return DrafterOutcome("finished", done["acceptance"], f"{paths.output} was finished before; nothing was done")
    with sigterm_interrupts():
        try:
            student = EagleStudent(recipe, limits.device)
            folder = paths.corpus or work / CORPUS_FOLDER
            claim_corpus(folder, corpus_facts(recipe.corpus, target, prompts, student.hidden_layers))
            corpus = Corpus(recipe.corpus, prompts, folder, limits, console)
            corpus.collect(student.hidden_layers, recipe.tokens)
            loop, seconds = _train(student, recipe, corpus, work, console)
            return _finish(loop, recipe, paths, limits, window, target, corpus, seconds, console)
        except KeyboardInterrupt:
            note = f"interrupted; what was done is kept in {work}. Go on with the same command"
            return DrafterOutcome("interrupted", note=note)


def eval_drafter(
    recipe: CorpusRecipe, paths: EvalPaths, drafter: DrafterConfig, limits: EngineLimits, window: int, console: Console
) -> DrafterOutcome:
    """Measure a drafter on the target's rollouts of the prompts.

    Raises:
        UserError: As in `train_drafter`.
    """
    check_corpus(recipe)
    _check_options(limits, window)
    require_named_model("--target", recipe.target)
    data = read_prompts(paths.data)
    target = identify(recipe.target, recipe.trust_remote_code)
    head = head_config(drafter, recipe.target)
    if drafter.model is not None and head is None:
        check_vocabulary(drafter.model, target, drafter.trust_remote_code)
    layers = () if head is None else head.exported_layers
    encoded = _encode(data, recipe, target)
    longest = _longest_prompt(recipe)
    usable = tuple(prompt for prompt in dict.fromkeys(encoded) if len(prompt) <= longest)
    if not usable:
        raise InputError(
            f"--data: each prompt of {paths.data} is longer than {longest} tokens. Fix: a lower --max-tokens"
        )
    prompts = Prompts((), usable)
    claim_corpus(paths.corpus, corpus_facts(recipe, target, prompts, layers))
    with sigterm_interrupts():
        try:
            corpus = Corpus(recipe, prompts, paths.corpus, limits, console)
            corpus.collect(layers, None)
            rows = measure(drafter, target_config(recipe, limits, layers), corpus, window, console)
        except KeyboardInterrupt:
            return DrafterOutcome("interrupted", note="interrupted")
    if paths.output is not None:
        facts = {
            "method": drafter.method,
            "model": drafter.model,
            "target": asdict(target),
            "corpus": asdict(recipe),
            "acceptance": rows,
            "hardware": hardware(),
            "versions": versions(),
        }
        write_json(paths.output, facts, shared=True)
    return DrafterOutcome("finished", rows)


def _train(
    student: EagleStudent, recipe: TrainRecipe, corpus: Corpus, work: Path, console: Console
) -> tuple[TrainLoop, float]:
    """The trained loop, and the seconds of training in this process."""
    train, held_out = ((corpus.records[part], corpus.stores[part]) for part in (TRAIN, HELD_OUT))
    student.prepare(train[0], train[1].states)
    with PhaseProgress(console, "training an EAGLE head", 1.0) as progress:

        def show(step: LoopProgress) -> None:
            progress.update(
                step.fraction,
                f"step {step.step}, loss {step.loss:.3f}, {step.tokens_per_s:.0f} tokens/s, "
                f"held-out match rate when it was last measured {step.match_rate:.1%}",
            )

        loop = TrainLoop(student, recipe, train, held_out, work, time.monotonic, signals_deferred, on_progress=show)
        if loop.resume():
            say(console, f"going on from step {loop.state.step} ({loop.state.seconds:.0f} s)")
        loop.run()
        return loop, progress.seconds


def _finish(
    loop: TrainLoop,
    recipe: TrainRecipe,
    paths: TrainPaths,
    limits: EngineLimits,
    window: int,
    target: TargetIdentity,
    corpus: Corpus,
    seconds: float,
    console: Console,
) -> DrafterOutcome:
    """Save the drafter, measure it, and only then write `drafter.json`, which marks it as complete."""
    corpus_recipe, state = recipe.corpus, loop.state
    tokenizer = load_tokenizer(corpus_recipe.target, trust_remote_code=corpus_recipe.trust_remote_code)
    facts = loop.student.save(paths.output)
    tokenizer.save_pretrained(paths.output)
    drafter = DrafterConfig(method=METHOD, model=str(paths.output), trust_remote_code=corpus_recipe.trust_remote_code)
    rows = measure(drafter, target_config(corpus_recipe, limits, ()), corpus, window, console)
    training = {
        "recipe": asdict(recipe),
        **facts,
        "corpus_tokens": sum(len(record.output_token_ids) for record in corpus.records[TRAIN]),
        "held_out_rollouts": len(corpus.records[HELD_OUT]),
        "steps": state.step,
        "epochs": state.epoch,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_s": {**corpus.speed, "training": state.tokens / max(state.seconds, 1e-9)},
        "history": state.history,
        "hardware": hardware(),
        "versions": versions(),
    }
    plot_training(paths.output / PLOT_FILE, state.history, rows)
    write_card(paths.output, METHOD, target, training, rows)
    (paths.output / WORK_FOLDER / CHECKPOINT_FILE).unlink(missing_ok=True)
    first, last = state.history[0], state.history[-1]
    speeds = ", ".join(f"{part} {speed:.0f}" for part, speed in training["tokens_per_s"].items())
    return DrafterOutcome(
        "finished",
        rows,
        f"{state.step} steps, {state.tokens:,} tokens in {state.seconds:.0f} s; held-out loss {first['loss']:.3f} → "
        f"{last['loss']:.3f}, match rate {first['matches']:.1%} → {last['matches']:.1%}; output tokens/s: {speeds}",
    )


def _check_options(limits: EngineLimits, window: int) -> None:
    if limits.device not in DEVICES:
        raise InputError(f"--device: {limits.device!r} is not known; use one of {', '.join(DEVICES)}")
    if window < 1:
        raise InputError(f"--window: {window} is too small; use 1 or more")
    if limits.max_batch < 1 or not limits.kv_cache_gb > 0.0:
        raise InputError("--max-batch must be 1 or more, and --kv-cache-gb above 0")
    import torch

    if limits.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: there is no GPU that torch can use. Fix: --device cpu")
    if limits.device == "cpu":  # if DeepSpeed is installed, other packages import it, and it logs its search for a GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _longest_prompt(recipe: CorpusRecipe) -> int:
    """Most tokens of a prompt so that a whole output still fits the context."""
    config = load_model_config(recipe.target, trust_remote_code=recipe.trust_remote_code).get_text_config()
    context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
    if recipe.max_tokens >= context:
        raise InputError(f"--max-tokens: {recipe.max_tokens} leaves no room for a prompt; the context is {context}")
    return context - recipe.max_tokens


def _encode(prompts: list[Prompt], recipe: CorpusRecipe, target: TargetIdentity) -> list[TokenIds]:
    tokenizer = load_tokenizer(recipe.target, trust_remote_code=recipe.trust_remote_code)
    encoded = [encode_prompt(tokenizer, prompt, recipe.chat) for prompt in prompts]
    largest = max(max(prompt) for prompt in encoded)
    if largest >= target.vocab_size:
        raise InputError(
            f"--target: its tokenizer gives the token id {largest}, and the model's vocabulary has {target.vocab_size} "
            "tokens. Fix: use the tokenizer that belongs to the model"
        )
    return encoded
