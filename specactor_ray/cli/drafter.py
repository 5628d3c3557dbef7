"""`specactor drafter`: training and measuring drafters. Modules that import torch are imported inside the commands."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specactor_ray.cli.drafter_report import acceptance_table
from specactor_ray.cli.options import finish, progress_console
from specactor_ray.config.schema import LOG_LEVELS
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.distill.recipe import CorpusRecipe, TrainRecipe

_CORPUS = CorpusRecipe(target="")
_RECIPE = TrainRecipe(_CORPUS)

drafter = typer.Typer(help="Train drafters offline, and measure them.", no_args_is_help=True)

Target = Annotated[str, typer.Option(help="A local directory, a Hugging Face id or a built-in name.")]
Data = Annotated[
    Path, typer.Option(help="Prompts: .jsonl with `prompt`, `messages` or `prompt_token_ids`, or a text file.")
]
Temperature = Annotated[float, typer.Option(help="Of the target's rollouts.")]
MaxTokens = Annotated[int, typer.Option(help="Most output tokens of a rollout.")]
Seed = Annotated[int, typer.Option(help="Of the rollouts, and of the order of training.")]
Window = Annotated[int, typer.Option(help="Draft tokens per step in the measurement.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
MaxBatch = Annotated[int, typer.Option(help="Most rollouts at once.")]
KvCache = Annotated[float, typer.Option("--kv-cache-gb", help="Memory of the target's cache, in 2**30 bytes.")]
Chat = Annotated[bool, typer.Option(help="Wrap prompts in the target's chat template.")]
Trust = Annotated[bool, typer.Option(help="Run model code that a checkpoint brings along.")]
Corpus = Annotated[
    Path | None, typer.Option(help="Folder of recorded rollouts, made on first use.", show_default=False)
]
LogLevel = Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")]


@drafter.command()
def train(
    target: Target,
    data: Data,
    output: Annotated[Path, typer.Option(help="The drafter's folder; the same command again goes on in it.")],
    draft_vocab: Annotated[
        int, typer.Option(help="Size of the head's vocabulary, the most frequent token ids.")
    ] = _RECIPE.draft_vocab,
    depths: Annotated[
        int, typer.Option(help="Tokens ahead that the head is trained on its own predictions.")
    ] = _RECIPE.depths,
    minutes: Annotated[
        float | None, typer.Option(help="Time for training, rollouts not included. Default: 15, without --epochs.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the rollouts, instead of a time or beside it.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Output tokens to train on.")] = _RECIPE.tokens,
    samples: Annotated[int, typer.Option(help="Rollouts of every prompt, while more tokens are wanted.")] = 4,
    temperature: Temperature = _CORPUS.temperature,
    max_tokens: MaxTokens = _CORPUS.max_tokens,
    heldout: Annotated[
        Path | None, typer.Option(help="Prompts to measure on. Default: a tenth of --data.", show_default=False)
    ] = None,
    corpus: Corpus = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = _RECIPE.learning_rate,
    batch_tokens: Annotated[int, typer.Option(help="Most positions of a training batch.")] = _RECIPE.batch_tokens,
    dtype: Annotated[str, typer.Option(help="Arithmetic of training.")] = _RECIPE.dtype,
    seed: Seed = 0,
    window: Window = 5,
    device: Device = "cpu",
    max_batch: MaxBatch = 64,
    kv_cache_gb: KvCache = 1.0,
    chat: Chat = True,
    trust_remote_code: Trust = False,
    log_level: LogLevel = "WARNING",
) -> None:
    """Record the target's rollouts of the prompts in --data, train an EAGLE head on them, and measure it.

    Ctrl-C keeps what was done. Use it afterwards with: 'drafters=[{method: eagle, model: OUTPUT}]'
    """
    _refuse_folder_that_a_job_loses(output)
    console = _console(log_level)
    from specactor_ray.cli.train_drafter import TrainPaths, train_drafter
    from specactor_ray.distill.rollouts import EngineLimits

    recipe = TrainRecipe(
        CorpusRecipe(target, temperature, samples, max_tokens, seed, chat, trust_remote_code),
        tokens=tokens,
        draft_vocab=draft_vocab,
        depths=depths,
        minutes=_RECIPE.minutes if minutes is None and epochs is None else minutes,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        dtype=dtype,
    )
    limits = EngineLimits(device, max_batch, kv_cache_gb)
    outcome = train_drafter(recipe, TrainPaths(data, output, heldout, corpus), limits, window, console)
    _show(outcome, f"{output}: acceptance on held-out rollouts")
    if outcome.status != "interrupted":
        say(make_console(), f"drafter: drafters=[{{method: eagle, model: {output.resolve()}}}]")
    finish(outcome.status)


@drafter.command("eval")
def evaluate(
    target: Target,
    data: Data,
    folder: Annotated[
        Path | None, typer.Option("--drafter", help="Folder of a drafter or of a draft model.", show_default=False)
    ] = None,
    method: Annotated[str | None, typer.Option(help="ngram, or module:Class.", show_default=False)] = None,
    temperature: Temperature = _CORPUS.temperature,
    max_tokens: MaxTokens = _CORPUS.max_tokens,
    corpus: Corpus = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.", show_default=False)] = None,
    seed: Seed = 0,
    window: Window = 5,
    device: Device = "cpu",
    max_batch: MaxBatch = 64,
    kv_cache_gb: KvCache = 1.0,
    chat: Chat = True,
    trust_remote_code: Trust = False,
    log_level: LogLevel = "WARNING",
) -> None:
    """Measure a drafter on the target's rollouts of the prompts in --data, at --temperature and at 0."""
    if (folder is None) == (method is None):
        raise InputError("name either --drafter FOLDER or --method, such as --method ngram")
    if output is not None and output.exists():
        raise InputError(f"--output: {output} exists and is never overwritten; name another file")
    console = _console(log_level)
    from specactor_ray.cli.train_drafter import EvalPaths, eval_drafter
    from specactor_ray.distill.measuring import drafter_of, method_alone
    from specactor_ray.distill.rollouts import EngineLimits

    config = drafter_of(folder) if folder is not None else method_alone(str(method))
    config.trust_remote_code = trust_remote_code
    recipe = CorpusRecipe(target, temperature, 1, max_tokens, seed, chat, trust_remote_code)
    limits = EngineLimits(device, max_batch, kv_cache_gb)
    with tempfile.TemporaryDirectory() as temporary:
        paths = EvalPaths(data, corpus or Path(temporary) / "corpus", output)
        outcome = eval_drafter(recipe, paths, config, limits, window, console)
    _show(outcome, f"{folder or method}: acceptance on {data}")
    finish(outcome.status)


def _console(log_level: str) -> Console:
    if log_level not in LOG_LEVELS:
        raise InputError(f"--log-level: {log_level!r} is not known; use one of {', '.join(LOG_LEVELS)}")
    return progress_console(log_level)


def _show(outcome: Any, title: str) -> None:
    console = make_console()
    if outcome.acceptance:
        console.print(acceptance_table(title, outcome.acceptance))
    if outcome.note:
        say(console, outcome.note)


def _refuse_folder_that_a_job_loses(output: Path) -> None:
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") and not output.is_absolute():
        raise InputError(
            f"--output: {output} would be in the job's copy of the folder, which Ray removes. Fix: an absolute path "
            "on a disk that stays"
        )
