"""`specactor drafter train`. Modules that import torch are imported inside the command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specactor_ray.cli.options import progress_console
from specactor_ray.config.schema import LOG_LEVELS
from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import ConfigError, InputError, did_you_mean
from specactor_ray.core.signals import signals_deferred

drafter = typer.Typer(help="Train drafters offline.", no_args_is_help=True)

SETTINGS = (
    *("tokens", "epochs", "draft_vocab", "depths", "learning_rate", "batch_tokens", "dtype", "samples"),
    *("temperature", "max_tokens", "seed", "chat", "max_batch", "kv_cache_gb", "window"),
)


@drafter.callback()
def _group() -> None:
    """Keeps `train` a command of the group `drafter`."""


@drafter.command()
def train(
    target: Annotated[str, typer.Option(help="A local directory, a Hugging Face id or a built-in name.")],
    data: Annotated[
        Path, typer.Option(help="Prompts: .jsonl with `prompt`, `messages` or `prompt_token_ids`, or a text file.")
    ],
    output: Annotated[Path, typer.Option(help="The drafter's folder; the same command again goes on in it.")],
    heldout: Annotated[
        Path | None, typer.Option(help="Prompts to measure on. Default: a tenth of --data.", show_default=False)
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of recorded rollouts, made on first use.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    trust_remote_code: Annotated[bool, typer.Option(help="Run model code that a checkpoint brings along.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=f"Settings: {', '.join(SETTINGS)}.", show_default=False),
    ] = None,
) -> None:
    """Record the target's rollouts of the prompts in --data, train an EAGLE head on them, and measure it.

    Ctrl-C keeps what was done. Use it afterwards with: 'drafters=[{method: eagle, model: OUTPUT}]'
    """
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") and not output.is_absolute():
        raise InputError(
            f"--output: {output} would be in the job's copy of the folder, which Ray removes. Fix: an absolute path "
            "on a disk that stays"
        )
    console, recipe = _prepare(log_level, target, device, trust_remote_code, settings)
    with signals_deferred():
        from specactor_ray.cli.train_drafter import train_drafter

    rows = train_drafter(recipe, data, output, console, heldout, corpus)
    make_console().print(acceptance_table(f"{output}: acceptance on held-out rollouts", rows))
    say(make_console(), f"drafter: drafters=[{{method: eagle, model: {output.resolve()}}}]")


def _prepare(
    log_level: str,
    target: str,
    device: str,
    trust_remote_code: bool,
    settings: Sequence[str] | None,
) -> tuple[Console, Any]:
    """The console for progress, and the `DrafterRecipe` of the options and of the settings."""
    if log_level not in LOG_LEVELS:
        raise InputError(f"--log-level: {log_level!r} is not known; use one of {', '.join(LOG_LEVELS)}")
    from specactor_ray.config.load import load_as
    from specactor_ray.distill.card import DrafterRecipe

    for name in (item.partition("=")[0].strip() for item in settings or ()):
        if name not in SETTINGS:
            problem = f"is no setting of this command.{did_you_mean(name, SETTINGS)}"
            raise ConfigError(name, problem, f"write KEY=VALUE with one of {', '.join(SETTINGS)}.")
    options = {"target": target, "device": device, "trust_remote_code": trust_remote_code}
    return progress_console(log_level), load_as(DrafterRecipe, options, settings or ())


_CAPTION = (
    "acc. length: tokens per verify step, the target's own included. supply: draft tokens per step.\n"
    "p1, p2, ...: probability that this draft token is right when all before it were; p1 is the match rate."
)


def acceptance_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Acceptance per draft position on held-out rollouts, a row per temperature."""
    cells = (
        {
            "T": f"{row['temperature']:g}",
            "steps": f"{row['steps']:,}",
            "supply": f"{row['supply']:.2f}",
            "acc. rate": f"{row['acceptance_rate']:.1%}",
            "acc. length": f"{row['acceptance_length']:.2f}",
            **{f"p{at}": "-" if p is None else f"{p:.2f}" for at, p in enumerate(row["by_position"], start=1)},
        }
        for row in rows
    )
    return make_table(cells, title, caption=_CAPTION)
