"""Runs models on the CPU as on a GPU, and watches what would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specactor_ray.draft.eagle import proposer
from specactor_ray.models import layers, paged_cache, ragged_attention, ragged_model
from specactor_ray.models.ragged_model import RaggedModel


@contextmanager
def attending_on_gpu(fused: bool = False) -> Iterator[None]:
    """Models made in here attend by the kernels of GPUs in here, in layers as transformers has them, or fused."""
    from specactor_ray.models import _layers_triton, _paged_attention_triton

    ran, attention = 0, _paged_attention_triton.paged_attention

    def counted(*args: Any) -> torch.Tensor:
        nonlocal ran
        ran += 1
        return attention(*args)

    with pytest.MonkeyPatch.context() as patch:
        for module in (ragged_model, proposer):
            if fused:
                patch.setattr(module, "can_pack", lambda *_: False)
            else:
                patch.setattr(module, "fuse", lambda *_: None)
        if fused:
            patch.setattr(layers, "operators", lambda *_: _layers_triton)
        patch.setattr(ragged_attention, "attends_on_gpu", lambda _: True)
        patch.setattr(_paged_attention_triton, "paged_attention", counted)
        patch.setattr(paged_cache, "ROW_BYTES", 1)  # pages as on a GPU
        yield
    assert ran, "no model ran"


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
