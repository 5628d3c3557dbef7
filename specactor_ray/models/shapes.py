"""Sizes that follow from a model's configuration. No weight is read."""

from __future__ import annotations

import functools
from typing import Any

from specactor_ray.core.ragged import padded
from specactor_ray.models.loading import load_empty_model

GIB = 2**30
ROW_BYTES = 64
"""On CPUs a head's numbers begin at a multiple of these bytes in the cache of `hf`."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Data type → bytes of a number."""


@functools.cache
def count_parameters(name: str, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Number of parameters of a model, and its text configuration. Computed once per process."""
    model = load_empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config.get_text_config()


def context_of(text: Any) -> int:
    """Most tokens of a sequence of a model, by its text configuration; 0 where it has no such entry."""
    tokens = getattr(text, "max_position_embeddings", 0)
    return tokens if isinstance(tokens, int) else 0


def key_value_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def token_bytes(text: Any, itemsize: int, ranks: int = 1, row: int = 1) -> int:
    """Bytes of keys and values of one token in all layers, on one rank; `itemsize`: bytes of a number; `row`: a head's
    numbers begin at multiples of these bytes. An upper bound where layers keep less."""
    heads = -(-key_value_heads(text) // ranks)
    return 2 * int(text.num_hidden_layers) * heads * padded(head_dim(text) * itemsize, row)
