"""The claim of a run: the same tokens as plain decoding, or the same up to near-ties."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from specactor_ray.config.load import from_mapping
from specactor_ray.core.identity import is_mixture, token_identity
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.mode import settle
from specactor_ray.startup.resolve import identity_of, start_notes


@pytest.mark.parametrize(
    ("device", "dtype", "mixture", "invariant", "holds"),
    [
        ("cpu", "float32", False, False, True),
        ("cpu", "float32", True, False, False),
        ("cpu", "float32", True, True, False),
        ("cpu", "bfloat16", False, False, True),
        ("cpu", "bfloat16", True, False, False),
        ("cpu", "float16", False, False, False),
        ("cuda", "float32", False, False, False),
        ("cuda", "bfloat16", False, True, True),
        ("cuda", "bfloat16", True, True, True),
    ],
)
def test_identity_holds_where_kernels_do_not_depend_on_the_batch(
    device: str, dtype: str, mixture: bool, invariant: bool, holds: bool
) -> None:
    found = token_identity(device, dtype, mixture, invariant)
    assert found.holds == holds and found.reason
    assert ("up to near-ties" in found.line) == (not holds)
    assert found.to_dict() == {"tokens_identical": holds, "reason": found.reason}


def test_mixtures_are_known_by_their_configuration() -> None:
    assert is_mixture({"num_local_experts": 8}) and is_mixture({"text_config": {"n_routed_experts": 64}})
    assert not is_mixture({"num_experts": None, "num_local_experts": 0})


def test_a_run_says_what_holds() -> None:
    """On CPUs a line where it does not, on GPUs always."""
    dense, mixture = LlamaConfig(), MixtralConfig()

    def found(model: Any, **target: object) -> tuple[bool, list[str]]:
        config = from_mapping({"mode": "plain", "target": {"model": "m", "cores": 1, **target}})
        config, _ = settle(config, Machine(1), None)
        identity = identity_of(config.target, model)
        return identity.holds, [note for note in start_notes(config, Machine(1), identity) if "plain decoding" in note]

    assert found(dense, dtype="float32") == (True, []) == found(dense, dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        holds, (line,) = found(mixture, dtype=dtype)
        assert not holds and f"mixture of experts in {dtype}" in line
    holds, (line,) = found(dense, dtype="float32", backend="vllm")
    assert not holds and "vllm's kernels on CPUs" in line
    holds, (line,) = found(mixture, gpus=1)
    assert not holds and "number of rows" in line
    holds, (line,) = found(mixture, gpus=1, backend="vllm", batch_invariant=True)
    assert holds and "one by one" in line
