"""Runs models on one of the ways to attend, whatever the device would take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specactor_ray.draft.eagle import proposer
from specactor_ray.models import layers, paged_cache, ragged_attention, ragged_model
from specactor_ray.models.ragged_attention import Attention


@contextmanager
def attending(attention: Attention, fused: bool = False) -> Iterator[None]:
    """Models made in here attend by `attention` in here, in layers as transformers has them, or fused as on GPUs."""
    ran = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal ran
        ran += 1
        return attention(*args)

    with pytest.MonkeyPatch.context() as patch:
        if fused:
            from specactor_ray.models import _layers_triton

            patch.setattr(layers, "operators", lambda *_: _layers_triton)
            for module in (ragged_model, proposer):
                patch.setattr(module, "can_pack", lambda *_: False)
        else:
            for module in (ragged_model, proposer):
                patch.setattr(module, "fuse", lambda *_: None)
        patch.setattr(ragged_attention, "attention_for", lambda *_: counted)
        if attention is not ragged_attention.attend_on_cpu:
            patch.setattr(paged_cache, "ROW_BYTES", 1)  # pages as on a GPU
        yield
    assert ran, "no model ran"
