"""`scripts/gpu-check`: what one GPU does with this project's work, without Ray, a network or a checkpoint.

Figures go to a JSON file, which is replaced as a whole after every measurement, so it is readable at any time.
"""

from __future__ import annotations

import datetime
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gpu_check import drafting, flips, hardware, memory, target, vllm
from gpu_check.stage import Settings, Stage
from points import cell, points_table, run_script
from specactor_ray.cli.options import parse_numbers
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import EXIT_FAILED, ConfigError, InputError, clipped
from specactor_ray.core.files import make_folder, refuse_existing, write_json
from specactor_ray.target.vllm_settings import require_vllm

STAGES: Mapping[str, Callable[[Stage], None]] = {
    "hardware": hardware.measure_hardware,
    "vllm": vllm.measure_vllm,
    "target": target.measure_target,
    "drafting": drafting.measure_drafting,
    "flips": flips.measure_flips,
    "sleep": memory.measure_sleep,
    "weights": memory.measure_weights,
}


_NEED_VLLM = ("vllm",)
_DEFAULT_STAGES = ",".join(name for name in STAGES if name not in _NEED_VLLM)
_DEFAULTS = Settings()
_MOST_ROWS, _MOST_DRAFTS = 1024, 32


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def gpu_check(
    output: Annotated[
        Path | None, typer.Option(help="JSON file, never overwritten. Default: gpu_check_DEVICE.json.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="No measurement begins after this time.")] = 8.5,
    stages: Annotated[str, typer.Option(help=f"Some of {', '.join(STAGES)}.")] = _DEFAULT_STAGES,
    rows: Annotated[str, typer.Option(help="Numbers of requests that decode at once.")] = _joined(_DEFAULTS.rows),
    drafts: Annotated[str, typer.Option(help="Draft tokens of each request in a step.")] = _joined(_DEFAULTS.drafts),
    accept: Annotated[str, typer.Option(help="Shares of draft tokens that are right.")] = _joined(_DEFAULTS.accept),
) -> None:
    """Measure what one GPU does with this project's work; docs/performance.md says what was measured.

    Exit codes: 0, also when measurements are missing; 1 when a stage failed; 2 after a mistake; 130 when interrupted.
    """
    deadline, chosen = time.perf_counter() + 60.0 * minutes, stages.split(",")
    if unknown := [name for name in chosen if name not in STAGES]:
        raise ConfigError("--stages", f"there is no stage {clipped(unknown[0])}.", f"choose from {', '.join(STAGES)}.")
    settings = Settings(
        rows=tuple(parse_numbers("--rows", rows, int, 1, _MOST_ROWS)),
        drafts=tuple(parse_numbers("--drafts", drafts, int, 0, _MOST_DRAFTS)),
        accept=tuple(parse_numbers("--accept", accept, float, 0, 1)),
    )
    if needing := [name for name in chosen if name in _NEED_VLLM]:
        _require_vllm(needing[0])
    if output is not None and output.suffix != ".json":
        raise ConfigError("--output", f"{output} is no JSON file.", "name a file that ends in .json.")
    if not torch.cuda.is_available():
        fix = "Fix: use a machine with a GPU and a CUDA build of torch."
        raise InputError(f"torch {torch.__version__} finds no CUDA device here. {fix}")
    path = output or Path(f"gpu_check_{slug(torch.cuda.get_device_name()).replace('-', '_')}.json")
    report = run_check(settings, chosen, path, deadline)
    _show(report)
    say(make_console(), f"written: {path}")
    if report["status"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _require_vllm(stage: str) -> None:
    try:
        require_vllm()
    except ConfigError as error:
        raise ConfigError("--stages", f"{stage} needs vLLM: {error.problem}", error.fix) from error


def run_check(settings: Settings, stages: Sequence[str], path: Path, deadline: float) -> dict[str, Any]:
    """Measure stages until the deadline (on the clock of `time.perf_counter`) and write the file. Returns the report,
    as in the JSON file; its status is `interrupted` until the end. Raises InputError if the file exists or cannot be
    written."""
    refuse_existing(path, "--output")
    make_folder(path.parent, "--output")
    entries = dict[str, Any]()
    report = {
        "kind": "specactor gpu check",
        "version": 7,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": "interrupted",
        "stages": entries,
    }
    console = make_console(sys.stderr)

    def changed(line: str) -> None:
        say(console, f"[gpu-check] {line}")
        write_json(path, report)

    for name in stages:
        stage = Stage(name, settings, deadline, changed)
        entries[name] = stage.entry
        stage.run(STAGES[name])
    found = {entry["status"] for entry in entries.values()}
    report["status"] = next(status for status in ("failed", "partial", "complete") if status in found)
    write_json(path, report)
    return report


def slug(device: str) -> str:
    """Name for files, such as `h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "device"


def _show(report: Mapping[str, Any]) -> None:
    """Print each stage's points, other figures, and missing measurements; then how stages ended."""
    console = make_console()
    for name, entry in report["stages"].items():
        if entry["points"]:
            console.print(points_table(entry["points"], name))
        for key, value in entry["figures"].items():
            say(console, f"{name}, {key}: {cell(value)}")
        for line in entry["not_measured"]:
            say(console, f"{name}, not measured: {line}")
    columns = ("status", "seconds", "error")
    ends = [{"stage": name, **{key: entry[key] for key in columns}} for name, entry in report["stages"].items()]
    console.print(points_table(ends))


if __name__ == "__main__":
    run_script(gpu_check)
