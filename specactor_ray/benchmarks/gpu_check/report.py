"""The two files of a check: all figures as JSON, and the measured hardware for the simulator as YAML.

Both are replaced as a whole after every group of measurements, so they are readable at any time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.errors import InputError
from specactor_ray.files import write_json, write_text


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
        self.data: dict[str, Any] = {"kind": "specactor gpu check", "version": 1, **head}
        self.data |= {"status": "running", "stages": {}}
        try:
            self.save()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error}. Fix: name another file with --output.") from None

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        """Name → status (`running`, `complete`, `cut`, `failed`, `interrupted`), seconds, error and figures."""
        stages: dict[str, dict[str, Any]] = self.data["stages"]
        return stages

    def open_stage(self, name: str) -> dict[str, Any]:
        """The entry of a stage that begins."""
        entry = self.stages[name] = {"status": "running", "seconds": 0.0, "error": "", "figures": {}}
        return entry

    def close(self, interrupted: bool = False) -> None:
        """The run has ended: sum up the stages."""
        statuses = {entry["status"] for entry in self.stages.values()}
        worst = [status for status in ("failed", "cut") if status in statuses]
        self.data["status"] = "interrupted" if interrupted else (worst or ["complete"])[0]
        self.save()

    def save(self) -> None:
        """Write both files; the YAML once forwards were measured."""
        write_json(self.path, _plain(self.data), shared=True)
        measured = self.stages.get("forwards", {}).get("figures", {}).get("shapes", {})
        measured = {name: shape for name, shape in measured.items() if shape["graph"] or shape["eager"]}
        if measured:
            write_text(self.yaml_path, hardware_yaml(self.data, measured), shared=True)


def refuse_existing(path: Path) -> None:
    """Raises InputError when a file of this run exists."""
    for file in (path, path.with_suffix(".yaml")):
        if file.exists():
            raise InputError(
                f"{file} exists and is never overwritten. Fix: move it away, or name another file with --output."
            )


def hardware_yaml(data: Mapping[str, Any], shapes: Mapping[str, Mapping[str, Any]]) -> str:
    """The measured hardware as the simulator reads it.

    Written by hand, since a machine with a GPU may lack PyYAML. Numbers have no exponent: YAML 1.1 would take `4e-05`
    for text.
    """
    scaled = [shape["scaled"] for shape in shapes.values() if shape.get("scaled")]
    command = "scripts/gpu-check --dry-run" if data["dry_run"] else "scripts/gpu-check"
    source = "; ".join([f"{command}, {data['started'][:10]}, torch {data['torch']}", *scaled])
    lines = [
        "kind: specactor hardware",
        f"name: {slug(data['device'])}-measured",
        f"device: {json.dumps(data['device'])}",
        f"source: {json.dumps(source)}",
        "measured:",
    ]
    for name, shape in shapes.items():
        lines += [f"  {name}:", "    gpus: 1"]
        for kind in ("graph", "eager"):
            if shape[kind]:
                lines += [f"    {kind}:", *(f"      - {_point(point)}" for point in shape[kind])]
    return "\n".join(lines) + "\n"


def slug(device: str) -> str:
    """`h200` of `NVIDIA H200`: fit for file names."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower().removeprefix("nvidia ")).strip("-") or "device"


def _point(point: Sequence[float]) -> str:
    rows, positions, context, seconds = point
    return f"[{rows}, {positions}, {context}, {seconds:.9f}]"


def _plain(value: Any) -> Any:
    """Floats with six significant digits; those that are not finite as null, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
