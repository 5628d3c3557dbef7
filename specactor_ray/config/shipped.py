"""Configurations and prompts of the package; in a checkout they are the files of `conf/`."""

from __future__ import annotations

import shutil
from pathlib import Path

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import make_folder

SHIPPED = Path(__file__).parents[1] / "conf"


def find_file(name: str | Path, folder: str = "") -> Path:
    """The file with this name; if it does not exist, the shipped one: `local_cpu` in `folder` of `conf`, or
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


def copy_shipped(folder: Path) -> list[Path]:
    """Copy the shipped files to `folder/conf`; returns the new files.

    Raises:
        InputError: A file exists already, or the folder cannot be written to. Nothing is copied.
    """
    sources = sorted(path for path in SHIPPED.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    targets = [folder / "conf" / source.relative_to(SHIPPED) for source in sources]
    if there := [str(target) for target in targets if target.exists()]:
        more = f" and {len(there) - 1} others" if len(there) > 1 else ""
        raise InputError(f"no file is replaced, and there is {there[0]}{more}; name another folder")
    for parent in sorted({target.parent for target in targets}):
        make_folder(parent, "DIR")
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)
    return targets
