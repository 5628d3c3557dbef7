"""Default size of a key/value cache, and the memory of a GPU that is left for it. All sizes are in bytes.

The figures of GPUs are conservative estimates: none has been measured.
"""

from __future__ import annotations

import functools
from typing import Any

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.machine import memory_limit
from specactor_ray.core.ragged import padded
from specactor_ray.models.loading import load_empty_model, load_model_config, parse_dtype
from specactor_ray.models.step_sizes import sizes

GIB = 2**30
BLOCK_TOKENS = {"hf": {"cpu": 16, "gpu": 256}, "vllm": {"cpu": 128, "gpu": 16}}
"""Engine → device → tokens of a block of its cache; attention kernels of vLLM may choose other sizes."""
ROW_BYTES = 64
"""On CPUs a head's numbers begin at a multiple of these bytes in the cache of `hf`."""
STATES_UNDER_WAY = 4096
"""Most positions with hidden states that are under way to a drafter, or wait in a hosted one."""
_BLOCK = 256
"""Tokens of the largest block of any engine's cache."""
_SHARE_OF_GPU = 0.92
"""Usable share of a GPU's memory, as in vLLM: the rest is for the driver and other processes."""
_GPU_FIXED = 2 * GIB
"""Bytes of context, kernels and the workspaces of attention and collectives."""
_KERNELS, _KERNEL_BYTES = 40, 4096
"""Kernels of a layer in a captured step of `hf` or a drafter, and bytes of one on the GPU."""
_SPLITS = 32
"""Parts into which FlashAttention 3 splits the keys of a captured position in vLLM; each has a float32 result."""
_VLLM_GRAPHS = 160 * 2**20
"""Bytes of vLLM's graphs: at most 80 sizes, each in one graph and in those of its layers, at its own least figure."""
_MOST_ON_CPU, _MOST_OF_A_DRAFTER = 1 * GIB, GIB // 2
_DRAFTERS_SHARE_OF_GPU = 0.1
_UNKNOWN_CONTEXT = 4096


@functools.cache
def count_parameters(name: str, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Number of parameters of a model, and its text configuration; no weight is read. Computed once per process."""
    model = load_empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config.get_text_config()


def context_of(text: Any) -> int:
    """Most tokens of a sequence of a model, by its text configuration; 0 where it has no such entry."""
    tokens = getattr(text, "max_position_embeddings", 0)
    return tokens if isinstance(tokens, int) else 0


def key_value_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def itemsize_of(target: TargetConfig) -> int:
    """Bytes per number of the target."""
    return parse_dtype(target.dtype, target.gpus > 0).itemsize


def token_bytes(text: Any, itemsize: int, ranks: int = 1, row: int = 1) -> int:
    """Bytes of keys and values of one token in all layers, on one rank; `itemsize`: bytes of a number; `row`: a head's
    numbers begin at multiples of these bytes. An upper bound where layers keep less."""
    heads = -(-key_value_heads(text) // ranks)
    return 2 * int(text.num_hidden_layers) * heads * padded(_head_dim(text) * itemsize, row)


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def cached_token_bytes(target: TargetConfig, text: Any) -> int:
    """Bytes of one token of a target in the cache of one rank, which in `hf` also keeps the exported hidden states."""
    itemsize, keeps_states = itemsize_of(target), target.backend == "hf"
    row = ROW_BYTES if keeps_states and not target.gpus else 1
    keys_and_values = token_bytes(text, itemsize, target.tensor_parallel, row)
    return keys_and_values + keeps_states * _state_bytes(target, text)


def states_beside_the_cache(target: TargetConfig, cache: float) -> float:
    """Bytes of the exported hidden states of all tokens in a cache, which `vllm` does not keep there."""
    if target.backend == "hf" or not target.hidden_layers:
        return 0.0
    _, text = count_parameters(target.model, target.trust_remote_code)
    return cache / cached_token_bytes(target, text) * _state_bytes(target, text)


def _state_bytes(target: TargetConfig, text: Any) -> int:
    return len(target.hidden_layers) * int(text.hidden_size) * itemsize_of(target)


def cache_bytes(target: TargetConfig, room: float) -> float:
    """Cache of one rank: `target.kv_cache_gb`, or the size for `max_batch` requests of full length, within `room` (see
    `room_on_cpu` and `room_on_gpu`)."""
    if target.kv_cache_gb is not None:
        return target.kv_cache_gb * GIB
    text = load_model_config(target.model, trust_remote_code=target.trust_remote_code).get_text_config()
    length = target.max_model_len or context_of(text) or _UNKNOWN_CONTEXT
    per_token = cached_token_bytes(target, text)
    one, all_of_them = (_in_blocks(length, rows) * per_token for rows in (1, target.max_batch))
    most = room if target.gpus else max(_MOST_ON_CPU, one)
    return float(min(all_of_them, most, room))


def room_on_cpu(available: float, target: TargetConfig) -> float:
    """A quarter of the `available` memory, divided among verifiers and their ranks."""
    return available / 4 / target.replicas / target.tensor_parallel


def room_on_gpu(target: TargetConfig, total: float, hosted: float = 0.0) -> float:
    """Bytes left for the cache on a GPU of `total` bytes beside `hosted` bytes of drafters; below 0 if the model does
    not fit."""
    left = usable_bytes(total) - hosted - (beside_the_cache(target) - _GPU_FIXED)
    return left / (1 + states_beside_the_cache(target, 1.0))


def usable_bytes(total: float) -> float:
    """Bytes of a GPU of `total` bytes for weights, caches and steps of a process that has it alone."""
    return _SHARE_OF_GPU * total - _GPU_FIXED


def beside_the_cache(target: TargetConfig) -> float:
    """Bytes of a rank on a GPU beside its cache: weights, logits (as computed and in float32) and activations of the
    largest step, captured steps, tables of vLLM, hidden states that drafters read on their way, and a part that does
    not depend on the model."""
    (size, text), tokens = count_parameters(target.model, target.trust_remote_code), target.max_step_tokens
    itemsize, states = itemsize_of(target), (tokens + 2 * STATES_UNDER_WAY) * _state_bytes(target, text)
    of_hf = text, itemsize, target.max_batch, tokens, tokens
    own = captured_bytes(*of_hf) if target.backend == "hf" else _runner_of_vllm(target, text, itemsize)
    step = _step_bytes(text, itemsize, tokens, tokens)
    return size * itemsize / target.tensor_parallel + step + own + states + _GPU_FIXED


def captured_bytes(text: Any, itemsize: int, rows: int, tokens: int, logits: int) -> float:
    """Bytes of the captured steps of a model on a GPU (`models/captured.py`) with up to `rows` rows and `tokens`
    tokens: the kernels of each, and activations and up to `logits` logits of the largest, in memory of all."""
    steps = sizes(rows, max(rows, tokens))
    kernels = len(steps) * int(text.num_hidden_layers) * _KERNELS * _KERNEL_BYTES
    positions = max(tokens for _, tokens in steps)
    return kernels + _step_bytes(text, itemsize, positions, min(positions, logits))


def _step_bytes(text: Any, itemsize: int, positions: int, logits: int) -> int:
    """Bytes of activations of these positions, and of the logits of some, as computed and in float32."""
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return logits * int(text.vocab_size) * (itemsize + 4) + positions * (8 * hidden + 2 * inner) * itemsize


def _runner_of_vllm(target: TargetConfig, text: Any, itemsize: int) -> float:
    """Bytes of the tables of vLLM's model runner: counts of each request's output tokens, a bit for each token of its
    prompt, and its tokens; and of graphs: activations and partial results of FlashAttention 3, of at most the positions
    of a step."""
    vocab, length = int(text.vocab_size), target.max_model_len or context_of(text) or _UNKNOWN_CONTEXT
    tables, positions = target.max_batch * (4 * vocab + 4 * -(-vocab // 32) + 4 * length), target.max_step_tokens
    if not target.compiled:
        return tables
    heads, splits = -(-int(text.num_attention_heads) // target.tensor_parallel), _SPLITS * (not target.batch_invariant)
    parts = splits * heads * (_head_dim(text) + 1) * 4
    return tables + _step_bytes(text, itemsize, positions, 0) + positions * parts + _VLLM_GRAPHS


def room_here(target: TargetConfig, hosted: float = 0.0) -> float:
    """`room_on_cpu` or `room_on_gpu` of this process's device."""
    if not target.gpus:
        return room_on_cpu(available_bytes(), target)
    return room_on_gpu(target, device_bytes(), hosted)


def drafter_cache_bytes(drafter: DrafterConfig, text: Any, itemsize: int, total: float | None) -> int:
    """Cache of a model drafter: `kv_cache_gb`, or the size for `max_batch` requests of full length, at most a tenth of
    a GPU of `total` bytes (None: on the CPU, where it is at most 0.5 GiB)."""
    if drafter.kv_cache_gb is not None:
        return int(drafter.kv_cache_gb * GIB)
    tokens = _in_blocks(context_of(text) or _UNKNOWN_CONTEXT, drafter.max_batch)
    most = _MOST_OF_A_DRAFTER if total is None else _DRAFTERS_SHARE_OF_GPU * total
    return int(min(tokens * token_bytes(text, itemsize, row=ROW_BYTES if total is None else 1), most))


def device_bytes(device: str = "cuda") -> float:
    """Memory of the first visible GPU."""
    import torch

    return float(torch.cuda.get_device_properties(device).total_memory)


def available_bytes() -> float:
    """Available memory of this machine, within the limit of its container."""
    import psutil

    limit, used = memory_limit()
    return min(float(psutil.virtual_memory().available), limit - used)


def _in_blocks(length: int, rows: int) -> int:
    """Tokens of a cache for this many rows; one block stays empty in vLLM."""
    return (rows * -(-length // _BLOCK) + 1) * _BLOCK
