"""The two files of a check, all figures as JSON and the measured hardware for the simulator as YAML, and its tables.

Both files are replaced as a whole after every measurement, so they are readable at any time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specactor_ray.errors import InputError
from specactor_ray.files import write_json, write_text

Entry = Mapping[str, Any]

_TABLES: Mapping[str, tuple[str, Sequence[str], str, Sequence[str]]] = {
    "triton": ("the keyed sampler", ("rows",), "form", ("ms", "GB")),
    "forwards": (
        "a forward, ms: as a CUDA graph where one was captured, else eager",
        ("shape", "context", "rows"),
        "positions",
        ("ms",),
    ),
    "flips": ("sampled tokens that differ from batch 1, length 1", ("batch", "length"), "T", ("per 1,000", "margin")),
}
"""Stage → title, columns that name a line, the column whose values become columns, and what is shown of each. Other
stages are shown as they are."""
_TITLES = {
    "attention": "one layer of the product's attention, random queries, keys and values",
    "engine": "steps of the hf engine, oracle drafts",
    "end_to_end": "rollouts in one process, oracle drafter",
    "vllm": "steps of the vllm engine, oracle drafts, beside vllm.LLM",
}


class Report:
    """Figures on their way into the files.

    Args:
        path: The JSON file; the YAML lies beside it under the same stem.
        head: What the file says before the stages.

    Raises:
        InputError: One of the files exists, or the folder cannot be written to.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self.yaml_path = path, path.with_suffix(".yaml")
        refuse_existing(path)
        self.stages: dict[str, dict[str, Any]] = {}
        self.data = {"kind": "specactor gpu check", "version": 2, **head, "status": "running", "stages": self.stages}
        try:
            self.save()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error}. Fix: name another file with --output.") from None

    def close(self, interrupted: bool = False) -> None:
        """The run has ended: sum up the stages."""
        statuses = {entry["status"] for entry in self.stages.values()}
        worst = [status for status in ("failed", "partial") if status in statuses]
        self.data["status"] = "interrupted" if interrupted else (worst or ["complete"])[0]
        self.save()

    def save(self) -> None:
        """Write both files; the YAML once forwards were measured."""
        write_json(self.path, _plain(self.data), shared=True)
        shapes = self.stages.get("forwards", {}).get("figures", {})
        if measured := {name: shape for name, shape in shapes.items() if shape["graph"] or shape["eager"]}:
            write_text(self.yaml_path, hardware_yaml(self.data, measured), shared=True)


def refuse_existing(path: Path) -> None:
    """Raises InputError when a file of this run exists."""
    for file in (path, path.with_suffix(".yaml")):
        if file.exists():
            fix = "Fix: move it away, or name another file with --output."
            raise InputError(f"{file} exists and is never overwritten. {fix}")


def hardware_yaml(data: Mapping[str, Any], shapes: Mapping[str, Entry]) -> str:
    """The measured hardware as the simulator reads it.

    Written by hand, since a machine with a GPU may lack PyYAML. Numbers have no exponent: YAML 1.1 would take `4e-05`
    for text.
    """
    scaled = [shape["scaled"] for shape in shapes.values() if shape.get("scaled")]
    command = "scripts/gpu-check --dry-run" if data["dry_run"] else "scripts/gpu-check"
    source = f"{command}, {data['started'][:10]}, torch {data['torch']}"
    lines = [
        "kind: specactor hardware",
        f"name: {slug(data['device'])}-measured",
        f"device: {json.dumps(data['device'])}",
        f"source: {json.dumps('; '.join([source, *scaled]))}",
        "measured:",
    ]
    for name, shape in shapes.items():
        lines += [f"  {name}:", "    gpus: 1"]
        for kind in ("graph", "eager"):
            points = [f"      - [{r}, {p}, {c}, {seconds:.9f}]" for r, p, c, seconds in shape[kind]]
            lines += [f"    {kind}:", *points] if points else []
    return "\n".join(lines) + "\n"


def slug(device: str) -> str:
    """`h200` of `NVIDIA H200`: fit for file names."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "device"


def tables(data: Mapping[str, Any]) -> Iterator[Table | str]:
    """Tables of the stages that have figures, lines about what was not measured, and how each stage ended."""
    for name, entry in data["stages"].items():
        if entry["points"]:
            yield _points_table(name, entry["points"])
        if name != "forwards" and entry["figures"]:
            yield "\n".join(f"{name}: {key} {_cell(value)}" for key, value in entry["figures"].items())
        if entry["not_measured"]:
            yield "\n".join(f"{name}, not measured: {line}" for line in entry["not_measured"])
    ended = [
        {"stage": name, **{key: entry[key] for key in ("status", "seconds", "error")}}
        for name, entry in data["stages"].items()
    ]
    yield _table("stages", ended)


def _points_table(name: str, points: Sequence[Entry]) -> Table:
    if name not in _TABLES:
        return _table(_TITLES.get(name, name), points)
    title, keys, pivot, values = _TABLES[name]
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        line = lines.setdefault(tuple(point[key] for key in keys), {key: point[key] for key in keys})
        line |= {f"{pivot} {point[pivot]}, {value}": point[value] for value in values if value in point}
    return _table(title, list(lines.values()))


def _table(title: str, lines: Sequence[Entry]) -> Table:
    """A column for every key."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    columns = list(dict.fromkeys(key for line in lines for key in line))
    for column in columns:
        text = any(isinstance(line.get(column), str) for line in lines)
        table.add_column(column, justify="left" if text else "right")
    for line in lines:
        table.add_row(*(_cell(line.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return "-" if value is None else str(value)


def _plain(value: Any) -> Any:
    """Floats with six significant digits; those that are not finite as null, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
