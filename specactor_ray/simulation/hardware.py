"""Hardware by name or file: seconds of a model's step, and size of the cache.

There are three kinds: a roofline (figures of a data sheet, such as conf/simulation/hardware/h100.yaml), steps measured
by `scripts/gpu-check`, and a profile of `specactor profile`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specactor_ray.core.errors import ConfigError, InputError, did_you_mean
from specactor_ray.plan.costs import GridCost, Point
from specactor_ray.plan.profile import load_profile
from specactor_ray.simulation.hardware_files import (
    HARDWARE,
    Section,
    find_file,
    find_model,
    read_device,
    read_file,
    shipped_hardware,
)
from specactor_ray.simulation.roofline import DeviceSpec, ForwardCost, RooflineCost


@dataclass(frozen=True)
class Hardware(abc.ABC):
    """One kind of machine. All methods raise ConfigError for an unknown model or number of GPUs."""

    name: str

    @abc.abstractmethod
    def target_cost(self, model: str, gpus: int = 1) -> ForwardCost:
        """Seconds of a target's step on this many GPUs of a node."""

    def draft_cost(self, model: str, gpus: int = 1) -> ForwardCost:
        """Seconds of a drafter's step."""
        return self.target_cost(model, gpus)

    @abc.abstractmethod
    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        """Tokens of keys and values that fit into this share of each GPU's memory beside the weights; 0 if the weights
        alone do not fit. `other_weights_bytes`: bytes of other weights on each GPU."""


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped name (`h100`), a YAML file, or a profile (`.json`).

    Raises:
        ConfigError: There is no such hardware, or the file is invalid; the message names file, key and fix.
        InputError: A profile is damaged.
    """
    path = find_file(name_or_path)
    if path.suffix == ".json":
        profile = load_profile(path)
        drafting = {name: method.costs for name, method in profile.methods.items()}
        return ProfiledHardware(path.stem, str(profile.data["model"]["name"]), profile.verify, drafting)
    top = read_file(path, HARDWARE).only(
        ("kind", "name", "device", "source", "roofline", "measured"), ("name", "device")
    )
    if ("roofline" in top.values) == ("measured" in top.values):
        raise top.error("roofline", "one of `roofline` and `measured` is wanted.", "keep one of the two sections.")
    if "roofline" in top.values:
        return RooflineHardware(str(top.values["name"]), read_device(top))
    return _read_measured(top)


@dataclass(frozen=True)
class RooflineHardware(Hardware):
    """See `roofline`."""

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

    device: str
    """Device name of the driver, such as `NVIDIA H200`."""
    steps: Mapping[tuple[str, int], GridCost]
    """(model, GPUs) → seconds of its steps."""

    def target_cost(self, model: str, gpus: int = 1) -> GridCost:
        cost = self.steps.get((model.lower(), gpus))
        if cost is None:
            names = sorted({name for name, _ in self.steps})
            known = ", ".join(f"{name} on {count} GPU(s)" for name, count in self.steps)
            problem = f"{model} on {gpus} GPU(s) was not measured there.{did_you_mean(model.lower(), names)}"
            raise ConfigError(f"hardware {self.name}", problem, f"use one of: {known}; or a roofline, such as h200.")
        return cost

    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        for path in map(find_file, shipped_hardware()):
            if path.suffix == ".json":
                continue
            top = read_file(path, HARDWARE)
            if "roofline" in top.values and self.device.split(" ")[:2] == str(top.values["device"]).split(" ")[:2]:
                same = RooflineHardware(path.stem, read_device(top))
                return same.cache_tokens(model, gpus, share, other_weights_bytes)
        problem, fix = f"the memory of {self.device!r} is not known.", f"use one of {', '.join(shipped_hardware())}"
        raise ConfigError(f"hardware {self.name}", problem, f"{fix} for its cache.")


@dataclass(frozen=True)
class ProfiledHardware(Hardware):
    """The machine of a profile: the profiled target, and its draft methods by name."""

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

    def cache_tokens(self, model: str, gpus: int, share: float, other_weights_bytes: float = 0.0) -> int:
        raise ConfigError(f"hardware {self.name}", "a profile does not tell memory.", "write the cache in tokens.")

    def _on(self, devices: int, what: str, costs: Mapping[int, GridCost]) -> GridCost:
        if devices not in costs:
            problem = f"{what}: {devices} devices were not measured; those measured are {', '.join(map(str, costs))}."
            raise ConfigError(f"hardware {self.name}", problem, "use a measured number.")
        return costs[devices]


def _read_measured(top: Section) -> MeasuredHardware:
    measured, steps = top.section("measured"), {}
    for model in measured.values:
        entry = measured.section(model).only(("gpus", "graph", "eager"), ("gpus",))
        kind = "graph" if entry.values.get("graph") else "eager"
        try:
            steps[str(model).lower(), entry.count("gpus")] = GridCost(_read_steps(entry, kind))
        except InputError as error:
            raise entry.error(kind, f"{error}.", "measure a full grid: scripts/gpu-check.") from None
    if not steps:
        raise top.error("measured", "no model was measured.", "run scripts/gpu-check.")
    return MeasuredHardware(str(top.values["name"]), str(top.values["device"]), steps)


def _read_steps(entry: Section, kind: str) -> dict[Point, float]:
    rows = entry.values.get(kind)
    if not isinstance(rows, list):
        raise entry.error(kind, "there are no steps.", "write [[rows, positions, context, seconds], ...].")
    steps = {}
    for index, row in enumerate(rows):
        numbers = [value for value in row if isinstance(value, int | float)] if isinstance(row, list) else []
        sound = len(numbers) == 4 and numbers[0] >= 1 and numbers[1] >= 1 and numbers[2] >= 0
        if not sound or not 0.0 < numbers[3] < float("inf"):
            problem = f"{row!r} is not [rows, positions, context, seconds] with seconds above 0."
            raise entry.error(f"{kind}.{index}", problem, "measure it again.")
        steps[numbers[0], numbers[1], numbers[2]] = float(numbers[3])
    return steps
