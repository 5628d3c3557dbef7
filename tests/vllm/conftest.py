"""Triton's interpreter, in which vLLM's CPU build runs its V2 model runner: switched on before vLLM is imported."""

from __future__ import annotations

import pytest

from specactor_ray.target.vllm_cpu import use_interpreter


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    use_interpreter()
