"""Packed rows on their way to the attention kernels: nothing in a layer waits for the device.

The kernels: `test_cpu_attention.py`, `interpreted_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specactor_ray.models import layers
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.ragged_model import RaggedModel
from tests.attention import attending_on_gpu
from tests.tiny import tiny_target

CPU = torch.device("cpu")


def load(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=dtype)


class Watch(TorchDispatchMode):
    """Operators by name; those that copy from the device, or are as long as a tensor's values say, are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_values = name in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "repeat_interleave",
            "bincount",
            "unique2",
        )
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        assert not by_values and not by_mask, f"{name} waits for the device"
        assert name not in ("lift_fresh", "_to_copy"), f"{name} makes a tensor"
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


class NoHost(TorchFunctionMode):
    """Nothing goes to the host or comes from there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in (
            "item", "tolist", "numpy", "cpu", "to", "cuda", "from_numpy", "tensor", "as_tensor", "__bool__", "__int__",
            "__float__", "__index__",
        ), f"{func.__name__} waits for the device"  # fmt: skip
        return func(*args, **(kwargs or {}))


class NoKernel:
    """Takes the place of a Triton kernel; nothing runs."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run as on GPUs, but for attention, norms, gates and rotation."""
    kernels = {
        "_paged_attention_triton": ("attend", "merge"),
        "_layers_triton": ("norm_rows", "gate_rows", "store_heads"),
    }
    for module, names in kernels.items():
        owner = pytest.importorskip(f"specactor_ray.models.{module}", reason="needs triton")
        for name in names:
            monkeypatch.setattr(owner, name, NoKernel())
    monkeypatch.setattr(layers, "_agrees", lambda *_: True)
    monkeypatch.setattr(RaggedModel, "_check", lambda *_: None)


def test_nothing_in_a_layer_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    seen: list[set[str]] = []

    def watched(batch: RaggedBatch, layer: int, *arguments: Any) -> torch.Tensor:
        with Watch() as watch, NoHost():
            output = attend(batch, layer, *arguments)
        seen.append(watch.seen)
        return output

    def watched_whole(batch: RaggedBatch, *arrays: torch.Tensor) -> torch.Tensor:
        with Watch():
            return run(batch, *arrays)

    with attending_on_gpu(fused=True):
        model = RaggedModel(load(torch.float32), 8 << 20)
        attend, run = RaggedBatch.attend, model._run
        monkeypatch.setattr(RaggedBatch, "attend", watched)
        monkeypatch.setattr(model, "_run", watched_whole)
        rows = np.array([model.cache.open(100) for _ in range(3)])
        for counts in (np.array([70, 3, 1]), np.array([1, 2, 1])):
            model.forward(rows, counts, np.ones(counts.sum(), np.int64), np.ones(3, np.int64))
    assert len(seen) == 2 * len(model.cache.keys) and all("new_empty" in one for one in seen)
