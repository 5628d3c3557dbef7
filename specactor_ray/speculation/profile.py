"""The profile: measured costs and acceptance in a JSON file, and whether it may be used here.

Pure but for reading and writing the file: what this machine is comes in as an argument.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specactor_ray.errors import ConfigError, InputError
from specactor_ray.json_text import parse_json
from specactor_ray.speculation.costs import CostPoint, CostTable
from specactor_ray.speculation.plan import DraftCosts
from specactor_ray.speculation.survival import Survival

KIND, SCHEMA = "specactor profile", 1
SAME_HARDWARE = ("cpu", "vector", "gpu")
"""Entries of `hardware` that must be equal where a profile is used."""
SAME_VERSIONS = ("torch",)
"""Packages whose version must be equal where a profile is used."""

_ENTRIES: dict[str, Any] = {"device": str, "prompt_tokens": int | float, "verify": list}
_ENTRIES |= dict.fromkeys(("hardware", "versions", "model", "cpu_share", "methods"), dict)
"""What a profile has, and of what type."""
_MODEL = ("name", "dtype", "config_hash")

LEAST_CPU_SHARE = 0.75
"""Below this share of its cores' time a measurement was disturbed by other work."""


@dataclass(frozen=True)
class Profile:
    """A profile that was read and checked for damage."""

    data: Mapping[str, Any]
    """The whole file."""
    verify: CostTable
    drafting: Mapping[str, DraftCosts]
    acceptance: Mapping[str, Survival]

    @property
    def device(self) -> str:
        """`cpu` (devices are cores) or `cuda`."""
        return str(self.data["device"])

    @property
    def prompt_tokens(self) -> float:
        """Mean length of the prompts it was measured on."""
        return float(self.data["prompt_tokens"])


def disturbed(data: Mapping[str, Any]) -> list[str]:
    """A line per core count whose measurement shared its cores with other work; none on a GPU."""
    if data["device"] != "cpu":
        return []
    return [
        f"the measurement on {cores} core(s) got {share:.0%} of them: other work ran there, and costs look too high"
        for cores, share in data["cpu_share"].items()
        if share < LEAST_CPU_SHARE
    ]


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a profile file: kind, schema, `data`, and a checksum over all of it."""
    whole = {"kind": KIND, "schema": SCHEMA, **data}
    return {**whole, "checksum": _checksum(whole)}


def points_to_json(points: Sequence[CostPoint]) -> list[dict[str, Any]]:
    """Measured points as they stand in the file."""
    return [asdict(point) for point in points]


def points_from_json(rows: Sequence[Mapping[str, Any]]) -> list[CostPoint]:
    """The reverse of `points_to_json`."""
    return [CostPoint(**row) for row in rows]


def write_profile(path: Path, data: Mapping[str, Any]) -> None:
    """Write a sealed profile; the file is either complete or not there, and one that is there is never replaced.

    Raises:
        InputError: The file exists, or its folder cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(seal(data), indent=1) + "\n", encoding="utf-8")
        os.link(temporary, path)  # unlike a rename it fails where the file exists
    except FileExistsError:
        raise InputError(f"--output: {path} exists and is never overwritten; name another file") from None
    except OSError as error:
        raise InputError(f"--output: {path} cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: There is no such file, it is damaged or truncated, no profile, or of another schema.
    """
    path = Path(path).expanduser()
    again = "Fix: measure it again: specactor profile --output NEW.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"profile: there is no file {path}. Fix: specactor profile --output {path}") from None
    except UnicodeDecodeError:
        raise InputError(f"profile: {path} is not a text file in UTF-8. {again}") from None
    except OSError as error:
        raise InputError(f"profile: {path} cannot be read ({error.strerror})") from None
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"profile: {path} is truncated or damaged: no JSON from {where} on. {again}") from None
    return parse_profile(data, str(path))


def parse_profile(data: Any, where: str) -> Profile:
    """Check the contents of a profile file and make its models.

    Raises:
        InputError: See `load_profile`.
    """
    again = "Fix: measure it again: specactor profile --output NEW.json"
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"profile: {where} is no profile of specactor")
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"profile: {where} has schema {data.get('schema')!r}, and this version reads schema {SCHEMA}. {again}"
        )
    if data.get("checksum") != _checksum({name: value for name, value in data.items() if name != "checksum"}):
        raise InputError(f"profile: {where} is damaged or was edited: its checksum does not match. {again}")
    try:
        _check_entries(data)
        drafting, acceptance = {}, {}
        for method, entry in data["methods"].items():
            drafting[method] = DraftCosts(CostTable(points_from_json(entry["points"])), bool(entry["free"]))
            if entry["acceptance"] is not None:
                acceptance[method] = Survival(tuple(entry["acceptance"]["survival"]))
        return Profile(data, CostTable(points_from_json(data["verify"])), drafting, acceptance)
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"profile: {where} is incomplete: {error}. {again}") from None


def reject_foreign_profile(
    profile: Profile,
    where: str,
    model: Mapping[str, Any],
    hardware: Mapping[str, Any],
    versions: Mapping[str, str],
    force: bool,
) -> list[str]:
    """Check that a profile speaks of this model, this hardware and this torch.

    Args:
        profile: As read.
        where: Its file, for messages.
        model: The target's identity here, `modeling.identity.model_identity`.
        hardware: Of this machine.
        versions: Of the packages here.
        force: Use it although hardware or versions differ.

    Returns:
        Warnings: what differs although it is used.

    Raises:
        ConfigError: It was measured with another model; or on other hardware or with another torch, and not forced.
    """
    measured = profile.data["model"]
    for name in ("config_hash", "dtype"):
        if measured[name] != model[name]:
            problem = (
                f"{where} was measured with {measured['name']} ({measured['dtype']}), and the target is "
                f"{model['name']} ({model['dtype']})."
            )
            raise ConfigError("profile", problem, "name a profile of this target, or measure one: specactor profile")
    foreign = _differences("hardware", SAME_HARDWARE, profile.data["hardware"], hardware)
    foreign += _differences("version", SAME_VERSIONS, profile.data["versions"], versions)
    if foreign and not force:
        problem = f"{where} was measured elsewhere: {'; '.join(foreign)}. Its costs say little about this machine."
        raise ConfigError("profile", problem, "measure one here (specactor profile), or force it: plan_force=true.")
    warnings = [f"{where}: {difference}; used because plan_force is set" for difference in foreign]
    changed = _differences("version", ("specactor-ray", "transformers"), profile.data["versions"], versions)
    return warnings + [f"{where}: {problem}" for problem in (*changed, *disturbed(profile.data))]


def _check_entries(data: Mapping[str, Any]) -> None:
    for name, kind in _ENTRIES.items():
        if not isinstance(data.get(name), kind):
            raise InputError(f"{name} is missing, or not what it should be")
    for name in _MODEL:
        if not isinstance(data["model"].get(name), str):
            raise InputError(f"model.{name} is missing, or no text")


def _differences(what: str, names: Sequence[str], measured: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} of {name}: {measured.get(name)} there, {here.get(name)} here"
        for name in names
        if measured.get(name) != here.get(name)
    ]


def _checksum(data: Mapping[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
