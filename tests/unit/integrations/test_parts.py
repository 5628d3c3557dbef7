"""Versions of TRL and verl: an untested one is named, one without a part that is used is refused by its name."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import pytest

from specactor_ray.core import machine, upstream
from specactor_ray.core.errors import InputError
from specactor_ray.core.upstream import TRL, VERL, VLLM
from specactor_ray.integrations.trl import attach
from tests.refused import refused


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is missing in all packages, which are installed in version 7.0.0."""
    found: list[str] = []
    monkeypatch.setattr(machine, "_fallbacks", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "7.0.0")
    monkeypatch.setattr(upstream, "_missing", lambda wanted: found)
    return found


@pytest.mark.parametrize(
    ("package", "folder"),
    [(VLLM, "target"), (TRL, "integrations"), (VERL, "integrations")],
    ids=lambda one: getattr(one, "name", one),
)
def test_all_that_imports_a_package_is_looked_at(package: upstream.Upstream, folder: str) -> None:
    imports = re.compile(rf"^ *(from|import) {package.name}\b", re.MULTILINE)
    root = Path(upstream.__file__).parents[1]
    importing = {path for path in (root / folder).glob("*.py") if imports.search(path.read_text())}
    assert importing and importing <= {*root.glob(package.users)}


def test_trl(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # it is imported after the check, and takes seconds
    with pytest.raises(ImportError):
        attach(None, None)
    assert machine.fallbacks() == ["trl 7.0.0 is untested here; tested: 1.16"]
    missing.append("trl.GRPOTrainer.vllm_mode")
    with pytest.raises(InputError, match=r"trl\.GRPOTrainer\.vllm_mode.* Fix: .*'trl==1\.16\.\*'"):
        attach(None, None)


def test_a_verl_without_a_part_is_named_in_the_log(missing: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Since verl hides what its plugins raise."""
    missing.append("verl.workers.rollout.replica.RolloutMode.HYBRID")
    with refused("actor_rollout_ref.rollout.name", "7.0.0", "RolloutMode.HYBRID") as error:
        runpy.run_module("specactor_ray.integrations.verl")
    assert caplog.messages == [str(error.value)] and "'verl==0.9.*'" in error.value.fix
