"""The command line of `scripts/gpu-check`, and its files: figures as JSON, and hardware for the simulator as YAML.

Both files are replaced as a whole after every measurement, so they are readable at any time.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specactor_ray.bench.micro import cell, points_table, refuse_existing
from specactor_ray.core.console import make_console, say, show_error
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, InputError, UserError
from specactor_ray.core.files import write_json, write_text
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.bench.gpu_check.stage import Stage

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
STAGES = {
    "hardware": "copies, a matrix product, launches, versions",
    "triton": "the keyed sampler: tokens of its Triton kernels beside the CPU's, then time",
    "attention": "a layer of the hf engine's attention: its kernels, calls at new lengths, and batch invariance",
    "forwards": "ms of a forward by new positions of a row, as a CUDA graph where one was captured, else eager",
    "drafting": "ms of a draft model's token, as a CUDA graph and eager, one at a time and in bursts",
    "flips": "sampled tokens per 1,000 that change with the batch and the positions of a forward",
}
_HELP = """Measure what one GPU does with this project's work, without Ray, a network or a checkpoint.

All figures go to a JSON file after every measurement; beside it a YAML file describes the measured hardware for the
simulator. The stages:"""


@app.command(help="\n\n".join([_HELP, *(f"{name}: {what}." for name, what in STAGES.items())]))
def gpu_check(
    output: Annotated[
        Path | None, typer.Option(help="JSON file, never overwritten. Default: gpu_check_DEVICE.json.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="No measurement begins after this time.")] = 8.5,
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

        from specactor_ray.bench.gpu_check.stage import DRY_RUN, DRY_RUN_ON_GPU, ON_GPU, Stage
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or dry_run):
        fix = "Fix: use a machine with a GPU and a CUDA build of torch, or add --dry-run (tiny shapes on the CPU)."
        raise InputError(f"torch {torch.__version__} finds no CUDA device here. {fix}")
    if not on_gpu:
        torch.set_num_threads(1)  # tiny shapes gain nothing from threads that compete for cores
    device = torch.cuda.get_device_name() if on_gpu else f"cpu {platform.machine()}"
    head = {"device": device, "torch": torch.__version__, "dry_run": dry_run, "minutes": minutes}
    head["started"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = CheckReport(output or Path(f"gpu_check_{slug(device).replace('-', '_')}.json"), head)
    console = make_console(sys.stderr)

    def changed(line: str) -> None:
        say(console, f"[gpu-check] {line}")
        report.save()

    settings = ON_GPU if not dry_run else DRY_RUN_ON_GPU if on_gpu else DRY_RUN
    functions = _functions()
    try:
        for name in chosen:
            stage = Stage(name, settings, begin + 60.0 * minutes, changed)
            report.stages[name] = stage.entry
            stage.run(functions[name])
    except KeyboardInterrupt:
        changed(f"interrupted; what was measured is in {report.path}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    found = {entry["status"] for entry in report.stages.values()}
    report.data["status"] = next(status for status in ("failed", "partial", "complete") if status in found)
    report.save()
    _show(report)
    if report.data["status"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _functions() -> dict[str, Callable[[Stage], None]]:
    with signals_deferred():
        from specactor_ray.bench.gpu_check import forwards, kernels

    return {
        "hardware": kernels.measure_hardware,
        "triton": kernels.measure_triton,
        "attention": kernels.measure_attention,
        "forwards": forwards.measure_forwards,
        "drafting": forwards.measure_drafting,
        "flips": forwards.measure_flips,
    }


class CheckReport:
    """Figures for the JSON file `path` and a YAML file beside it; `head` comes before the stages. Raises InputError
    where one of them exists or cannot be written."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self.yaml_path, self.stages = path, path.with_suffix(".yaml"), dict[str, dict[str, Any]]()
        for file in (path, self.yaml_path):
            refuse_existing(file, "--output")
        self.data = {"kind": "specactor gpu check", "version": 3, **head, "status": "interrupted"}
        self.data["stages"] = self.stages
        try:
            self.save()
        except OSError as error:
            raise InputError(f"--output: {path} cannot be written ({error}); name another file") from None

    def save(self) -> None:
        """Write both files; the YAML once forwards were measured."""
        text = json.dumps(self.data, default=str)  # six significant digits; null for NaN, which JSON lacks
        plain = json.loads(
            text, parse_float=lambda number: float(f"{float(number):.6g}"), parse_constant=lambda _: None
        )
        write_json(self.path, plain, shared=True)
        shapes = self.stages.get("forwards", {}).get("figures", {})
        if any(shape["graph"] or shape["eager"] for shape in shapes.values()):
            write_text(self.yaml_path, hardware_yaml(self.data, shapes), shared=True)


def hardware_yaml(data: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """The measured hardware for the simulator."""
    import yaml  # transformers needs it, too

    command = "scripts/gpu-check --dry-run" if data["dry_run"] else "scripts/gpu-check"
    measured = dict[str, Any]()
    for name, shape in shapes.items():
        points = {kind: [[*at, round(s, 9)] for *at, s in shape[kind]] for kind in ("graph", "eager") if shape[kind]}
        measured |= {name: {"gpus": 1, **points}} if points else {}
    hardware = {
        "kind": "specactor hardware",
        "name": f"{slug(data['device'])}-measured",
        "device": data["device"],
        "source": f"{command}, {data['started'][:10]}, torch {data['torch']}",
        "measured": measured,
    }
    return str(yaml.safe_dump(hardware, sort_keys=False, default_flow_style=None))


def slug(device: str) -> str:
    """Name for files, such as `h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "device"


def _show(report: CheckReport) -> None:
    """Print each stage's points, other figures, and missing measurements; then how stages ended."""
    console = make_console()
    for name, entry in report.stages.items():
        say(console, f"{name}: {STAGES[name]}")
        if entry["points"]:
            console.print(points_table(entry["points"]))
        if name != "forwards":  # all its figures are points, too
            for key, value in entry["figures"].items():
                say(console, f"  {key}: {cell(value)}")
        for line in entry["not_measured"]:
            say(console, f"  not measured: {line}")
    ended = ("status", "seconds", "error")
    console.print(
        points_table([{"stage": name, **{key: entry[key] for key in ended}} for name, entry in report.stages.items()])
    )
    say(console, f"written: {', '.join(str(path) for path in (report.path, report.yaml_path) if path.exists())}")


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


if __name__ == "__main__":
    sys.exit(main())
