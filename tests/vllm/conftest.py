"""Triton's interpreter, in which vLLM's CPU build runs its V2 model runner: switched on before vLLM is imported."""

from __future__ import annotations

import pytest

from specactor_ray.target.vllm_cpu import use_interpreter


@pytest.fixture(autouse=True, scope="session")
def interpreter(request: pytest.FixtureRequest) -> None:
    """Not where all tests use Ray: actors would inherit the variable, and have to set it themselves."""
    if any(item.get_closest_marker("vllm") and not item.get_closest_marker("ray") for item in request.session.items):
        use_interpreter()
