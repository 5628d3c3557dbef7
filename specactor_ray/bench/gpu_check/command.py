"""The command line of `scripts/gpu-check`."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specactor_ray.bench.gpu_check.report import Report, slug, tables
from specactor_ray.bench.gpu_check.settings import DRY_RUN, DRY_RUN_ON_GPU, ON_GPU, STAGES
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, InputError, UserError
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_HELP = """Measure what one GPU does with this project's work, without Ray, a network or a checkpoint.

All figures go to a JSON file after every measurement; beside it a YAML file describes the measured hardware for the
simulator. The stages:"""


@app.command(help="\n\n".join([_HELP, *(f"{name}: {what}." for name, what in STAGES.items())]))
def gpu_check(
    output: Annotated[
        Path | None, typer.Option(help="JSON file, never overwritten. Default: gpu_check_DEVICE.json.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all stages.")] = 8.5,
    stages: Annotated[str, typer.Option(help="Some of the stages.")] = ",".join(STAGES),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Every stage with tiny shapes, in a minute; without a GPU on the CPU.")
    ] = False,
) -> None:
    begin, chosen = time.perf_counter(), stages.split(",")
    if unknown := [name for name in chosen if name not in STAGES]:
        raise InputError(f"--stages: there is no stage {unknown[0]!r}. Fix: choose from {', '.join(STAGES)}.")
    if output is not None and output.suffix != ".json":
        raise InputError(f"--output is {output}. Fix: name a file that ends in .json.")
    with signals_deferred():
        import torch

        run_stages, functions = _functions(chosen)
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or dry_run):
        fix = "Fix: use a machine with a GPU and a CUDA build of torch, or add --dry-run (tiny shapes on the CPU)."
        raise InputError(f"torch {torch.__version__} finds no CUDA device here. {fix}")
    if not on_gpu:
        torch.set_num_threads(1)  # tiny shapes gain nothing from threads that compete for cores
    name = torch.cuda.get_device_name() if on_gpu else f"cpu {platform.machine()}"
    head = {"device": name, "torch": torch.__version__, "dry_run": dry_run, "minutes": minutes}
    head["started"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = Report(output or Path(f"gpu_check_{slug(name).replace('-', '_')}.json"), head)
    console, shown = make_console(sys.stderr), make_console()

    def changed(line: str) -> None:
        say(console, f"[gpu-check] {line}")
        report.save()

    settings = ON_GPU if not dry_run else DRY_RUN_ON_GPU if on_gpu else DRY_RUN
    try:
        run_stages(functions, settings, report.stages, changed, begin + 60.0 * minutes)
    except KeyboardInterrupt:
        report.close(interrupted=True)
        changed(f"interrupted; what was measured is in {report.path}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    report.data["seconds"] = time.perf_counter() - begin
    report.close()
    for part in tables(report.stages):
        say(shown, part) if isinstance(part, str) else shown.print(part)
    say(shown, f"written: {', '.join(str(path) for path in (report.path, report.yaml_path) if path.exists())}")
    if report.data["status"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _functions(chosen: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """`run_stages`; and stage → (its weight in the sharing of the time, its function)."""
    from specactor_ray.bench.gpu_check import (
        attention,
        drafting,
        flips,
        forwards,
        hardware,
        rollouts,
        triton_kernels,
        vllm,
    )
    from specactor_ray.bench.gpu_check.stages import run_stages

    functions = {
        "hardware": (3, hardware.measure_hardware),
        "triton": (10, triton_kernels.measure_triton),
        "attention": (6, attention.measure_attention),
        "forwards": (24, forwards.measure_forwards),
        "drafting": (8, drafting.measure_drafting),
        "flips": (14, flips.measure_flips),
        "engine": (22, rollouts.measure_engine),
        "vllm": (30, vllm.measure_vllm),
    }
    return run_stages, {name: function for name, function in functions.items() if name in chosen}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Returns the exit code: 0, also when measurements are missing; 1 when a stage failed; 2 after a
    mistake of the user; 130 when interrupted."""
    try:
        with sigterm_interrupts():
            app(args=None if arguments is None else list(arguments), prog_name="gpu-check")
    except UserError as error:
        show_error(str(error))
        return EXIT_USER_ERROR
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
