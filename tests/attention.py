"""Runs models on one of the ways to attend, whatever the device would take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specactor_ray.models import paged_cache, ragged_attention, ragged_model
from specactor_ray.models.ragged_attention import Attention


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Models made in here attend by `attention` in here, in layers as transformers has them."""
    layers = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal layers
        layers += 1
        return attention(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_model, "fuse", lambda *_: None)
        patch.setattr(ragged_attention, "attention_for", lambda *_: counted)
        if attention is not ragged_attention.attend_on_cpu:
            patch.setattr(paged_cache, "ROW_BYTES", 1)  # pages as on a GPU
        yield
    assert layers, "no model ran"
