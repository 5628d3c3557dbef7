"""Compiled part of `cpu_attention`: attention of queries that share their keys, block by block.

The order of operations below is the order of the bits (see `lanes`). All addresses and strides are in bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np

from specactor_ray.core.jit import c_function, kernel
from specactor_ray.core.ragged import padded
from specactor_ray.models import _cpu_layers_numba as layers
from specactor_ray.models import lanes
from specactor_ray.models._cpu_layers_numba import exp, narrow, rotate, tanh, widen
from specactor_ray.models.lanes import BFLOAT16, LANES, SIZE, add_product, load, splat, store

BLOCK = 64
"""Keys between two rescalings of a query's sums."""
TILE = 32
"""Rows (queries times heads with the same keys) that share the loaded data of a block."""
_jit: Any = kernel(sources=[lanes, layers])


_FIELDS = (
    "next_task", "next_part", "scratch", "scratch_bytes", "query", "query_token", "query_head", "keys", "key_page",
    "key_slot", "key_head", "values", "value_page", "value_slot", "value_head", "output", "query_kind", "kind", "pages",
    "page_columns", "page_size", "rows", "starts", "lengths", "heads", "kv_heads", "dim", "value_dim", "width",
    "value_width", "window", "sinks", "cos", "sin", "angle_token", "angle_kind", "angles",
)  # fmt: skip
CALL = np.dtype([*((name, np.int64) for name in _FIELDS), ("scaling", np.float32), ("softcap", np.float32)])
"""Arguments of a call: addresses, strides in bytes and sizes; `sinks` and `softcap` are 0 where there are none.

Threads take the next task and a part of the scratch from the call itself. `output` is contiguous. `width` and
`value_width`: numbers of a key and of a value that are read. `cos` and `sin`: `angles` numbers per token that rotate
its queries; 0: no rotation.
"""
PACKED = struct.Struct(f"={len(_FIELDS)}q2f")
"""`CALL` as bytes."""


def scratch_bytes(width: int, value_width: int, group: int) -> int:
    """Bytes of a thread's scratch (`_parts`)."""
    rows = max(TILE, group)
    return 4 * padded(rows * (width + BLOCK + value_width + 2) + width * (BLOCK + 2))


@_jit
def _weigh(scores: Any, first: Any, end: Any, scaling: Any, softcap: Any, top: Any) -> Any:
    """Scores of the keys [first, end) of a block become weights exp(score - base); returns (top, base, their sum)."""
    best, begin = splat(-np.inf), first // LANES * LANES
    for i in range(begin, end, LANES):
        x = load(scores + 4 * i) * scaling
        if softcap > np.float32(0):
            x = tanh(x / softcap) * softcap
        x = lanes.within(x, first - i, end - i)
        store(x, scores + 4 * i)
        best = lanes.maximum(best, x)
    top = max(top, lanes.largest(best))
    base = top if top > np.float32(-np.inf) else np.float32(0)
    sums = splat(0.0)
    for i in range(begin, end, LANES):
        x = exp(load(scores + 4 * i) - base)
        store(x, scores + 4 * i)
        sums = sums + x
    return top, base, lanes.total(sums)


@_jit
def _clear(target: Any, floats: Any) -> None:
    for i in range(0, floats, LANES):
        store(splat(0.0), target + 4 * i)


@_jit
def _place(call: Any, row: Any, position: Any) -> Any:
    """(page, slot) of a row's key."""
    which = position // call.page_size
    return lanes.int32_at(call.pages, row * call.page_columns + which), position - which * call.page_size


@_jit
def _load_columns(call: Any, row: Any, head: Any, begin: Any, count: Any, columns: Any) -> None:
    """Keys [begin, begin + count) of a row and a head become columns, `(dim, 64)`, and those up to the next 16."""
    for i in range(0, count, LANES):
        page, slot = _place(call, row, begin + i)
        key = call.keys + head * call.key_head + page * call.key_page + slot * call.key_slot
        if call.kind == BFLOAT16:
            for d in range(0, call.width, 2 * LANES):
                lanes.transpose_bfloat16(key + 2 * d, call.key_slot, columns + 4 * (BLOCK * d + i), 4 * BLOCK)
        else:
            for d in range(0, call.width, LANES):
                lanes.transpose(key + 4 * d, call.key_slot, columns + 4 * (BLOCK * d + i), 4 * BLOCK)


@_jit
def _add_values(call: Any, row: Any, head: Any, begin: Any, scores: Any, sums: Any, rows: Any, first: Any,
                end: Any) -> None:  # fmt: skip
    """Add the weighted values of a block's keys [first, end)."""
    width, t = 4 * call.value_width, first
    while t < end:
        page, slot = _place(call, row, begin + t)
        n = min(call.page_size - slot, end - t)
        source = call.values + head * call.value_head + page * call.value_page + (slot - t) * call.value_slot
        add_product(scores, 4 * BLOCK, source, call.value_slot, call.kind == BFLOAT16, sums, width, rows,
                    call.value_width, t, t + n)  # fmt: skip
        t += n


@_jit
def _add_all_values(call: Any, row: Any, head: Any, begin: Any, position: Any, count: Any, scores: Any,
                    sums: Any) -> None:  # fmt: skip
    """Add a block's weighted values: those that all queries see at once, each query's others in its order."""
    group = call.heads // call.kv_heads
    stride, width = 4 * group * BLOCK, 4 * group * call.value_width
    first, end = _seen(call, begin, position + count - 1)[0], _seen(call, begin, position)[1]
    if first >= end:
        first, end = np.int64(BLOCK), np.int64(BLOCK)
    for i in range(count):
        low, high = _seen(call, begin, position + i)
        _add_values(call, row, head, begin, scores + i * stride, sums + i * width, group, low, min(high, first))
    _add_values(call, row, head, begin, scores, sums, count * group, first, end)
    for i in range(count):
        low, high = _seen(call, begin, position + i)
        _add_values(call, row, head, begin, scores + i * stride, sums + i * width, group, max(low, end), high)


@_jit
def _seen(call: Any, begin: Any, position: Any) -> Any:
    """[low, high): keys of the block at `begin` that the query at a position sees; empty where high <= low."""
    return max(position - begin - call.window + 1, 0), min(position - begin + 1, BLOCK)


@_jit
def _parts(call: Any, scratch: Any) -> Any:
    """Addresses in a thread's scratch: queries, columns of keys, scores, sums, tops and totals of scores, cosines,
    sines."""
    most = max(TILE, call.heads // call.kv_heads)
    keys = scratch + 4 * most * call.width
    scores = keys + 4 * call.width * BLOCK
    sums = scores + 4 * most * BLOCK
    tops = sums + 4 * most * call.value_width
    totals = tops + 4 * most
    cos = totals + 4 * most
    return scratch, keys, scores, sums, tops, totals, cos, cos + 4 * call.width


@_jit
def _read(call: Any, scratch: Any, row: Any, head: Any, position: Any, count: Any) -> None:
    """Add the weighted values of all keys to the sums of `count` queries, the first at a position, block by block."""
    query, keys, scores, sums, tops, totals, _, _ = _parts(call, scratch)
    group, value_width = call.heads // call.kv_heads, call.value_width
    oldest, end = max(position - call.window + 1, 0), position + count
    for begin in range(oldest // BLOCK * BLOCK, end, BLOCK):
        filled = min(BLOCK, end - begin)
        _load_columns(call, row, head, begin, filled, keys)
        _clear(scores, count * group * BLOCK)
        add_product(query, 4 * call.width, keys, 4 * BLOCK, False, scores, 4 * BLOCK, count * group,
                    (filled + LANES - 1) // LANES * LANES, 0, call.dim)  # fmt: skip
        for m in range(count * group):
            low, high = _seen(call, begin, position + m // group)
            if low >= high:
                continue
            old = lanes.float32_at(tops + 4 * m)
            top, base, weight = _weigh(scores + 4 * m * BLOCK, low, high, call.scaling, call.softcap, old)
            fade = lanes.first_lane(exp(splat(old - base)))
            lanes.set_float32(top, tops + 4 * m)
            lanes.set_float32(lanes.float32_at(totals + 4 * m) * fade + weight, totals + 4 * m)
            if fade != np.float32(1):
                for place in range(sums + 4 * m * value_width, sums + 4 * (m + 1) * value_width, 4 * LANES):
                    store(load(place) * fade, place)
        _add_all_values(call, row, head, begin, position, count, scores, sums)


@_jit
def _attend(call: Any, scratch: Any, row: Any, head: Any, first: Any, count: Any) -> None:
    """Queries [first, first + count) of a row for all heads that share one head of the keys."""
    query, _, _, sums, tops, totals, cos, sin = _parts(call, scratch)
    group, width, value_width = call.heads // call.kv_heads, call.width, call.value_width
    begin, end = lanes.int64_at(call.starts, row), lanes.int64_at(call.starts, row + 1)
    position = lanes.int64_at(call.lengths, row) - (end - begin) + first
    for i in range(count * group):
        token, which = begin + first + i // group, head * group + i % group
        source = call.query + token * call.query_token + which * call.query_head
        widen(source, call.query_kind, call.dim, query + 4 * i * width)
        if call.angles > 0:
            if i % group == 0:
                angles = token * call.angle_token
                widen(call.cos + angles, call.angle_kind, call.angles, cos)
                widen(call.sin + angles, call.angle_kind, call.angles, sin)
            rotate(query + 4 * i * width, cos, sin, call.angles)
        top, weight = np.float32(-np.inf), np.float32(0)
        if call.sinks != 0:
            top, weight = lanes.float32_at(call.sinks + 4 * which), np.float32(1)
        lanes.set_float32(top, tops + 4 * i)
        lanes.set_float32(weight, totals + 4 * i)
    _clear(sums, count * group * value_width)
    _read(call, scratch, row, head, position, count)
    for i in range(count * group):
        token, which = begin + first + i // group, head * group + i % group
        target = call.output + (token * call.heads + which) * call.value_dim * SIZE[call.query_kind]
        divisor = lanes.float32_at(totals + 4 * i)
        narrow(sums + 4 * i * value_width, divisor, call.query_kind, call.value_dim, target)


@c_function(numba.from_dtype(CALL), sources=[lanes, layers])
def attend(address: Any) -> None:
    """Run a call's tasks until none is left; every thread of a team runs this. The longest tasks come first."""
    call, tickets = numba.carray(address, 1)[0], lanes.address_of(address)
    scratch = call.scratch + lanes.take_ticket(tickets + 8) * call.scratch_bytes
    tile = max(TILE * call.kv_heads // call.heads, 1)
    index, wanted = np.int64(0), lanes.take_ticket(tickets)
    for row in range(call.rows):
        queries = lanes.int64_at(call.starts, row + 1) - lanes.int64_at(call.starts, row)
        for first in range((queries - 1) // tile * tile, -1, -tile):
            for head in range(call.kv_heads):
                if index == wanted:
                    _attend(call, scratch, row, head, first, min(tile, queries - first))
                    wanted = lanes.take_ticket(tickets)
                index += 1
