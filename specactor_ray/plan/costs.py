"""Costs of verifying and drafting as a run measured them: the section `costs` of its `summary.json`.

    V(g, n)  seconds of a verify step over n positions on g devices
    D(g, n)  seconds to draft one token for each of n requests (or of their branches) on g devices

Verifiers and drafters learn them for their own decisions (`core/step_cost.py`). The section has

    target    the keys of the target that decide what its steps cost
    verify    devices → points (positions, seconds) of V
    drafters  method → its `model`, and `seconds`: devices → points of D; lookups have none, they count as free
    supply    share of requests with a usable draft tail, in the steps in which drafting was not suspended
    ladder    each method at each range of output positions: `drafted` tokens and their `acceptance`, the chance of one
              after right ones; `token_s`, its seconds, and `tgs`, the predicted tokens per second of a request

over all verifiers and draft actors. Devices are a number and, on GPUs of which Ray knows the kind, the kind, as in
`4 H100`: times of different kinds are neither merged nor used for each other. Measured hardware of the simulator
(`conf/simulation/hardware/*.json`) has the same form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specactor_ray.config.accelerators import allows_kind, of_kind
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.errors import ConfigError, clipped
from specactor_ray.core.files import expanded, parse_json, read_foreign
from specactor_ray.core.step_cost import range_number

Points = Iterable[tuple[float, float]]

TARGET_KEYS = ("model", "dtype", "backend", "gpus", "tensor_parallel")
"""Keys of `target` with which costs hold."""
_LEAST_POINTS = 2
"""Least points of V: with one nothing states what a further position costs."""
_ANOTHER = "name the summary.json of a run with drafts that has ended, or leave it out."


class StepTimes:
    """Seconds of a step by its positions: straight lines between the points, never falling. Before the first point a
    step is as long as there; after the last it follows the line from the first to the last. Without points it takes no
    time."""

    def __init__(self, points: Points = ()) -> None:
        positions, seconds = np.array(sorted(points) or [(1.0, 0.0)], np.float64).T
        self._positions, self._seconds = positions, np.maximum.accumulate(seconds)
        rise, run = self._seconds[-1] - self._seconds[0], positions[-1] - positions[0]
        self._slope = float(rise / run) if run else 0.0

    @property
    def range(self) -> tuple[float, float]:
        """The fewest and the most measured positions."""
        return float(self._positions[0]), float(self._positions[-1])

    def seconds(self, positions: float) -> float:
        beyond = max(positions - float(self._positions[-1]), 0.0)
        return float(np.interp(positions, self._positions, self._seconds)) + self._slope * beyond


ByKind = Mapping[str, Mapping[int, StepTimes]]
"""Kind of GPUs (empty on CPUs, or where Ray does not know it) → device count → seconds of a step."""


@dataclass(frozen=True)
class DraftCosts:
    """Costs of a draft method."""

    model: str | None
    kinds: ByKind
    """D."""


@dataclass(frozen=True)
class Costs:
    """The section `costs`."""

    target: Mapping[str, Any]
    """Values of `TARGET_KEYS`."""
    kinds: ByKind
    """V."""
    drafters: Mapping[str, DraftCosts]
    supply: float
    """Share of requests with a tail in a step."""
    acceptance: Mapping[str, float]
    """Tried method → chance that a draft token is right where those before it are."""
    kind: str = ""
    """Kind of the verifiers' GPUs that is used."""

    @property
    def verify(self) -> Mapping[int, StepTimes]:
        """Device count → V, on that kind."""
        return self.kinds[self.kind]


def measured_costs(config: Config, actors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The section of a run, by the rows of its actors (`Rollout.status`). Those of paced devices are left out."""
    if config.paced.device is not None:
        return {"paced": config.paced.device}
    target, ladder, counted = config.target, list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    devices = target.gpus or target.cores
    own = {one.method: one.gpus if target.gpus else math.ceil(one.cores) for one in config.drafters}
    verify: dict[str, list[Any]] = defaultdict(list)
    drafting: dict[str, dict[str, list[Any]]] = {one.method: defaultdict(list) for one in config.drafters}
    for row in actors:
        counters, kind = row.get("counters") or {}, row.get("accelerator") or ""
        counted.append(counters)
        if "ladder" in counters:
            verify[f"{devices} {kind}".strip()] += counters.get("cost", ())
            ladder += counters["ladder"]
        hosted = [(one, devices) for one in counters.get("hosted", {}).values()]
        for one, count in [*hosted, *([(counters, 0)] if "health" in counters else [])]:
            method = one["health"]["method"]
            if one["cost"] and (number := count or own[method]):  # none: on cores beside a target on GPUs
                drafting[method][f"{number} {kind}".strip()] += one["cost"]
    return {
        "target": {name: getattr(target, name) for name in TARGET_KEYS},
        "verify": {place: _merged(points) for place, points in verify.items()} or {str(devices): []},
        "drafters": {
            one.method: {
                "model": one.model,
                "seconds": {place: _merged(points) for place, points in drafting[one.method].items()},
            }
            for one in config.drafters
        },
        "supply": _supply(one for one in counted if "ladder" in one),
        "ladder": _ladder(ladder),
    }


def _merged(points: Points) -> list[list[float]]:
    """Points of several actors: the mean of each range of positions, ascending."""
    ranges: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        ranges[range_number(max(round(point[0]), 1))].append(point)
    means = (np.mean(ranges[number], axis=0).tolist() for number in sorted(ranges))
    return [[round(positions, 2), round(seconds, 8)] for positions, seconds in means]


def _supply(verifiers: Iterable[Mapping[str, Any]]) -> float:
    supplied = rows = 0.0
    for one in verifiers:
        supplied += one["supplied_row_steps"]
        rows += one["row_steps"] * (1.0 - one["suspended_steps"] / max(one["steps"], 1))
    return round(min(supplied / rows, 1.0), 4) if rows else 0.0


def _ladder(standings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Standings of several verifiers: each method and range once, weighted by its draft tokens."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in standings:
        places[one["method"], one["positions"]].append(one)
    found = []
    for (method, positions), ones in places.items():
        weights = [one["drafted"] for one in ones]
        names = ("acceptance", "token_s", "tgs")
        means = {name: float(np.average([one[name] for one in ones], weights=weights)) for name in names}
        found.append({"method": method, "positions": positions, "drafted": sum(weights), **means})
    return found


def usable_costs(profile: str | None, target: TargetConfig, kind: str = "") -> Costs:
    """The costs in the file `profile` for a target on GPUs of its `accelerator`, and of this kind if it is known.
    Raises ConfigError as `load_costs`; or they are those of another target, or lack acceptance."""
    if profile is None:
        raise ConfigError("profile", "is not set.", "name the summary of a run: profile=runs/NAME/summary.json")
    costs = load_costs(profile, accelerator=target.accelerator, kind=kind if target.gpus else "")
    for name, there in costs.target.items():
        if there != (here := getattr(target, name)):
            problem = f"{profile} was measured with target.{name}={there}, and here it is {here}."
            raise ConfigError("profile", problem, "name the summary of a run of this target, or leave it out.")
    if not costs.acceptance:
        problem = f"{profile} has no draft ladder: its run verified no drafts, or was too short."
        raise ConfigError("profile", problem, "name the summary of a longer run with mode=coupled or decoupled.")
    return costs


def load_costs(path: str | Path, key: str = "profile", accelerator: str | None = None, kind: str = "") -> Costs:
    """Read the section of a file. Raises ConfigError for `key`: the file does not exist, is damaged, has no costs of at
    least two sizes of steps, or not those of a single kind of verifiers' GPUs that `accelerator` allows, and this kind.
    Costs of an unknown kind alone are those of any."""
    path = expanded(path)
    try:
        costs = _costs(parse_json(read_foreign(path))["costs"])
    except FileNotFoundError:
        raise ConfigError(key, f"there is no file {path}.", _ANOTHER) from None
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read ({error.strerror}).", _ANOTHER) from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(key, f"{path} is truncated or damaged: {error}.", _ANOTHER) from None
    except (AttributeError, LookupError, TypeError) as error:
        problem = f"the section `costs` of {path} is not sound: {type(error).__name__}: {error}."
        raise ConfigError(key, problem, _ANOTHER) from None
    if not costs.kinds:
        problem = f"{path} has the cost of less than {_LEAST_POINTS} sizes of verify steps, so its run was too short."
        raise ConfigError(key, problem, _ANOTHER)
    measured = ", ".join(map(kind_in_words, costs.kinds))
    fitting = [one for one in costs.kinds if allows_kind(accelerator, one) and kind in ("", one)]
    if not fitting and list(costs.kinds) != [""]:
        problem = f"{path} was measured with a target on {measured}, and here it is on {kind or accelerator}."
        raise ConfigError(key, problem, _ANOTHER)
    if len(fitting) > 1:
        problem = f"{path} has the costs of a target on {measured}, and those of one kind are used."
        fix = f"name the kind: target.accelerator={of_kind(accelerator, next(filter(None, fitting)))}"
        raise ConfigError(key, problem, fix if key == "profile" else "name the summary.json of a run on one kind.")
    return replace(costs, kind=next(iter(fitting), ""))


def kind_in_words(kind: str) -> str:
    """The kind, or words for an unknown one."""
    return kind or "devices of no known kind"


def _costs(section: Mapping[str, Any]) -> Costs:
    if "paced" in section:
        raise LookupError(f"its run was on paced devices ({section['paced']})")
    drafters = {
        method: DraftCosts(one["model"], _by_kind(one["seconds"])) for method, one in section["drafters"].items()
    }
    hits, tries = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in section["ladder"]:
        hits[one["method"]] += _number(one["drafted"]) * _number(one["acceptance"], 1.0)
        tries[one["method"]] += one["drafted"]
    return Costs(
        {name: section["target"][name] for name in TARGET_KEYS},
        _by_kind(section["verify"], _LEAST_POINTS),
        drafters,
        _number(section["supply"], 1.0),
        {method: hits[method] / tries[method] for method in tries if tries[method]},
    )


def _number(value: Any, most: float = 1e9) -> float:
    """The value, if it is a number from 0 to `most`; else TypeError."""
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise TypeError(f"{clipped(value)} is no number from 0 to {most:g}")
    return float(value)


def _by_kind(points: Mapping[str, Any], least: int = 0) -> ByKind:
    """Times of the places with at least so many points."""
    kinds: dict[str, dict[int, StepTimes]] = defaultdict(dict)
    for place, times in points.items():
        count, _, kind = place.partition(" ")
        if not all(_number(one) for point in times for one in point):
            raise TypeError(f"a step of {place} has no positions or no seconds")
        if len(times) >= least:
            kinds[kind][int(count)] = StepTimes(times)
    return dict(kinds)
