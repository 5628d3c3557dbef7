"""Sizes that follow from a model's configuration, its identity, and sizes of steps. No weight is read."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from specactor_ray.core.files import expanded
from specactor_ray.core.ragged import padded
from specactor_ray.models.checkpoint_files import read_config
from specactor_ray.models.loading import load_empty_model, load_model_config

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


_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


def model_identity(name: str, dtype: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Identity of a model in recorded files: name, data type, and a hash of its configuration (its shape, not its
    weights: those change in training). Raises ModelLoadError if there is no such model."""
    path = expanded(name) / "config.json"
    if path.is_file():
        config = read_config(path.parent)
    else:
        config = load_model_config(name, trust_remote_code=trust_remote_code).to_dict()
    for key in _NOT_THE_MODEL:
        config.pop(key, None)
    canonical = json.dumps(config, sort_keys=True, default=str)
    return {"name": name, "dtype": dtype, "config_hash": hashlib.sha256(canonical.encode()).hexdigest()[:16]}


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


# ---- captured steps (`captured.py`) ----

_ROWS = (1, 4, 16, 32, 64, 128, 256)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Sizes of steps. Padding to 128 tokens costs little: all weights are read. Launches of larger steps cost little."""


def longest_tail(rows: int) -> int:
    """Most draft tokens of a row in steps of `rows` rows."""
    return max(16, 128 // rows)


def step_sizes(rows: int, tokens: int) -> list[tuple[int, int]]:
    """(R, N) of the steps for up to `rows` rows with up to `tokens` tokens, the smallest first."""
    most = {r: min(r * (1 + longest_tail(r)), tokens, _TOKENS[-1]) for r in (*(r for r in _ROWS if r < rows), rows)}
    return [(r, n) for r, end in most.items() for n in sorted({r, end, *(n for n in _TOKENS if r < n < end)})]
