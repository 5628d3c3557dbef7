"""Runs models on the CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specactor_ray.draft.eagle import proposer
from specactor_ray.models import layers, paged_cache, ragged_attention, ragged_model


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
