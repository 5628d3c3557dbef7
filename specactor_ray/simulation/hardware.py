"""Hardware by name or file: seconds of a model's step, and size of the cache.

There are three kinds: a roofline (figures of a data sheet, such as conf/simulation/hardware/h100.yaml), steps measured
by `scripts/gpu-check`, and a profile of `specactor profile`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from specactor_ray.config.fields import at_least, one_of, reject_values_not_allowed
from specactor_ray.config.load import SHIPPED as PACKAGE_FILES
from specactor_ray.config.load import find_file, load_as
from specactor_ray.core.errors import ConfigError, InputError, did_you_mean
from specactor_ray.plan.costs import GridCost, Point
from specactor_ray.plan.profile import load_profile
from specactor_ray.simulation.roofline import DeviceSpec, ForwardCost, ModelSpec, RooflineCost

S = TypeVar("S")
_FOLDER = "simulation/hardware"
SHIPPED = PACKAGE_FILES / _FOLDER


@dataclass
class HardwareFile:
    """A hardware file: either `roofline` or `measured`."""

    kind: str = one_of(("specactor hardware",), "")
    name: str = ""
    device: str = ""
    """Device name of the driver, such as `NVIDIA H200`."""
    source: str = ""
    roofline: dict[str, Any] = field(default_factory=dict)
    """`DeviceSpec`."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Model → `MeasuredModel`."""


@dataclass
class MeasuredModel:
    """Steps of a model, each `[rows, positions, context, seconds]`, launched as a graph or by the CPU."""

    gpus: int = at_least(1, 0)
    graph: list[Any] | None = None
    eager: list[Any] | None = None


@dataclass
class ModelsFile:
    """The file of model shapes."""

    kind: str = one_of(("specactor models",), "")
    models: dict[str, Any] = field(default_factory=dict)
    """Name → `ModelSpec`."""


class Hardware:
    """One kind of machine. All methods raise ConfigError for an unknown model or number of GPUs."""

    name: str

    def target_cost(self, model: str, gpus: int = 1) -> ForwardCost:
        """Seconds of a target's step on this many GPUs of a node."""
        raise NotImplementedError

    def draft_cost(self, model: str, gpus: int = 1) -> ForwardCost:
        """Seconds of a drafter's step."""
        return self.target_cost(model, gpus)

    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        """Tokens of keys and values that fit into this share of each GPU's memory beside the weights; 0 if the weights
        alone do not fit. `other_weights_bytes`: bytes of other weights on each GPU."""
        problem, fix = "the memory of its device is not known.", f"use one of {', '.join(shipped_hardware())}"
        raise ConfigError(f"hardware {self.name}", problem, f"{fix} for its cache.")


@dataclass(frozen=True)
class RooflineHardware(Hardware):
    """See `roofline`."""

    name: str
    device: DeviceSpec

    def target_cost(self, model: str, gpus: int = 1, graph: bool = True, host_s: float = 0.0) -> RooflineCost:
        spec = find_model(model)
        if gpus < 1 or spec.heads % gpus:
            problem = f"{model} has {spec.heads} attention heads, which {gpus} GPUs cannot share."
            raise ConfigError("gpus", problem, f"use a divisor of {spec.heads}.")
        return RooflineCost(self.device, spec, gpus, graph, host_s)

    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        return self.target_cost(model, gpus).cache_tokens(share, other_weights_bytes)


@dataclass(frozen=True)
class MeasuredHardware(Hardware):
    """Measured steps by model. Memory is that of the shipped roofline of the same device."""

    name: str
    device: str
    steps: Mapping[tuple[str, int], GridCost]
    """(model, GPUs) → seconds of its steps."""

    def target_cost(self, model: str, gpus: int = 1) -> GridCost:
        cost = self.steps.get((model.lower(), gpus))
        if cost is None:
            known = ", ".join(f"{name} on {count} GPU(s)" for name, count in self.steps)
            hint = did_you_mean(model.lower(), sorted({name for name, _ in self.steps}))
            problem = f"{model} on {gpus} GPU(s) was not measured there.{hint}"
            raise ConfigError(f"hardware {self.name}", problem, f"use one of: {known}; or a roofline, such as h200.")
        return cost

    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        for path in sorted(SHIPPED.glob("*.yaml")):
            if path.stem != "models":
                other = _section(HardwareFile, path, path)
                if other.roofline and other.device.split(" ")[:2] == self.device.split(" ")[:2]:
                    same = RooflineHardware(path.stem, _device(path, other))
                    return same.cache_tokens(model, gpus, share, other_weights_bytes)
        return super().cache_tokens(model, gpus, share)


@dataclass(frozen=True)
class ProfiledHardware(Hardware):
    """The machine of a profile: the profiled target, and its draft methods by name. Its memory is not known."""

    name: str
    target: str
    """Name of the profiled model."""
    verify: Mapping[int, GridCost]
    """Device count → seconds of the target's steps."""
    drafting: Mapping[str, Mapping[int, GridCost]]
    """Draft method → device count → seconds of its steps."""

    def target_cost(self, model: str, gpus: int = 1) -> GridCost:
        if model != self.target:
            problem = f"this profile is of {self.target}, not {model}."
            raise ConfigError(f"hardware {self.name}", problem, f"use {self.target}.")
        return self._on(gpus, "verifying", self.verify)

    def draft_cost(self, model: str, gpus: int = 1) -> GridCost:
        if model not in self.drafting:
            methods = list(self.drafting)
            problem = f"draft method {model} was not profiled.{did_you_mean(model, methods)}"
            raise ConfigError(f"hardware {self.name}", problem, f"use one of {', '.join(methods)}.")
        return self._on(gpus, model, self.drafting[model])

    def _on(self, devices: int, what: str, costs: Mapping[int, GridCost]) -> GridCost:
        if devices not in costs:
            problem = f"{what}: {devices} devices were not measured; those measured are {', '.join(map(str, costs))}."
            raise ConfigError(f"hardware {self.name}", problem, "use a measured number.")
        return costs[devices]


def shipped_hardware() -> list[str]:
    """Names that `load_hardware` finds."""
    return sorted(path.stem for path in SHIPPED.glob("*.[yj]*") if path.stem != "models")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped name (`h100`), a YAML file, or a profile (`.json`).

    Raises:
        ConfigError: There is no such hardware, or the file is invalid; the message names file, key and fix.
        InputError: A profile is damaged.
    """
    name, names = str(name_or_path).lower(), shipped_hardware()
    path = SHIPPED / f"{name}.json" if name in names else Path(name_or_path).expanduser()
    if path.suffix == ".json" and path.is_file():
        profile = load_profile(path)
        drafting = {name: method.costs for name, method in profile.methods.items()}
        return ProfiledHardware(path.stem, str(profile.data["model"]["name"]), profile.verify, drafting)
    path = find_file(name if name in names else path, _FOLDER)
    if not path.is_file():
        problem = f"there is no such file, and none of this name is shipped.{did_you_mean(name, names)}"
        raise ConfigError(f"hardware {name_or_path}", problem, f"use one of {', '.join(names)}, or the path of a file.")
    file = _section(HardwareFile, path, path)
    for key in ("name", "device"):
        if not getattr(file, key):
            raise ConfigError(f"{path}: {key}", "is missing.", f"add `{key}: ...`.")
    if bool(file.roofline) == bool(file.measured):
        problem = "one of `roofline` and `measured` is needed."
        raise ConfigError(f"{path}: roofline", problem, "keep one of the two sections.")
    if file.roofline:
        return RooflineHardware(file.name, _device(path, file))
    return MeasuredHardware(file.name, file.device, dict(_measured_steps(path, file)))


def _section(schema: type[S], source: Any, path: Path, prefix: str = "") -> S:
    """A file, or a section of the file with this prefix of its keys, checked. Errors begin with the path."""
    try:
        if not isinstance(source, Path | Mapping):
            raise ConfigError("", f"{source!r} is not a section.", "write it as `key: value` pairs.")
        section = load_as(schema, source)
        reject_values_not_allowed(section, "")
    except ConfigError as error:
        key = error.key if error.key == str(path) else f"{path}: {prefix}{error.key}".rstrip(".")
        raise ConfigError(key, error.problem, error.fix) from None
    return section


def _device(path: Path, file: HardwareFile) -> DeviceSpec:
    device = _section(DeviceSpec, file.roofline, path, "roofline.")
    for key in ("compute_share", "bandwidth_share"):
        if (share := getattr(device, key).value) > 1.0:
            raise ConfigError(f"{path}: roofline.{key}.value", f"{share:g} is above 1.", "write a share, such as 0.8.")
    return device


def _measured_steps(path: Path, file: HardwareFile) -> Iterator[tuple[tuple[str, int], GridCost]]:
    for model, entry in file.measured.items():
        measured = _section(MeasuredModel, entry, path, f"measured.{model}.")
        kind = "graph" if measured.graph else "eager"
        where = f"{path}: measured.{model}.{kind}"
        try:
            cost = GridCost(dict(_steps(where, measured.graph or measured.eager or [])))
        except ConfigError:
            raise
        except InputError as error:
            raise ConfigError(where, f"{error}.", "measure a full grid: scripts/gpu-check.") from None
        yield (str(model).lower(), measured.gpus), cost


def _steps(where: str, rows: list[Any]) -> Iterator[tuple[Point, float]]:
    for index, row in enumerate(rows):
        numbers = [value for value in row if isinstance(value, int | float)] if isinstance(row, list) else []
        sound = len(numbers) == 4 and numbers[0] >= 1 and numbers[1] >= 1 and numbers[2] >= 0
        if not sound or not 0.0 < numbers[3] < float("inf"):
            problem = f"{row!r} is not [rows, positions, context, seconds] with seconds above 0."
            raise ConfigError(f"{where}.{index}", problem, "measure it again.")
        yield (numbers[0], numbers[1], numbers[2]), float(numbers[3])


@functools.cache
def load_models(path: Path = SHIPPED / "models.yaml") -> Mapping[str, ModelSpec]:
    """Model name → shape. Raises ConfigError if the file is invalid; the message names the key."""
    found = {}
    for name, entry in _section(ModelsFile, path, path).models.items():
        shape = found[str(name)] = _section(ModelSpec, entry, path, f"models.{name}.")
        if shape.experts < shape.experts_per_token:
            problem = "more than there are experts."
            raise ConfigError(f"{path}: models.{name}.experts_per_token", problem, "see its config.json.")
    return found


def find_model(name: str) -> ModelSpec:
    """A shipped model shape; the case of the name is ignored. Raises ConfigError if there is none."""
    models = load_models()
    if name.lower() not in models:
        problem = f"the shape of this model is not known.{did_you_mean(name.lower(), list(models))}"
        raise ConfigError(f"model {name}", problem, f"use one of {', '.join(models)}, or add it to models.yaml.")
    return models[name.lower()]
