"""The compiled half of `cpu_attention`: attention of queries that share their keys, block by block.

The order of operations below is the order of the bits (see `lanes`). All addresses and strides are in bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np

from specactor_ray.jit import c_function, kernel
from specactor_ray.models import _lanes_numba, lanes
from specactor_ray.models._lanes_numba import SIZE, exp, narrow, rotate, tanh, widen
from specactor_ray.models.lanes import (
    LANES,
    add,
    divide,
    first_lane,
    float32_at,
    int32_at,
    int64_at,
    largest,
    load,
    maximum,
    multiply,
    set_float32,
    splat,
    store,
    strip1,
    strip2,
    strip3,
    strip4,
    subtract,
    take_ticket,
    total,
    transpose,
    within,
)
from specactor_ray.models.openmp import padded

BLOCK = 64
"""Keys between two rescalings of a query's sums."""
TILE = 32
"""Rows (positions times heads of a group) that share what is loaded of a block."""
_jit: Any = kernel(sources=[lanes, _lanes_numba])


@_jit
def _add_product(a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, rows: Any, columns: Any,
                 first: Any, end: Any) -> None:  # fmt: skip
    """c[r][x] += a[r][t] b[t][x], fused, in the order of t in [first, end). `columns` is a multiple of 16."""
    while rows >= 4:
        strip4(a, a_stride, b, b_stride, c, c_stride, columns, first, end)
        a, c, rows = a + 4 * a_stride, c + 4 * c_stride, rows - 4
    if rows == 3:
        strip3(a, a_stride, b, b_stride, c, c_stride, columns, first, end)
    elif rows == 2:
        strip2(a, a_stride, b, b_stride, c, c_stride, columns, first, end)
    elif rows == 1:
        strip1(a, a_stride, b, b_stride, c, c_stride, columns, first, end)


# --- attention --------------------------------------------------------------------------------------------------

_FIELDS = (
    "counters", "scratch", "scratch_bytes", "query", "query_token", "query_head", "keys", "key_page", "key_slot",
    "key_head", "values", "value_page", "value_slot", "value_head", "output", "query_kind", "kind", "pages",
    "page_columns", "page_size", "starts", "lengths", "rows", "heads", "kv_heads", "dim", "value_dim", "width",
    "value_width", "window", "sinks", "cos", "sin", "angle_token", "angle_kind", "angles",
)  # fmt: skip
CALL = np.dtype([*((name, np.int64) for name in _FIELDS), ("scaling", np.float32), ("softcap", np.float32)])
"""What a call is given: addresses, strides in bytes and sizes; `sinks` and `softcap` are 0 without any.

`counters`: two int64 zeros, the next task and the next part of the scratch. `output` is contiguous. `width` and
`value_width`: `padded` dims. `cos` and `sin`: `angles` numbers for each token that rotate its queries; none at 0.
"""
PACKED = struct.Struct(f"={len(_FIELDS)}q2f")
"""`CALL` as bytes."""


def scratch_bytes(dim: int, value_dim: int, group: int) -> int:
    """Bytes that a thread works in."""
    rows = max(TILE, group)
    floats = rows * padded(dim) + 2 * padded(dim) * BLOCK
    floats += BLOCK * padded(value_dim) + rows * BLOCK + rows * padded(value_dim) + 2 * rows + LANES + 2 * padded(dim)
    return 4 * padded(floats)


@_jit
def _weigh(scores: Any, first: Any, end: Any, scaling: Any, softcap: Any, top: Any) -> Any:
    """Scores of the keys [first, end) of a block become weights exp(score - base); returns (top, base, their sum)."""
    best, begin = splat(np.float32(-np.inf)), first // LANES * LANES
    for i in range(begin, end, LANES):
        x = multiply(load(scores + 4 * i), splat(scaling))
        if softcap > np.float32(0):
            x = multiply(tanh(divide(x, splat(softcap))), splat(softcap))
        x = within(x, first - i, end - i)
        store(x, scores + 4 * i)
        best = maximum(best, x)
    top = max(top, largest(best))
    base = top if top > np.float32(-np.inf) else np.float32(0)
    sums = splat(np.float32(0))
    for i in range(begin, end, LANES):
        x = exp(subtract(load(scores + 4 * i), splat(base)))
        store(x, scores + 4 * i)
        sums = add(sums, x)
    return top, base, total(sums)


@_jit
def _scale(target: Any, columns: Any, factor: Any) -> None:
    for i in range(0, columns, LANES):
        store(multiply(load(target + 4 * i), splat(factor)), target + 4 * i)


@_jit
def _clear(target: Any, floats: Any) -> None:
    for i in range(0, floats, LANES):
        store(splat(np.float32(0)), target + 4 * i)


@_jit
def _load_block(call: Any, row: Any, head: Any, begin: Any, count: Any, rows: Any, columns: Any, values: Any,
                spare: Any) -> None:  # fmt: skip
    """Keys [begin, begin + count) of a row and a head become columns, `(dim, 64)`; their values stay rows."""
    width, i = call.width, 0
    while i < count:
        which = (begin + i) // call.page_size
        slot = begin + i - which * call.page_size
        page, n = int32_at(call.pages, row * call.page_columns + which), min(call.page_size - slot, count - i)
        key = call.keys + page * call.key_page + slot * call.key_slot + head * call.key_head
        widen(key, call.key_slot, call.kind, n, call.dim, rows + 4 * i * width, width, spare)
        value = call.values + page * call.value_page + slot * call.value_slot + head * call.value_head
        target = values + 4 * i * call.value_width
        widen(value, call.value_slot, call.kind, n, call.value_dim, target, call.value_width, spare)
        i += n
    whole = (count + LANES - 1) // LANES * LANES
    _clear(rows + 4 * count * width, (whole - count) * width)
    for i in range(0, whole, LANES):
        for d in range(0, width, LANES):
            transpose(rows + 4 * (i * width + d), 4 * width, columns + 4 * (d * BLOCK + i), 4 * BLOCK)


@_jit
def _add_values(scores: Any, values: Any, sums: Any, width: Any, count: Any, group: Any, position: Any, window: Any,
                first: Any, end: Any) -> None:  # fmt: skip
    """Add a block's weighted values: keys [first, end) to all queries at once, each query's others in its order.

    `position`: that of the first query, from the block's begin.
    """
    if first >= end:
        first, end = np.int64(BLOCK), np.int64(BLOCK)
    for i in range(count):
        low, high = max(position + i - window + 1, 0), min(position + i + 1, first)
        if low < high:
            _add_product(scores + 4 * i * group * BLOCK, 4 * BLOCK, values, 4 * width, sums + 4 * i * group * width,
                         4 * width, group, width, low, high)  # fmt: skip
    if first < end:
        _add_product(scores, 4 * BLOCK, values, 4 * width, sums, 4 * width, count * group, width, first, end)
    for i in range(count):
        low, high = max(position + i - window + 1, end), min(position + i + 1, BLOCK)
        if low < high:
            _add_product(scores + 4 * i * group * BLOCK, 4 * BLOCK, values, 4 * width, sums + 4 * i * group * width,
                         4 * width, group, width, low, high)  # fmt: skip


@_jit
def _attend(call: Any, scratch: Any, row: Any, head: Any, first: Any, count: Any) -> None:
    """Queries [first, first + count) of a row, for all heads that share one head of the keys."""
    group = call.heads // call.kv_heads
    width, value_width, rows = call.width, call.value_width, count * group
    most = max(TILE, group)
    spare = scratch
    query = spare + 4 * LANES
    key_rows = query + 4 * most * width
    keys = key_rows + 4 * BLOCK * width
    values = keys + 4 * width * BLOCK
    scores = values + 4 * BLOCK * value_width
    sums = scores + 4 * most * BLOCK
    tops = sums + 4 * most * value_width
    totals = tops + 4 * most
    cos = totals + 4 * most
    sin = cos + 4 * width
    start = int64_at(call.starts, row)
    for i in range(rows):
        token, which = start + first + i // group, head * group + i % group
        source = call.query + token * call.query_token + which * call.query_head
        widen(source, 0, call.query_kind, 1, call.dim, query + 4 * i * width, width, spare)
        if call.angles > 0:
            if i % group == 0:
                angles = token * call.angle_token
                widen(call.cos + angles, 0, call.angle_kind, 1, call.angles, cos, width, spare)
                widen(call.sin + angles, 0, call.angle_kind, 1, call.angles, sin, width, spare)
            rotate(query + 4 * i * width, cos, sin, call.angles)
        top, weight = np.float32(-np.inf), np.float32(0)
        if call.sinks != 0:
            top, weight = float32_at(call.sinks + 4 * which), np.float32(1)
        set_float32(top, tops + 4 * i)
        set_float32(weight, totals + 4 * i)
    _clear(sums, rows * value_width)
    position = int64_at(call.lengths, row) - (int64_at(call.starts, row + 1) - start) + first
    for begin in range(max(position - call.window + 1, 0) // BLOCK * BLOCK, position + count, BLOCK):
        filled = min(BLOCK, position + count - begin)
        _load_block(call, row, head, begin, filled, key_rows, keys, values, spare)
        _clear(scores, rows * BLOCK)
        _add_product(query, 4 * width, keys, 4 * BLOCK, scores, 4 * BLOCK, rows,
                     (filled + LANES - 1) // LANES * LANES, 0, call.dim)  # fmt: skip
        shared_first, shared_end = np.int64(0), np.int64(BLOCK)
        for i in range(count):
            low = max(position + i - call.window + 1 - begin, 0)
            high = min(position + i + 1 - begin, BLOCK)
            shared_first, shared_end = max(shared_first, low), min(shared_end, high)
            if low >= high:
                continue
            for m in range(i * group, (i + 1) * group):
                old = float32_at(tops + 4 * m)
                top, base, weight = _weigh(scores + 4 * m * BLOCK, low, high, call.scaling, call.softcap, old)
                fade = first_lane(exp(splat(old - base)))
                set_float32(top, tops + 4 * m)
                set_float32(float32_at(totals + 4 * m) * fade + weight, totals + 4 * m)
                if fade != np.float32(1):
                    _scale(sums + 4 * m * value_width, value_width, fade)
        _add_values(scores, values, sums, value_width, count, group, position - begin, call.window, shared_first,
                    shared_end)  # fmt: skip
    for i in range(rows):
        token, which = start + first + i // group, head * group + i % group
        target = call.output + (token * call.heads + which) * call.value_dim * SIZE[call.query_kind]
        narrow(sums + 4 * i * value_width, float32_at(totals + 4 * i), call.query_kind, call.value_dim, target, spare)


@c_function(numba.from_dtype(CALL), sources=[lanes, _lanes_numba])
def attend(address: Any) -> None:
    """Work on a call's tasks until none is left; every thread of a team runs this. The longest tasks come first."""
    call = numba.carray(address, 1)[0]
    scratch = call.scratch + take_ticket(call.counters + 8) * call.scratch_bytes
    tile = max(TILE * call.kv_heads // call.heads, 1)
    index, wanted = np.int64(0), take_ticket(call.counters)
    for row in range(call.rows - 1, -1, -1):
        count = int64_at(call.starts, row + 1) - int64_at(call.starts, row)
        for first in range((count - 1) // tile * tile, -1, -tile):
            for head in range(call.kv_heads):
                if index == wanted:
                    _attend(call, scratch, row, head, first, min(tile, count - first))
                    wanted = take_ticket(call.counters)
                index += 1
