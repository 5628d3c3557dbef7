"""Attention over pages on CPUs: all rows in one compiled call, each query alone in float32.

A query reads its keys in blocks of 64 that begin at fixed positions of its row, and every sum has one order. So the
bits of an output depend on the query and its own keys alone: not on other rows, the number of queries, the place of
pages or the threads. Threads are those of PyTorch's OpenMP pool: a pool of our own would spin against it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from specactor_ray.errors import InputError

_WORK_PER_THREAD = 200_000
"""Multiplications (queries x heads x keys x dim) from which another thread pays: some 10 us."""
_UNBOUNDED = 1 << 40

_local = threading.local()


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed rows over a paged cache; query j of n sees its row's keys [0, length - n + j].

    Args:
        query: `(N, heads, dim)` float32, bfloat16 or float16; positions behind the last row's are padding.
        keys: `(num_pages, page_size, kv_heads, dim)`, one of these dtypes, the last dimension contiguous.
        values: `(num_pages, page_size, kv_heads, value_dim)`, of the dtype of `keys`.
        pages: int32 `(rows, most pages)`: the pages of each row in the order of its keys.
        starts: int64 `(rows + 1,)`: where each row's queries begin.
        lengths: int64 `(rows,)`: keys of each row, those of its queries included.
        scaling: Factor of the scores; None takes `dim ** -0.5`.
        window: Keys that a query sees, itself included; None takes all.
        softcap: Bound c of scores, c tanh(score / c).
        sinks: `(heads,)`: an extra score per head that has no value.

    Returns:
        `(N, heads, value_dim)` in the dtype of `query`; zeros at padding.

    Raises:
        InputError: Shapes or dtypes do not fit each other.
    """
    from specactor_ray.models import _cpu_attention_numba as compiled

    tokens, heads, dim = query.shape
    page_size, kv_heads, value_dim = values.shape[1:]
    _check(query, keys, values, pages, starts, lengths)
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    pages, starts, lengths = np.ascontiguousarray(pages), np.ascontiguousarray(starts), np.ascontiguousarray(lengths)
    sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
    output = query.new_empty(tokens, heads, value_dim)
    used = int(starts[-1])
    if used < tokens:
        output[used:] = 0
    if not used:
        return output
    work = used * min(int(lengths.max()), window or _UNBOUNDED) * heads * dim
    threads = max(min(torch.get_num_threads(), 1 + work // _WORK_PER_THREAD), 1)
    scratch_bytes = compiled.scratch_bytes(dim, value_dim, heads // kv_heads)
    counters, scratch = _workspace(threads * scratch_bytes)
    size, kind = query.element_size(), keys.element_size()
    call = compiled.PACKED.pack(
        counters, scratch, scratch_bytes,
        query.data_ptr(), *(size * stride for stride in query.stride()[:2]),
        keys.data_ptr(), *(kind * stride for stride in keys.stride()[:3]),
        values.data_ptr(), *(kind * stride for stride in values.stride()[:3]),
        output.data_ptr(), _KINDS[query.dtype], _KINDS[keys.dtype],
        _address(pages), pages.shape[1], page_size, _address(starts), _address(lengths), len(lengths),
        heads, kv_heads, dim, value_dim, compiled.padded(dim), compiled.padded(value_dim),
        window or _UNBOUNDED, 0 if sinks is None else sinks.data_ptr(),
        dim**-0.5 if scaling is None else scaling, softcap or 0.0,
    )  # fmt: skip
    team = _openmp() if threads > 1 else None
    if team is None:
        compiled.attend.ctypes(call)
    else:
        team(compiled.attend.address, call, threads, 0)
    return output


_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _check(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: np.ndarray, starts: np.ndarray,
    lengths: np.ndarray,
) -> None:  # fmt: skip
    if query.dtype not in _KINDS or keys.dtype not in _KINDS or keys.dtype != values.dtype:
        raise InputError(
            f"attention on CPUs takes float32, bfloat16 and float16; query, keys and values are of {query.dtype}, "
            f"{keys.dtype} and {values.dtype}"
        )
    if keys.shape[:3] != values.shape[:3] or keys.shape[3] != query.shape[2] or query.shape[1] % keys.shape[2]:
        raise InputError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit each "
            "other"
        )
    rows = len(lengths)
    if pages.dtype != np.int32 or starts.dtype != np.int64 or lengths.dtype != np.int64:
        raise InputError("pages are int32; starts and lengths are int64")
    if len(pages) != rows or len(starts) != rows + 1 or starts[-1] > len(query):
        raise InputError(f"{len(pages)} rows of pages, {len(starts)} starts and {rows} lengths do not fit each other")
    if rows and int(lengths.max()) > pages.shape[1] * keys.shape[1]:
        raise InputError(f"a row of {lengths.max()} keys needs more than {pages.shape[1]} pages of {keys.shape[1]}")


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _workspace(size: int) -> tuple[int, int]:
    """Addresses of two zeros (int64) and of at least `size` bytes, both of the calling thread."""
    made: tuple[np.ndarray, torch.Tensor] | None = getattr(_local, "workspace", None)
    if made is None or made[1].numel() < size:
        made = _local.workspace = np.zeros(2, np.int64), torch.empty(size, dtype=torch.uint8)
    made[0].fill(0)
    return _address(made[0]), made[1].data_ptr()


@functools.cache
def _openmp() -> Callable[[int, bytes, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that PyTorch runs on; None where it is another kind of library."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"))
        team = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team
