"""Configurations and prompts that come with the package; in a checkout they are the files of `conf/`."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "conf"


def find_file(name: str | Path, folder: str = "") -> Path:
    """The file of this name; where there is none, the shipped one: `local_cpu` in `folder` of `conf`, or
    `conf/prompts/demo.jsonl`."""
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    if path.parts[:1] == ("conf",):
        shipped = SHIPPED.joinpath(*path.parts[1:])
    else:
        shipped = SHIPPED / folder / f"{path}.yaml"
    return shipped if shipped.is_file() else path


def shipped_names(folder: str = "") -> list[str]:
    """Names of the shipped configurations of runs, or of the files in another folder of `conf`."""
    return sorted(path.stem for path in (SHIPPED / folder).glob("*.yaml") if path.stem != "runtime_env")
