"""Private parts of other packages are found in their sources, and named where they are missing."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specactor_ray.core import machine, upstream
from specactor_ray.core.upstream import Upstream

FILES = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine import Core as Kernel\n",
    "engine/__init__.py": "from .base import Base, helper\nfrom . import late\nimport os\n"
    "class Core(Base[int]):\n"
    "    limit: int = 3\n"
    "    kind = 'core'\n"
    "    def __init__(self, config):\n"
    "        self.step_fn = self.step\n"
    "        self.first, other.last = 1, 2\n"
    "    def step(self, batch, *, wait=True): ...\n",
    "engine/base.py": "class Base:\n    def close(self): ...\n"
    "    def __init__(self):\n        self.workers: list = []\n"
    "try:\n    from json import dumps as helper\nexcept ImportError:\n    pass\n",
    "engine/late.py": "async def flush(all, /): ...\n",
    "engine/broken.py": "def flush(:\n",
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        path = tmp_path / "someone_elses" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(upstream, "_missing", upstream._missing.__wrapped__)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("module", "there", "lacking"),
    [
        ("", ["engine", "Kernel"], ["late", "Core"]),
        ("engine", ["late", "Core", "step_fn", "first", "last", "limit", "kind", "os", "helper"], ["close", "early"]),
        ("engine.base", ["Base", "close", "workers", "helper"], ["dumps", "step"]),
        ("engine.late", ["flush"], ["all"]),
        ("engine.early", [], ["flush"]),
        ("engine.broken", [], ["flush"]),
    ],
)
def test_names_are_found_in_the_source_of_a_module(module: str, there: list[str], lacking: list[str]) -> None:
    path = f"someone_elses.{module}".rstrip(".")
    wanted = tuple(f"{path}.{name}" for name in (*there, *lacking))
    assert upstream._missing(wanted) == [f"{path}.{name}" for name in lacking]
    assert upstream._missing(("not_installed.engine",)) == ["not_installed.engine"]


@pytest.mark.usefixtures("sources")
def test_fields_of_a_dataclass() -> None:
    assert package("1").fields("someone_elses.engine", "Core") == ["limit"]
    assert package("1").fields("someone_elses.engine", "Base") == package("1").fields("not_installed", "Core") == []


def package(*tested: str, parts: tuple[str, ...] = ("Base", "close"), users: str = "") -> Upstream:
    names = ("someone-elses-cpu", "someone-elses")
    return Upstream("someone_elses", tested, users or "none/*.py", {"someone_elses.engine.base": parts}, names)


@pytest.mark.parametrize(
    ("tested", "is_known"),
    [(("2.1.0",), True), (("1.0", "2"), True), (("1.9", "2.1.1"), False), (("2.10",), False), (("2.1.0+cpu",), False)],
)
def test_an_untested_version_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tested: tuple[str, ...], is_known: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0+cu130"}))
    monkeypatch.setattr(machine, "_fallbacks", {})
    for _ in range(2):
        package(*tested).note_untested(logging.getLogger(__name__))
    note = f"someone-elses 2.1.0+cu130 is untested here; tested: {', '.join(tested)}"
    assert caplog.messages == ([] if is_known else [note])
    assert machine.fallbacks() == caplog.messages, "the summary has them"


@pytest.mark.usefixtures("sources")
def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0"}))
    lacking = package("2.1", parts=("close", "step", "halt")).lacking()
    core = "someone_elses.engine.base"
    assert lacking == f"someone-elses 2.1.0 has no {core}.step, {core}.halt, which this package uses"
    monkeypatch.setattr(importlib.metadata, "version", version_of({}))
    assert package("2.1").lacking() == "someone_elses is not installed"
    assert package("2.1").install == "pip install 'someone_elses==2.1.*'"


@pytest.mark.usefixtures("sources")
def test_imports_of_this_package_are_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0"}))
    monkeypatch.setattr(upstream, "_ROOT", tmp_path)
    (tmp_path / "user.py").write_text(
        "import json\ndef late():\n    from someone_elses.engine import Core, Fast\n    from json import loads\n"
    )
    lacking = package("2", parts=(), users="user.py").lacking()
    assert "has no someone_elses.engine.Fast, which" in lacking


def version_of(versions: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version
