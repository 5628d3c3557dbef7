"""Peak of live tensors of one forward and backward: what the plan says, whatever the vocabulary."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specactor_ray.learner import engine
from specactor_ray.learner.batching import Sample, collate
from specactor_ray.learner.engine import PolicyModel
from specactor_ray.models.loading import recompute_layers
from specactor_ray.models.packed_attention import PACKED_NAME, register
from specactor_ray.trainer.run import activation_bytes
from tests.families import make_model

torch.set_num_threads(1)
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"num_hidden_layers": 4},
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "num_hidden_layers": 3, "vocab_size": 2048,
    },
}  # fmt: skip


class Peak(TorchDispatchMode):
    """Counts bytes of storages that are made inside and alive; `highest` is their peak."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive = dict.fromkeys((one.untyped_storage()._cdata for one in known), 0)
        self.now = self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.highest = max(self.highest, self.now)
                weakref.finalize(storage, self._end, storage._cdata)
        return found

    def _end(self, key: int) -> None:
        self.now -= self._alive.pop(key)


@functools.cache
def peak(shape: str, packed: bool, recomputed: bool, tokens: int, vocab_size: int = 0) -> tuple[float, Any]:
    """Measured peak, and the configuration of the model."""
    sizes = {**SHAPES[shape], **({"vocab_size": vocab_size} if vocab_size else {})}
    model = make_model("llama", sizes=sizes).requires_grad_(True)
    register()
    model.set_attn_implementation(PACKED_NAME if packed else "sdpa")
    if recomputed:
        recompute_layers(model)
    policy, half = PolicyModel(model), tokens // 2 - 4
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lengths = [half, half] if packed else [half, half - 1]
    samples = [
        Sample(np.full(4, 5), np.full(n, 6), np.zeros(n, np.float32), 1.0, 1.0, np.ones(n, np.bool_)) for n in lengths
    ]
    known = [one for parameter in policy.parameters() for one in (parameter, parameter.grad) if one is not None]
    with Peak(known) as counted:
        policy(collate(samples, range(2)), -(-tokens // engine.CHUNK_TOKENS)).logprobs.sum().backward()
    return counted.highest, model.config


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_what_is_measured(
    shape: str, packed: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CHUNK_TOKENS", 64)
    found, config = peak(shape, packed, recomputed, 256)
    assert activation_bytes(config, 256, recomputed) == pytest.approx(found, rel=0.15)


def test_the_peak_does_not_grow_with_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk has four arrays of logits, and the output layer two gradients; all logits at once are 16 and more."""
    monkeypatch.setattr(engine, "CHUNK_TOKENS", 64)
    small, large = (peak("tiny", True, False, 1024, vocab)[0] for vocab in (96, 8096))
    assert large - small < 4 * 8000 * (5 * 64 + 3 * 64)
