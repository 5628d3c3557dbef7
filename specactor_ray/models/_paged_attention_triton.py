"""Attention of rows of different lengths over a paged cache, in Triton.

A program of `attend` takes a tile of a row's queries, with all heads that read the same keys, over the keys of that
row: either all of them, or some splits, whose results `merge` adds. Keys are read in blocks and splits that begin at
fixed positions of the row: every `SPLIT` keys, and from 32 splits on at 16 positions in each doubling of the context.
The tile's shape depends on the data type and the heads alone. A tile that reads all keys adds its splits as `merge`
does, every operation rounded by itself (`enable_fp_fusion=False`).

So the bits of an output depend on the query and the keys that it sees only: not on other rows, the number of queries of
the row in the forward, pages, or the division of the work into programs. Queries behind the last row are those of a row
without keys.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernels run on tensors of the CPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.models.cpu_attention import AttentionRules

SPLIT = 512
"""Keys of each of the first 32 splits."""
_MOST_PARTIAL_BYTES = 128 << 20
"""Most bytes of the results of splits in a layer. Above it each program reads all keys of its queries."""
_LEAST_SHARED = 99 << 10
"""Bytes of shared memory per program on compute capability 8.6."""
_ROWS_OF_SEARCH = tl.constexpr(128)
_LOG2E = tl.constexpr(1.4426950408889634)
_warm: set[tuple[Any, ...]] = set()
"""Constants of compiled kernels."""


class Shape(NamedTuple):
    """Constants for which a layer's kernels are compiled; the first two determine the order of operations."""

    rows: int
    """Rows of a tile: queries times the heads that read the same keys."""
    block: int
    """Number of keys that are read at once."""
    num_warps: int
    num_stages: int


@functools.cache
def shape_of(itemsize: int, key_dim: int, value_dim: int, group: int, page_size: int, shared_memory: int) -> Shape:
    """The shape of a layer's tiles; `group`: query heads that read the same keys; sizes in bytes, numbers and tokens.

    Raises:
        ModelLoadError: The kernels do not support such a layer.
    """
    columns = _padded(key_dim), _padded(value_dim)
    widest = max(columns)
    if widest > 256 or group > 128 or page_size % 16:
        raise ModelLoadError(
            f"attention on GPUs takes heads of at most 256 numbers, at most 128 heads that share keys, and pages of a "
            f"multiple of 16 tokens; this model has {max(key_dim, value_dim)}, {group} and {page_size}"
        )
    half = itemsize == 2
    rows = max(64 if half else 16, triton.next_power_of_2(group))
    block = math.gcd(64 if half and widest <= 128 else 32, page_size)
    taken = itemsize * (rows * columns[0] + 3 * block * sum(columns))
    return Shape(rows, block, 8 if widest > 128 or rows > 64 else 4, 3 if taken <= shared_memory else 2)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    most_queries: int,
    most_keys: int,
    rules: AttentionRules,
    programs: int | None = None,
) -> torch.Tensor:
    """`cpu_attention.attend_pages` on GPUs. Nothing waits for the device; a CUDA graph can hold the call.

    Args:
        starts: int32 `(rows + 1,)`: where the queries of each row begin.
        lengths: int32 `(rows,)`: keys of each row; its queries are at the last ones.
        pages: int32 `(rows, most pages)`: pages of each row.
        most_queries, most_keys: Most queries and most keys of a row, or more.
        programs: Most programs that share the splits of a tile; None: as many as keep the device busy. The bits do
            not depend on it.

    Returns:
        `(N, heads, value_dim)`; 0 after the last row.

    Raises:
        ModelLoadError: See `shape_of`.
    """
    tokens, heads, key_dim = query.shape
    _, page_size, kv_heads, value_dim = values.shape
    rows, group = len(lengths), heads // kv_heads
    most_programs, shared_memory = _limits(query.device)
    shape = shape_of(keys.itemsize, key_dim, value_dim, group, page_size, shared_memory)
    tile_of: dict[str, Any] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "VALUE_DIM": value_dim, "SPLIT": SPLIT, "ROWS": shape.rows,
        "BLOCK": shape.block, "VALUE_PAD": _padded(value_dim), "WINDOW": rules.window or 0, "enable_fp_fusion": False,
    }  # fmt: skip
    layer: dict[str, Any] = {
        "KEY_DIM": key_dim, "KEY_PAD": _padded(key_dim), "PAGE": page_size, "SOFTCAP": rules.softcap or 0.0,
        "num_warps": shape.num_warps, "num_stages": shape.num_stages,
    }  # fmt: skip
    tile = shape.rows // group
    searched, splits = int(most_queries > tile), splits_of(most_keys)
    tiles = kv_heads * (rows + tokens // tile + 1 if searched else rows)
    if programs is None:
        few = 4 * splits * tokens * heads * value_dim <= _MOST_PARTIAL_BYTES
        programs = max(most_programs // tiles, 1) if few else 1
    output = query.new_empty(tokens, heads, value_dim)
    inputs = (query.contiguous(), keys, values, starts, lengths, pages, rules.sinks)
    numbers = (searched, rows, tokens, splits, pages.shape[1], rules.scaling)
    kernels = (query.device, query.dtype, rules.sinks is None or rules.sinks.dtype, *layer.values(), *tile_of.values())
    if not searched:
        tiles += kv_heads * triton.cdiv(tokens, tile)  # behind the last row
    if kernels not in _warm:  # compiles both variants now, not in a later step
        for either in (1, 2):
            _launch(tiles, either, inputs, output, numbers, layer, tile_of)
        _warm.add(kernels)
    _launch(tiles, min(programs, splits), inputs, output, numbers, layer, tile_of)
    return output


def _launch(
    tiles: int, programs: int, inputs: Any, output: torch.Tensor, numbers: Any, layer: dict[str, Any],
    tile_of: dict[str, Any],
) -> None:  # fmt: skip
    if programs == 1:
        attend[tiles, 1](*inputs, output, None, *numbers, WHOLE=True, **layer, **tile_of)
        return
    (_, _, _, starts, lengths, _, sinks), (searched, rows, tokens, splits, *_) = inputs, numbers
    sums = output.new_empty(2, splits, *output.shape[:2], dtype=torch.float32)
    partial = output.new_empty(splits, *output.shape, dtype=torch.float32)
    attend[tiles, programs](*inputs, partial, sums, *numbers, WHOLE=False, **layer, **tile_of)
    merge[tiles,](partial, sums, starts, lengths, sinks, output, searched, rows, tokens, splits, **tile_of)


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Number of programs that keep a device busy, two per multiprocessor; most bytes of shared memory per program."""
    if device.type != "cuda":
        return 1, _LEAST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return 4 * properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED)


def splits_of(keys: int) -> int:
    """Number of splits of a row with `keys` keys."""
    unit = max(keys - 1, 0) // SPLIT
    doubled = max(unit.bit_length() - 5, 0)
    return (unit >> doubled) + 16 * doubled + 1


def _padded(dim: int) -> int:
    """The next number of columns that a tile can have."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def _split_of(key, SPLIT: tl.constexpr):
    """The split of a key: the first bits of a float, exponent and mantissa, count those of each doubling."""
    unit = key // SPLIT
    bits = unit.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(unit < 16, unit, (bits >> 19) - ((127 + 4 - 1) << 4))


@triton.jit
def _begin_of(split, SPLIT: tl.constexpr):
    doubled = tl.maximum(split // 16, 1) - 1
    return ((split - 16 * doubled) << doubled) * SPLIT


@triton.jit
def _tile(
    starts, lengths, searched, rows, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The tile of a program.

    Args:
        searched: 0 if each row has one tile, in order; those of the queries behind the last row come after them.

    Returns:
        Row; head of its keys; whether there is a tile; begin (of a block) and end of its keys, which is 0 or less if
        there are none; the first split, and the one behind the last; per row of the tile the position of its query,
        and its place in `(N, heads)`, -1 for none.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    tile, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    row = tl.minimum(tile, rows)
    before = (tile - row) * QUERIES
    if searched > 0:  # the first tile of row r is `starts[r] // QUERIES + r`
        found = 0
        for begin in range(0, rows + 1, _ROWS_OF_SEARCH):
            r = begin + tl.arange(0, _ROWS_OF_SEARCH)
            first = tl.load(starts + r, mask=r <= rows, other=0) // QUERIES + r
            found += tl.sum(((first <= tile) & (r <= rows)).to(tl.int32))
        row = found - 1
        before = (tile - tl.load(starts + row) // QUERIES - row) * QUERIES
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1, mask=row < rows, other=tokens) - start
    cached = tl.load(lengths + row, mask=row < rows, other=0) - count
    m = tl.arange(0, ROWS)
    query = before + m // GROUP
    at = (start + query).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    at = tl.where((m < QUERIES * GROUP) & (query < count), at, -1)
    begin, end = 0, cached + tl.minimum(before + QUERIES, count)
    if WINDOW > 0:
        begin = tl.maximum(cached + before + 1 - WINDOW, 0) // BLOCK * BLOCK
    last = tl.where(end > 0, _split_of(tl.maximum(end, 1) - 1, SPLIT) + 1, 0)
    return row, kv_head, before < count, begin, end, _split_of(begin, SPLIT), last, cached + query, at


@triton.jit
def _add(total, top, mass, more, more_top, more_mass):
    """Merge sums of weighted values, largest scores and sums of weights over two sets of keys."""
    highest = tl.maximum(top, more_top)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    kept, new = tl.exp2(top - base), tl.exp2(more_top - base)
    return total * kept[:, None] + more * new[:, None], highest, mass * kept + more_mass * new


@triton.jit
def _nothing(sinks, at, HEADS: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Sums before the first key: those of the sinks, if there are any."""
    top, mass = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + at % HEADS, mask=at >= 0, other=0.0).to(tl.float32) * _LOG2E
        mass += 1.0
    return tl.zeros([ROWS, VALUE_PAD], tl.float32), top, mass


@triton.jit
def _store(output, total, mass, at, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr):
    d = tl.arange(0, VALUE_PAD)
    result = total / tl.where(mass == 0, 1.0, mass)[:, None]
    mask = (at >= 0)[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(output + at[:, None] * VALUE_DIM + d[None, :], result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _split(
    q, position, keys, values, table, kv_head, split, begin, last, scale,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Sums over the keys of a split that lie between `begin` and `last`."""
    begin, end = tl.maximum(begin, _begin_of(split, SPLIT)), tl.minimum(last, _begin_of(split + 1, SPLIT))
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "ieee"
    n, k_dim, v_dim = tl.arange(0, BLOCK), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    k_at = n[:, None] * (KV_HEADS * KEY_DIM) + (kv_head * KEY_DIM + k_dim)[None, :]
    v_at = n[:, None] * (KV_HEADS * VALUE_DIM) + (kv_head * VALUE_DIM + v_dim)[None, :]
    total, mass = tl.zeros([ROWS, VALUE_PAD], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    page = tl.load(table + begin // PAGE, mask=begin < end, other=0)
    for first in range(begin, end, BLOCK):
        slot = page.to(tl.int64) * PAGE + first % PAGE
        page = tl.load(table + (first + BLOCK) // PAGE, mask=first + BLOCK < end, other=0)  # of the next block
        key = first + n
        exists = (key < last)[:, None]
        k_mask = exists if KEY_DIM == KEY_PAD else exists & (k_dim < KEY_DIM)[None, :]
        k = tl.load(keys + slot * (KV_HEADS * KEY_DIM) + k_at, mask=k_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            score = 1.0 - 2.0 / (tl.exp2(score * (scale * (2.0 / SOFTCAP * _LOG2E))) + 1.0)
            score = score * (SOFTCAP * _LOG2E)
        else:
            score = score * (scale * _LOG2E)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, -float("inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weight, kept = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        v_mask = exists if VALUE_DIM == VALUE_PAD else exists & (v_dim < VALUE_DIM)[None, :]
        v = tl.load(values + slot * (KV_HEADS * VALUE_DIM) + v_at, mask=v_mask, other=0.0)
        total = tl.dot(weight.to(v.dtype), v, total * kept[:, None], input_precision=PRECISION)
        mass = mass * kept + tl.sum(weight, 1)
        top = highest
    return total, top, mass


@triton.jit(
    do_not_specialize=["searched", "rows", "tokens", "splits", "columns"],
    do_not_specialize_on_alignment=["starts", "lengths", "pages"],
)
def attend(
    query, keys, values, starts, lengths, pages, sinks, output, sums, searched, rows, tokens, splits, columns, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, 1) if `WHOLE`, and `output` `(N, heads, value_dim)`. Else (tiles, programs) and

    output: float32 `(splits, N, heads, value_dim)`, sums of weighted values.
    sums: `(2, splits, N, heads)`, largest scores (in bits) and sums of weights.
    """
    row, kv_head, exists, begin, end, first, last, position, at = _tile(
        starts, lengths, searched, rows, tokens, HEADS, KV_HEADS, ROWS, BLOCK, SPLIT, WINDOW
    )
    if not WHOLE:
        first += tl.program_id(1)
        exists = exists & (first < last)
    if exists:
        d = tl.arange(0, KEY_PAD)
        mask = (at >= 0)[:, None] & (d < KEY_DIM)[None, :]
        q = tl.load(query + at[:, None] * KEY_DIM + d[None, :], mask=mask, other=0.0)
        table = pages + row.to(tl.int64) * columns
        if WHOLE:
            total, top, mass = _nothing(sinks, at, HEADS, VALUE_PAD, ROWS)
        for split in range(first, last, tl.num_programs(1)):
            more, more_top, more_mass = _split(
                q, position, keys, values, table, kv_head, split, begin, end, scale, KV_HEADS, KEY_DIM, VALUE_DIM,
                KEY_PAD, VALUE_PAD, PAGE, WINDOW, SOFTCAP, ROWS, BLOCK, SPLIT,
            )  # fmt: skip
            if WHOLE:
                total, top, mass = _add(total, top, mass, more, more_top, more_mass)
            else:
                stride, v = tokens.to(tl.int64) * HEADS, tl.arange(0, VALUE_PAD)
                place = split * stride + at
                summed = ((more_mass != 0) & (at >= 0))[:, None] & (v < VALUE_DIM)[None, :]
                tl.store(output + place[:, None] * VALUE_DIM + v[None, :], more, mask=summed)
                tl.store(sums + place, more_top, mask=at >= 0)
                tl.store(sums + splits * stride + place, more_mass, mask=at >= 0)
        if WHOLE:
            _store(output, total, mass, at, VALUE_DIM, VALUE_PAD)


@triton.jit(
    do_not_specialize=["searched", "rows", "tokens", "splits"], do_not_specialize_on_alignment=["starts", "lengths"]
)
def merge(
    partial, sums, starts, lengths, sinks, output, searched, rows, tokens, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,). Add the splits of each query, in order."""
    _, _, exists, _, _, first, last, _, at = _tile(
        starts, lengths, searched, rows, tokens, HEADS, KV_HEADS, ROWS, BLOCK, SPLIT, WINDOW
    )
    if exists:
        total, top, mass = _nothing(sinks, at, HEADS, VALUE_PAD, ROWS)
        d, stride = tl.arange(0, VALUE_PAD), tokens.to(tl.int64) * HEADS
        for split in range(first, last):
            place = split * stride + at
            more_top = tl.load(sums + place, mask=at >= 0, other=-float("inf"))
            more_mass = tl.load(sums + splits * stride + place, mask=at >= 0, other=0.0)
            mask = (more_mass != 0)[:, None] & (d < VALUE_DIM)[None, :]
            more = tl.load(partial + place[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0)
            total, top, mass = _add(total, top, mass, more, more_top, more_mass)
        _store(output, total, mass, at, VALUE_DIM, VALUE_PAD)
