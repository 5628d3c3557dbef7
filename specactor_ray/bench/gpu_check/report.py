"""Files of a check, all figures as JSON and the measured hardware for the simulator as YAML, and its tables.

Both are replaced as a whole after every measurement, so they are readable at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specactor_ray.bench.gpu_check.settings import STAGES
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import write_json, write_text


class Report:
    """Figures for the JSON file `path` and a YAML file beside it; `head` comes before the stages. Raises InputError
    where one of them exists or cannot be written."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self.yaml_path, self.stages = path, path.with_suffix(".yaml"), dict[str, dict[str, Any]]()
        fix = "Fix: name another file with --output."
        for file in (path, self.yaml_path):
            if file.exists():
                raise InputError(f"{file} exists and is never overwritten. {fix}")
        self.data = {"kind": "specactor gpu check", "version": 2, **head, "status": "running", "stages": self.stages}
        try:
            self.save()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error}. {fix}") from None

    def close(self, interrupted: bool = False) -> None:
        """Sum up the stages at the end of the run."""
        found = [entry["status"] for entry in self.stages.values()]
        order = ("interrupted", "failed", "partial", "complete", "skipped")
        self.data["status"] = "interrupted" if interrupted else min(found, key=order.index)
        self.save()

    def save(self) -> None:
        """Write both files; the YAML once forwards were measured."""
        text = json.dumps(self.data, default=str)  # six significant digits; null for NaN, which JSON lacks
        plain = json.loads(
            text, parse_float=lambda number: float(f"{float(number):.6g}"), parse_constant=lambda _: None
        )
        write_json(self.path, plain, shared=True)
        shapes = self.stages.get("forwards", {}).get("figures", {})
        if measured := {name: shape for name, shape in shapes.items() if shape["graph"] or shape["eager"]}:
            write_text(self.yaml_path, hardware_yaml(self.data, measured), shared=True)


def hardware_yaml(data: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """The measured hardware for the simulator as YAML, written without PyYAML, which a machine with a GPU may lack.
    Numbers have no exponent: YAML 1.1 reads `4e-05` as text."""
    command = "scripts/gpu-check --dry-run" if data["dry_run"] else "scripts/gpu-check"
    source = f"{command}, {data['started'][:10]}, torch {data['torch']}"
    lines = ["kind: specactor hardware", f"name: {slug(data['device'])}-measured"]
    lines += [f"{key}: {json.dumps(value)}" for key, value in (("device", data["device"]), ("source", source))]
    lines += ["measured:"]
    for name, shape in shapes.items():
        lines += [f"  {name}:", "    gpus: 1"]
        for kind in ("graph", "eager"):
            points = [f"      - [{r}, {p}, {c}, {seconds:.9f}]" for r, p, c, seconds in shape[kind]]
            lines += [f"    {kind}:", *points] if points else []
    return "\n".join(lines) + "\n"


def slug(device: str) -> str:
    """Name for files, such as `h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "device"


def tables(stages: Mapping[str, Mapping[str, Any]]) -> Iterator[Table | str]:
    """Each stage's points, other figures, and missing measurements; then how stages ended."""
    for name, entry in stages.items():
        yield f"{name}: {STAGES[name]}"
        if entry["points"]:
            yield _table(entry["points"])
        if name != "forwards":  # all its figures are points, too
            yield from (f"  {key}: {_cell(value)}" for key, value in entry["figures"].items())
        yield from (f"  not measured: {line}" for line in entry["not_measured"])
    ended = ("status", "seconds", "error")
    yield _table([{"stage": name, **{key: entry[key] for key in ended}} for name, entry in stages.items()])


def _table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """A column for every key."""
    table = Table(box=SIMPLE_HEAD)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    for column in columns:
        is_text = any(isinstance(line.get(column), str) for line in lines)
        table.add_column(column, justify="left" if is_text else "right")
    for line in lines:
        table.add_row(*(_cell(line.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)
