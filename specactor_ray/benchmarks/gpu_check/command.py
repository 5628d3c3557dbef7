"""The command line of `scripts/gpu-check`."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from specactor_ray.benchmarks.gpu_check.report import Report, refuse_existing, slug
from specactor_ray.benchmarks.gpu_check.settings import ON_GPU, Settings, dry_run_on
from specactor_ray.benchmarks.gpu_check.stages import StageFunction, run_stages, say
from specactor_ray.benchmarks.gpu_check.tables import tables
from specactor_ray.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, InputError, UserError
from specactor_ray.signals import signals_deferred, sigterm_interrupts

STAGES = ("hardware", "forwards", "sampler", "triton", "flips", "engine", "end_to_end")
_DESCRIPTION = """\
Measures what one GPU does with this project's work, in a few minutes and without Ray or vLLM. Models of 0.5B, 7B and
32B shapes are made on the device with random weights. The stages:

  hardware    copy bandwidth, matrix product, versions
  forwards    a forward over rows x positions x context, eager and as a CUDA graph
  sampler     the keyed sampler's time and memory beside a softmax
  triton      the sampler's Triton kernels: equal tokens, then time
  flips       tokens that change with the batch and the verify length in bf16
  engine      a step of the hf engine: forward, sampling, Python
  end_to_end  plain, coupled and decoupled rollouts with an oracle drafter

All figures go to a JSON file after every group of measurements; beside it, under the same stem, a YAML file describes
the measured hardware for the simulator."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Returns the exit code: 0, also when stages were cut short; 1 when one failed; 2 after a mistake
    of the user; 130 when interrupted."""
    begin = time.monotonic()
    options = _parser().parse_args(arguments)
    try:
        with sigterm_interrupts():
            return _run(options, begin)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file (default gpu_check_DEVICE.json); never overwritten")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all stages (default 9)")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated; default: all")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        choices=("cpu", "cuda"),
        const="cpu",
        help="every stage with tiny shapes, in seconds: on the CPU, or with `cuda` on the GPU",
    )
    return parser


def _run(options: argparse.Namespace, begin: float) -> int:
    names = _chosen(options.stages)
    if not options.minutes > 0:
        raise InputError(f"--minutes is {options.minutes}; it must be above 0")
    if options.output is not None:
        if options.output.suffix != ".json":
            raise InputError(f"--output is {options.output}. Fix: name a file that ends in .json.")
        refuse_existing(options.output)
    settings = dry_run_on(options.dry_run) if options.dry_run else ON_GPU
    report = _open_report(options, settings)
    functions = _functions()
    chosen = {name: functions[name] for name in names}
    try:
        run_stages(chosen, settings, report, begin + 60.0 * options.minutes)
    except KeyboardInterrupt:
        report.close(interrupted=True)
        say(f"interrupted; what was measured is in {report.path}")
        return EXIT_INTERRUPTED
    report.data["seconds"] = time.monotonic() - begin
    report.close()
    files = [path for path in (report.path, report.yaml_path) if path.exists()]
    sys.stdout.write(f"{tables(report.data)}\n\nwritten: {', '.join(map(str, files))}\n")
    return EXIT_FAILED if report.data["status"] == "failed" else 0


def _chosen(stages: str) -> list[str]:
    wanted = stages.split(",")
    unknown = [name for name in wanted if name not in STAGES]
    if unknown:
        raise InputError(f"--stages: there is no stage {unknown[0]!r}. Fix: choose from {', '.join(STAGES)}.")
    return [name for name in STAGES if name in wanted]


def _open_report(options: argparse.Namespace, settings: Settings) -> Report:
    with signals_deferred():
        import torch

        from specactor_ray.benchmarks.gpu_check.hardware import device_name

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} finds no CUDA device here. Fix: run this on a machine with a GPU and a CUDA "
            "build of torch, or try the command itself with --dry-run (tiny shapes on the CPU)."
        )
    if settings.device == "cpu":
        torch.set_num_threads(1)  # tiny shapes gain nothing from threads that fight for cores
    device = device_name(settings.device)
    default = Path(f"gpu_check_{slug(device).replace('-', '_')}.json")
    return Report(
        options.output or default,
        {
            "device": device,
            "torch": torch.__version__,
            "dry_run": options.dry_run is not None,
            "minutes": options.minutes,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def _functions() -> dict[str, tuple[float, StageFunction]]:
    """Stage → its weight in the sharing of the time, and what it does."""
    with signals_deferred():
        from specactor_ray.benchmarks.gpu_check.end_to_end import measure_end_to_end
        from specactor_ray.benchmarks.gpu_check.engine_steps import measure_engine_steps
        from specactor_ray.benchmarks.gpu_check.flips import measure_flips
        from specactor_ray.benchmarks.gpu_check.forwards import measure_forwards
        from specactor_ray.benchmarks.gpu_check.hardware import measure_hardware
        from specactor_ray.benchmarks.gpu_check.sampler import measure_sampler
        from specactor_ray.benchmarks.gpu_check.triton_kernels import measure_triton

    return {
        "hardware": (3, measure_hardware),
        "forwards": (36, measure_forwards),
        "sampler": (3, measure_sampler),
        "triton": (6, measure_triton),
        "flips": (14, measure_flips),
        "engine": (13, measure_engine_steps),
        "end_to_end": (28, measure_end_to_end),
    }
