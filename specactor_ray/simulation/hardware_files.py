"""Reader of hardware files: YAML with figures and their sources, checked key by key."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from specactor_ray.config.load import SHIPPED as PACKAGE_FILES
from specactor_ray.core.errors import ConfigError, did_you_mean
from specactor_ray.simulation.roofline import DeviceSpec, ModelSpec

SHIPPED = PACKAGE_FILES / "simulation" / "hardware"

HARDWARE, MODELS = "specactor hardware", "specactor models"

# Key of a file → field, and the field's units in one unit of the file.
_DEVICE_FIGURES: Mapping[str, tuple[str, float]] = {
    "peak_tflops": ("peak_flops", 1e12),
    "memory_bandwidth_tb_s": ("memory_bandwidth", 1e12),
    "memory_gb": ("memory_bytes", 1e9),
    "compute_share": ("compute_share", 1.0),
    "bandwidth_share": ("bandwidth_share", 1.0),
    "step_overhead_us": ("step_overhead_s", 1e-6),
    "layer_overhead_us": ("layer_overhead_s", 1e-6),
    "eager_layer_us": ("eager_layer_s", 1e-6),
    "link_bandwidth_gb_s": ("link_bandwidth", 1e9),
    "link_latency_us": ("link_latency_s", 1e-6),
}


@dataclass(frozen=True)
class Section:
    """A mapping of a file, with the texts of its errors."""

    file: Path
    prefix: str
    """Prefix of its keys: empty at the top, or `roofline.`."""
    values: Mapping[str, Any]

    def error(self, name: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self.prefix}{name}", problem, fix)

    def only(self, allowed: Iterable[str], required: Iterable[str] = ()) -> Section:
        """Return this section after a check for unknown and missing keys."""
        allowed = list(allowed)
        for name in self.values:
            if name not in allowed:
                hint = did_you_mean(str(name), allowed)
                raise self.error(name, f"unknown key.{hint}", f"keys: {', '.join(allowed)}.")
        for name in required:
            if self.values.get(name) is None:
                raise self.error(name, "missing.", f"add `{name}: ...`.")
        return self

    def section(self, name: str) -> Section:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, f"{value!r} is not a section.", "write it as `key: value` pairs.")
        return Section(self.file, f"{self.prefix}{name}.", value)

    def figure(self, name: str) -> float:
        """The number of `{value: number, source: text}`."""
        entry = self.section(name).only(("value", "source"), ("value", "source"))
        value = entry.values["value"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            hint = " (YAML reads 1e12 as text; write 1.0e+12)" if isinstance(value, str) else ""
            raise entry.error("value", f"{value!r} is not a number above 0{hint}.", "correct the figure.")
        return float(value)

    def count(self, name: str, least: int = 1) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"{value!r} is not a count of {least} or more.", "correct it.")
        return value


def shipped_hardware() -> list[str]:
    """Names that `find_file` finds."""
    return sorted(path.stem for path in SHIPPED.glob("*.[yj]*") if path.stem != "models")


def find_file(name_or_path: str | Path) -> Path:
    """The file of a path, or of a bare name among the shipped files.

    Raises:
        ConfigError: The file does not exist.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix in (".yaml", ".yml", ".json") or path.name != str(name_or_path):
        if not path.is_file():
            fix = "check the path; it is relative to the current folder."
            raise ConfigError(str(path), "there is no such file.", fix)
        return path
    name, names = str(name_or_path).lower(), shipped_hardware()
    if name not in names:
        problem = f"no hardware of this name is shipped.{did_you_mean(name, names)}"
        raise ConfigError(f"hardware {name_or_path}", problem, f"use one of {', '.join(names)}, or the path of a file.")
    named = SHIPPED / f"{name}.yaml"
    return named if named.is_file() else named.with_suffix(".json")


def read_file(path: Path, kind: str) -> Section:
    """The top section of a YAML file of this kind.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or has another kind.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"not valid YAML: {' '.join(str(error).split())}.", "correct that line.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}.", "name a YAML file.") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), "the file holds no `key: value` pairs.", "see conf/simulation/hardware/h100.yaml.")
    if data.get("kind") != kind:
        raise ConfigError(f"{path}: kind", f"{data.get('kind')!r} where {kind!r} is wanted.", f"write `kind: {kind}`.")
    return Section(path, "", data)


def read_device(top: Section) -> DeviceSpec:
    """The `roofline` section of a hardware file."""
    section = top.section("roofline").only(_DEVICE_FIGURES, _DEVICE_FIGURES)
    figures = {field: section.figure(key) * unit for key, (field, unit) in _DEVICE_FIGURES.items()}
    for share in ("compute_share", "bandwidth_share"):
        if figures[share] > 1.0:
            raise section.error(share, f"{figures[share]:g} is above 1.", "write a share, such as 0.8.")
    return DeviceSpec(name=str(top.values["name"]), **figures)


@functools.cache
def load_models(path: Path = SHIPPED / "models.yaml") -> Mapping[str, ModelSpec]:
    """Model name → shape.

    Raises:
        ConfigError: The file is invalid; the message names the key.
    """
    models = read_file(path, MODELS).only(("kind", "models")).section("models")
    return {name: _read_model(name, models.section(name)) for name in models.values}


def find_model(name: str) -> ModelSpec:
    """A shipped model shape; the case of the name is ignored.

    Raises:
        ConfigError: There is no such shape.
    """
    models = load_models()
    if name.lower() not in models:
        problem = f"the shape of this model is not known.{did_you_mean(name.lower(), list(models))}"
        raise ConfigError(f"model {name}", problem, f"use one of {', '.join(models)}, or add it to models.yaml.")
    return models[name.lower()]


def _read_model(name: str, section: Section) -> ModelSpec:
    known = {field.name: field for field in fields(ModelSpec) if field.name != "name"}
    required = [field for field, entry in known.items() if entry.default is MISSING]
    section.only((*known, "source"), (*required, "source"))
    shape: dict[str, Any] = {}
    for key, value in section.values.items():
        if key == "source":
            continue
        if not isinstance(known[key].default, bool):
            shape[key] = section.count(key, least=1 if key in required and key != "ffn" else 0)
        elif isinstance(value, bool):
            shape[key] = value
        else:
            raise section.error(key, f"{value!r} is not true or false.", "see the model's config.json.")
    if shape.get("experts", 0) < shape.get("experts_per_token", 0):
        raise section.error("experts_per_token", "more than there are experts.", "see its config.json.")
    return ModelSpec(name=name, **shape)
