"""Private parts of other packages are found in their sources, and named where they are missing."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specactor_ray.core import environment, upstream
from specactor_ray.core.upstream import Sources, Upstream

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
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    for name, text in FILES.items():
        path = tmp_path / "someone_elses" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Sources("someone_elses")


@pytest.mark.parametrize(
    "part",
    [
        "engine",
        "engine.late",
        "engine.Core",
        "Kernel.step",
        "engine.Core.step(batch)",
        "engine.Core.step(wait, batch)",
        "engine.Core.__init__(config)",
        "engine.Core.step_fn",
        "engine.Core.first",
        "engine.Core.limit",
        "engine.Core.kind",
        "engine.Core.close",
        "engine.Core.workers",
        "engine.helper",
        "engine.os",
        "engine.late.flush(all)",
    ],
)
def test_what_is_there(sources: Sources, part: str) -> None:
    assert sources.has(f"someone_elses.{part}")


@pytest.mark.parametrize(
    "part",
    [
        "late",
        "engine.early",
        "engine.Base.step",
        "engine.Core.last",
        "engine.Core.step(batch, rows)",
        "engine.Core.limit(batch)",
        "engine.Core.kind.length",
        "engine.helper2",
        "engine.late.flush(some)",
    ],
)
def test_what_is_not(sources: Sources, part: str) -> None:
    assert not sources.has(f"someone_elses.{part}")
    assert not Sources("not_installed").has("not_installed.engine")


def test_fields_of_a_dataclass(sources: Sources) -> None:
    assert sources.fields("someone_elses.Kernel") == ["limit"]


def package(*tested: str, parts: tuple[str, ...] = ("step(batch)", "close")) -> Upstream:
    names = ("someone-elses-cpu", "someone-elses")
    return Upstream("someone_elses", tested, {"someone_elses.engine.Core": parts}, distributions=names)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("tested", [("2.1.0",), ("2.1",), ("1.0", "2")])
def test_a_tested_version_is_not_noted(monkeypatch: pytest.MonkeyPatch, tested: tuple[str, ...]) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0+cu130"}))
    assert package(*tested).untested() == package(*tested).lacking() == ""


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("tested", ["2.1.1", "2.10", "2.1.0.1", "2.1.0+cpu"])
def test_an_untested_version_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tested: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0"}))
    monkeypatch.setattr(environment, "_fallbacks", {})
    for _ in range(2):
        package("1.9", tested).note_untested(logging.getLogger(__name__))
    assert caplog.messages == [f"someone-elses 2.1.0 is untested here; tested: 1.9, {tested}"]
    assert environment.fallbacks() == caplog.messages, "the summary has them"


@pytest.mark.usefixtures("sources")
def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0"}))
    lacking = package("2.1", parts=("step(batch)", "step(rows)", "halt")).lacking()
    core = "someone_elses.engine.Core"
    assert lacking == f"someone-elses 2.1.0 has no {core}.step(rows), {core}.halt, which this package uses"
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
    using = Upstream("someone_elses", ("2",), {}, users=("user.py",), distributions=("someone-elses",))
    assert "has no someone_elses.engine.Fast, which" in using.lacking()


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(("body", "undefined"), [("close", ["flush"]), ("flush", []), ("flush2", ["flush"])])
def test_abstract_methods_are_defined_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, undefined: list[str]
) -> None:
    """A class that lacks one cannot be instantiated."""
    monkeypatch.setattr(importlib.metadata, "version", version_of({"someone-elses": "2.1.0"}))
    monkeypatch.setattr(upstream, "_ROOT", tmp_path)
    (tmp_path / "someone_elses" / "output.py").write_text(
        "from abc import ABC, abstractmethod\nclass Base(ABC):\n"
        "    @abstractmethod\n    def flush(self): ...\n    @abstractmethod\n    def close(self): ...\n"
        "class Output(Base):\n    def close(self): ...\n"
    )
    user = f"{body}.py"
    (tmp_path / user).write_text(
        f"from someone_elses.output import Output as _Output\nclass Own(_Output):\n    def {body}(self): ...\n"
    )
    lacking = Upstream("someone_elses", ("2",), {}, (user,), ("someone-elses",)).lacking()
    calls = "someone-elses 2.1.0 calls someone_elses.output.Output.flush, which this package does not define"
    assert lacking == (calls if undefined else "")


def version_of(versions: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version
