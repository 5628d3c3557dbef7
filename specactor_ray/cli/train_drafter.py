"""`specactor drafter train`, from options to files: collect, train, save, measure."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.config.schema import DrafterConfig
from specactor_ray.core.console import say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json, read_foreign, write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.distill.card import CARD_FILE, DrafterRecipe
from specactor_ray.distill.corpus import HELD_OUT, TRAIN, Corpus, TokenIds, claim_folder, reading, split_prompts
from specactor_ray.distill.eagle import hidden_layers_of, reject_foreign_layers
from specactor_ray.distill.evaluation import measure
from specactor_ray.distill.training import CHECKPOINT_FILE, HeadTrainer, TrainLoop, head_for
from specactor_ray.draft.eagle.checkpoint import save_head
from specactor_ray.models.loading import load_model, load_model_config, load_tokenizer, require_named_model
from specactor_ray.models.shapes import model_identity
from specactor_ray.rollout.prompts import encode_prompts, read_rows, split_row
from specactor_ray.runs.folder import RunLease

METHOD = "eagle"
WORK_FOLDER, CORPUS_FOLDER, RECIPE_FILE = "training", "corpus", "recipe.json"


def train_drafter(
    recipe: DrafterRecipe,
    data: Path,
    output: Path,
    console: Console,
    held_out: Path | None = None,
    corpus_folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Record the target's rollouts, train an EAGLE head on them, save it and measure it: returns the rows of its
    acceptance.

    A second call with the same recipe continues where the first one was interrupted, or shows its result.

    Args:
        held_out: Prompts to measure on. Default: a tenth of `data`.
        corpus_folder: Folder of the recorded rollouts, to share it between drafters. Default: inside `output`.

    Raises:
        UserError: A setting, the prompts, the target or the output folder cannot be used; nothing is left behind.
        KeyboardInterrupt: What was done is kept.
    """
    target = _checked_target(recipe)
    encoded = _encoded("--data", data, recipe, target)
    others = None if held_out is None else _encoded("--heldout", held_out, recipe, target)
    prompts = split_prompts(encoded, others, _longest_prompt(recipe, target))
    work = output / WORK_FOLDER
    facts = {**recipe.training_facts(), "prompts": prompts.digest()}
    claim_folder(output, work / RECIPE_FILE, facts, "drafter")
    if (output / CARD_FILE).is_file():
        say(console, f"{output} was finished before; nothing was done")
        with reading(output / CARD_FILE):
            return list(parse_json(read_foreign(output / CARD_FILE))["acceptance"])
    lease = RunLease(work, "--output")
    with sigterm_interrupts():
        try:
            model = load_model(recipe.target, trust_remote_code=recipe.trust_remote_code)
            reject_foreign_layers(model, recipe.target)
            layers, folder = hidden_layers_of(model), corpus_folder or work / CORPUS_FOLDER
            corpus = Corpus(recipe, prompts, layers, folder, console)
            corpus.collect(recipe.tokens)
            loop = _train(model, corpus, work, console)
            return _finish(loop, output, corpus, console)
        except KeyboardInterrupt:
            say(console, f"interrupted; what was done is kept in {work}. Go on with the same command")
            raise
        finally:
            lease.release()


def _train(model: Any, corpus: Corpus, work: Path, console: Console) -> TrainLoop:
    recipe, records = corpus.recipe, corpus.records[TRAIN]
    head = head_for(model, recipe, records)
    trainer = HeadTrainer(head, recipe.depths, recipe.learning_rate, dtype=recipe.dtype)
    with PhaseProgress(console, "training an EAGLE head", 1.0) as progress:

        def show(loss: float) -> None:
            progress.update(loop.fraction, f"step {loop.step}, loss {loss:.3f}")

        loop = TrainLoop(trainer, recipe, records, work, show)
        if loop.resume():
            say(console, f"going on from step {loop.step} ({loop.seconds:.0f} s)")
        loop.run()
    return loop


def _finish(loop: TrainLoop, output: Path, corpus: Corpus, console: Console) -> list[dict[str, Any]]:
    """Save the drafter, measure it, and only then write `drafter.json`, which marks it as complete."""
    recipe, head = corpus.recipe, loop.trainer.head
    save_head(head, output)
    load_tokenizer(recipe.target, trust_remote_code=recipe.trust_remote_code).save_pretrained(output)
    drafter = DrafterConfig(method=METHOD, model=str(output), trust_remote_code=recipe.trust_remote_code)
    rows = measure(drafter, head.config.feature_size, corpus, console)
    training = {
        "recipe": asdict(recipe),
        "draft_vocab": head.config.draft_vocab_size,
        "layers_read": list(head.config.exported_layers),
        "parameters_trained": sum(weight.numel() for weight in head.parameters() if weight.requires_grad),
        "corpus_tokens": sum(len(record.output_token_ids) for record in corpus.records[TRAIN]),
        "held_out_rollouts": len(corpus.records[HELD_OUT]),
        "steps": loop.step,
        "tokens": loop.tokens,
        "seconds": loop.seconds,
        "hardware": hardware(),
        "versions": versions(),
    }
    target = model_identity(recipe.target, "float32", recipe.trust_remote_code)
    card = {"method": METHOD, "target": target, "training": training, "acceptance": rows}
    write_json(output / CARD_FILE, card)
    (output / WORK_FOLDER / CHECKPOINT_FILE).unlink(missing_ok=True)
    say(console, f"{loop.step} steps, {loop.tokens:,} tokens in {loop.seconds:.0f} s")
    return rows


def _checked_target(recipe: DrafterRecipe) -> Any:
    """The target's text configuration."""
    import torch

    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: there is no GPU that torch can use. Fix: --device cpu")
    if recipe.device == "cpu":  # if DeepSpeed is installed, other packages import it, and it logs its search for a GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    require_named_model("--target", recipe.target)
    return load_model_config(recipe.target, trust_remote_code=recipe.trust_remote_code).get_text_config()


def _longest_prompt(recipe: DrafterRecipe, target: Any) -> int:
    """Most tokens of a prompt so that a whole output still fits the context."""
    context = int(getattr(target, "max_position_embeddings", 0) or 1 << 30)
    if recipe.max_tokens >= context:
        raise InputError(f"max_tokens: {recipe.max_tokens} leaves no room for a prompt; the context is {context}")
    return context - recipe.max_tokens


def _encoded(option: str, data: Path, recipe: DrafterRecipe, target: Any) -> list[TokenIds]:
    prompts = [split_row(row)[0] for row in read_rows(data, num_ids=target.vocab_size, key=option)]
    tokenizer = load_tokenizer(recipe.target, trust_remote_code=recipe.trust_remote_code)
    found = encode_prompts(tokenizer, prompts, recipe.chat)
    if bad := [f"prompt {number}: {reason}" for number, (_, reason) in enumerate(found, start=1) if reason]:
        raise InputError(f"{option}: {data}, {bad[0]}")
    encoded = [token_ids for token_ids, _ in found]
    largest = max(map(max, encoded))
    if largest >= target.vocab_size:
        raise InputError(
            f"--target: its tokenizer gives the token id {largest}, and the model's vocabulary has {target.vocab_size} "
            "tokens. Fix: use the tokenizer that belongs to the model"
        )
    return encoded
