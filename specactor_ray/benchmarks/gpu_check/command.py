"""The command line of `scripts/gpu-check`."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specactor_ray.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, InputError, UserError
from specactor_ray.observability.console import make_console, say, show_error
from specactor_ray.signals import signals_deferred, sigterm_interrupts

STAGES = {
    "hardware": "copy bandwidth, matrix product, versions",
    "triton": "the sampler's Triton kernels: equal tokens, then time",
    "attention": "the hf engine's attention: kernel, time per new length, batch invariance",
    "forwards": "a forward over rows x positions x context, eager and as a CUDA graph",
    "flips": "tokens that change with the batch and the verify length in bf16",
    "engine": "steps of the hf engine: plain and with an oracle's drafts",
    "vllm": "steps of the vllm engine likewise, beside vllm.LLM; only where vLLM is installed",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    help="Measure what one GPU does with this project's work, without Ray or a network. Models of 0.5B, 7B and 32B shapes "
    "are made on the device with random weights.\n\nAll figures go to a JSON file after every measurement; beside it, "
    "under the same stem, a YAML file describes the measured hardware for the simulator.\n\n"
    + "\n\n".join(f"{name}: {what}." for name, what in STAGES.items())
)
def gpu_check(
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file, never overwritten. Default: gpu_check_DEVICE.json.", show_default=False),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for all stages.")] = 8.5,
    stages: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(STAGES),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Every stage with tiny shapes, in seconds.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, or with --dry-run cpu, its default.", show_default=False)
    ] = None,
) -> None:
    begin, chosen = time.perf_counter(), stages.split(",")
    device = device or ("cpu" if dry_run else "cuda")
    for name in chosen:
        if name not in STAGES:
            raise InputError(f"--stages: there is no stage {name!r}. Fix: choose from {', '.join(STAGES)}.")
    if not minutes > 0:
        raise InputError(f"--minutes is {minutes}; it must be above 0")
    if device not in (("cpu", "cuda") if dry_run else ("cuda",)):
        raise InputError(f"--device is {device}; use cuda, or --dry-run with cpu")
    if output is not None and output.suffix != ".json":
        raise InputError(f"--output is {output}. Fix: name a file that ends in .json.")
    with signals_deferred():
        from specactor_ray.benchmarks.gpu_check.report import tables
        from specactor_ray.benchmarks.gpu_check.settings import ON_GPU, dry_run_on
        from specactor_ray.benchmarks.gpu_check.stages import run_stages

        report = _open_report(output, device, dry_run, minutes)
        functions = _functions()
    console = make_console(sys.stderr)

    def changed(line: str) -> None:
        say(console, f"[gpu-check] {line}")
        report.save()

    settings = dry_run_on(device) if dry_run else ON_GPU
    wanted = {name: functions[name] for name in STAGES if name in chosen}
    try:
        run_stages(wanted, settings, report.stages, changed, begin + 60.0 * minutes)
    except KeyboardInterrupt:
        report.close(interrupted=True)
        say(console, f"[gpu-check] interrupted; what was measured is in {report.path}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    report.data["seconds"] = time.perf_counter() - begin
    report.close()
    shown = make_console()
    for part in tables(report.data):
        shown.print(part)
    say(shown, f"written: {', '.join(str(path) for path in (report.path, report.yaml_path) if path.exists())}")
    if report.data["status"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _open_report(output: Path | None, device: str, dry_run: bool, minutes: float) -> Any:
    import torch

    from specactor_ray.benchmarks.gpu_check.hardware import device_name
    from specactor_ray.benchmarks.gpu_check.report import Report, slug

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} finds no CUDA device here. Fix: run this on a machine with a GPU and a CUDA "
            "build of torch, or try the command itself with --dry-run (tiny shapes on the CPU)."
        )
    if device == "cpu":
        torch.set_num_threads(1)  # tiny shapes gain nothing from threads that fight for cores
    name = device_name(device)
    head = {"device": name, "torch": torch.__version__, "dry_run": dry_run, "minutes": minutes}
    head["started"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(output or Path(f"gpu_check_{slug(name).replace('-', '_')}.json"), head)


def _functions() -> dict[str, Any]:
    """Stage → its weight in the sharing of the time, longest step in seconds, function."""
    from specactor_ray.benchmarks.gpu_check import attention, flips, forwards, hardware, rollouts, triton_kernels, vllm

    return {
        "hardware": (3, 2.0, hardware.measure_hardware),
        "triton": (10, 2.0, triton_kernels.measure_triton),
        "attention": (6, 2.0, attention.measure_attention),
        "forwards": (24, 2.0, forwards.measure_forwards),
        "flips": (14, 2.0, flips.measure_flips),
        "engine": (22, 2.0, rollouts.measure_engine),
        "vllm": (30, 2.0, vllm.measure_vllm),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Returns the exit code: 0, also when measurements are missing; 1 when a stage failed; 2 after a
    mistake of the user; 130 when interrupted."""
    try:
        with sigterm_interrupts():
            app(args=None if arguments is None else list(arguments), prog_name="gpu-check")
    except UserError as error:
        show_error(str(error))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
