"""Attention over packed rows of different lengths, registered with transformers' AttentionInterface.

The positions of all rows are concatenated into one sequence `(1, N)`: linear layers, norms and embeddings see no
padding. Only attention must distinguish rows: the model is called with `ragged_batch=RaggedBatch(...)`, which
transformers passes to this function in every layer. Nothing here waits for the device.

One call serves all rows and reads the pages in place: compiled by numba on CPUs, by Triton on GPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from specactor_ray.core.device import to_device
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.ragged import begins
from specactor_ray.models.cpu_attention import AttentionRules, HeadNorms, PageRows, Rotary, attend_pages, store_pages
from specactor_ray.models.paged_cache import LayerShape, PagedCache

ATTENTION_NAME = "specactor_ragged"
MASKED_NAME = "specactor_ragged_masked"
"""The same attention, with the masks of layers, whose windows it records (`ShapeProbe`)."""
_OTHER = -1
_FEW = 64
"""Positions at which a mask without a window is evaluated."""


class RaggedBatch:
    """The rows of one forward. Its arrays are made once, and are copied to the device at once.

    Args:
        cache: Cache of the model.
        rows: int `(n,)`, each with room for its new tokens.
        counts: int64 `(n,)` new tokens of each row, at least 1.
        arrays: Further arrays that the forward needs on the device.

    Raises:
        ValueError: A row has no room and would write into pages of other rows.
    """

    def __init__(self, cache: PagedCache, rows: np.ndarray, counts: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        self.cache, self.counts = cache, counts
        self.rules: AttentionRules | None = None
        """Rules of the layer whose attention ran last."""
        cached = cache.lengths[rows]
        self.starts = begins(counts)
        """int64 `(n + 1,)`: begin of each row's queries."""
        self.lengths = cached + counts
        """int64 `(n,)`: keys of each row."""
        if (self.lengths > cache.room(rows)).any():
            raise ValueError("a row has no room for its new tokens; reserve it first")
        self.pages = cache.page_table(rows, self.lengths)
        """int32 `(n, most pages)`: pages of each row."""
        self.num_tokens = int(self.starts[-1])
        self.most_queries, self.most_keys = int(counts.max()), int(self.lengths.max())
        slots, per_row = cache.slots_of(self.pages, cached, counts), (self.starts, self.lengths, self.pages)
        on_device = to_device((slots, *arrays, *(array.astype(np.int32) for array in per_row)), cache.device)
        self.slots, self.arrays = on_device[0], on_device[1 : 1 + len(arrays)]
        self.device_starts, self.device_lengths, self.device_pages = on_device[-3:]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        rotary: Rotary | None = None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Store new keys and values, and compute attention. Shapes as in `ragged_attention`.

        Args:
            rotary: Cosines and sines `(N, angles)` for queries and keys that are not rotated yet.
            norms: Norms of heads before that; on GPUs only.
        """
        cache, self.rules = self.cache, rules
        keys, values = cache.keys[layer], cache.values[layer]
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if not attends_on_gpu(cache.device):
            store_pages(key, value, keys, values, self.slots, rotary)
            return attend_pages(query, keys, values, self.page_rows, rules, rotary)[None]
        from specactor_ray.models import _layers_triton, _paged_attention_triton

        if rotary is None:
            for pool, new in ((keys, key), (values, value)):
                pool.flatten(0, 1).index_copy_(0, self.slots, new[: self.num_tokens])
        else:
            query = _layers_triton.store_pages(query, key, value, keys, values, self.slots, rotary, norms)
        rows = self.device_starts, self.device_lengths, self.device_pages, self.most_queries, self.most_keys
        with torch.cuda.device_of(query):
            return _paged_attention_triton.paged_attention(query, keys, values, *rows, rules)[None]

    @functools.cached_property
    def page_rows(self) -> PageRows:
        """Rows and pages for attention on CPUs."""
        return PageRows(self.pages, self.starts, self.lengths)


class ShapeProbe:
    """Replaces a batch in a forward that records the shapes of all layers, and the windows of their masks."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    @staticmethod
    def record_window(module: nn.Module, mask: torch.Tensor | None) -> None:
        """Keep the window of a layer's mask, which counts, whatever the layer passes on as its window."""
        if mask is None:
            return
        if not hasattr(mask, "window"):
            raise ModelLoadError(f"{type(module).__name__} changes its attention mask, so this engine cannot serve it")
        if mask.window == _OTHER:
            raise ModelLoadError(
                f"the attention of {type(module).__name__} is not causal within a window (it sees later tokens, or "
                "those of a chunk), so this engine cannot serve it. Fix: use a model whose tokens see all tokens "
                "before them, or the last ones of these"
            )
        module.mask_window = mask.window

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    ragged_batch: RaggedBatch | ShapeProbe | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows. `query` `(1, heads, N, dim)`, `key`/`value` `(1, kv_heads, N, dim)`.

    Returns:
        `(1, N, heads, value_dim)` and None.

    Raises:
        ModelLoadError: The model does not pass its keyword arguments to attention.
    """
    if ragged_batch is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not pass keyword arguments to its attention, so this engine cannot serve it"
        )
    if isinstance(ragged_batch, ShapeProbe):
        ragged_batch.record_window(module, attention_mask)
    window: Any = module.__dict__.get("mask_window", sliding_window)
    rules = AttentionRules(1 / math.sqrt(query.shape[3]) if scaling is None else scaling, window, softcap, s_aux)
    return ragged_batch.attend(int(module.layer_idx), query, key, value, rules), None  # type: ignore[arg-type]


def attends_on_gpu(device: torch.device) -> bool:
    return device.type != "cpu"


def mask_with_window(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> torch.Tensor:
    """A mask of transformers' AttentionMaskInterface, with its `window` (int or None) as an attribute; `_OTHER` if it
    is not causal, or hides more than what is outside of one window."""
    mask, window = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool), None if use_vmap else local_size
    size = window or _FEW
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size - 1])[:, None]
    keys = torch.arange(4 * size)[None]
    expected = (keys <= queries) & (keys > queries - (window or 4 * size))
    if use_vmap or not torch.equal(mask_function(0, 0, queries, keys).expand_as(expected), expected):
        window = _OTHER
    mask.window = window  # type: ignore[attr-defined]
    return mask


def register() -> None:
    """Register `ragged_attention` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (ATTENTION_NAME, MASKED_NAME):
        AttentionInterface.register(name, ragged_attention)
    AttentionMaskInterface.register(MASKED_NAME, mask_with_window)
