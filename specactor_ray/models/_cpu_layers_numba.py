"""Compiled functions of rows in memory, and those of `cpu_layers`: norms, gates, storing of keys and values in pages.

All addresses and strides are in bytes. A call's sizes, addresses and strides are int64 numbers, in the order of the
first line of each function. Threads take blocks of rows by a counter, the first of these numbers; a result depends on
its own row alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from specactor_ray.core.jit import c_function, kernel
from specactor_ray.models import lanes
from specactor_ray.models.lanes import (
    BFLOAT16,
    LANES,
    SIZE,
    copy,
    float32_at,
    fma,
    load,
    load_bfloat16,
    power_of_two,
    set_float32,
    spare,
    splat,
    store,
    store_bfloat16,
    take_ticket,
    where_below,
    with_sign,
)

BLOCK = 32
"""Rows, or vectors of 16 numbers, that a thread takes at a time."""

_function: Any = c_function(types.int64, sources=[lanes])
_jit: Any = kernel((lanes,))


@_jit
def load_kind(address: Any, kind: Any) -> Any:
    if kind == BFLOAT16:
        return load_bfloat16(address)
    return load(address)


@_jit
def store_kind(value: Any, address: Any, kind: Any) -> None:
    if kind == BFLOAT16:
        store_bfloat16(value, address)
    else:
        store(value, address)


@_jit
def widen(source: Any, kind: Any, count: Any, target: Any) -> None:
    """`count` numbers of a kind become float32 numbers; zeros fill up the last 16."""
    size, whole, room = SIZE[kind], count // LANES * LANES, spare()
    for i in range(0, whole, LANES):
        store(load_kind(source + size * i, kind), target + 4 * i)
    if whole < count:
        store(splat(0.0), room)
        copy(source + size * whole, room, size * (count - whole))
        store(load_kind(room, kind), target + 4 * whole)


@_jit
def narrow(source: Any, scale: Any, kind: Any, count: Any, target: Any) -> None:
    """`count` float32 numbers, each divided by `scale`, become numbers of a kind."""
    size, whole, room = SIZE[kind], count // LANES * LANES, spare()
    for i in range(0, whole, LANES):
        store_kind(load(source + 4 * i) / scale, target + size * i, kind)
    if whole < count:
        store_kind(load(source + 4 * whole) / scale, room, kind)
        copy(room, target + size * whole, size * (count - whole))


@_jit
def exp(x: Any) -> Any:
    """exp of x <= 0, relative error below 2e-7; 0 under e^-87, NaN of NaN."""
    shift = splat(1.5 * 2.0**23 + 127)
    shifted = fma(x, splat(1.4426950408889634), shift)  # log2(e)
    k = shifted - shift
    r = fma(k, splat(-0.693359375), x)  # log(2) in two parts
    r = fma(k, splat(2.12194440e-4), r)
    p = splat(1 / 5040)
    p = fma(p, r, splat(1 / 720))
    p = fma(p, r, splat(1 / 120))
    p = fma(p, r, splat(1 / 24))
    p = fma(p, r, splat(1 / 6))
    p = fma(p, r, splat(1 / 2))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    return where_below(x, -87.0, splat(0.0), p * power_of_two(shifted))


@_jit
def tanh(x: Any) -> Any:
    e = exp(with_sign(x * np.float32(2), splat(-1.0)))
    one = np.float32(1)
    return with_sign((one - e) / (one + e), x)


@_jit
def rotate(row: Any, cos: Any, sin: Any, dim: Any) -> None:
    """Rotate the pairs (i, i + dim / 2) of a float32 row in place; `cos` and `sin` are float32 rows of `dim`."""
    half = dim // 2
    whole = half // LANES * LANES
    for i in range(0, 4 * whole, 4 * LANES):
        j = i + 4 * half
        x, y = load(row + i), load(row + j)
        store(x * load(cos + i) - y * load(sin + i), row + i)
        store(y * load(cos + j) + x * load(sin + j), row + j)
    for i in range(4 * whole, 4 * half, 4):
        j = i + 4 * half
        x, y = float32_at(row + i), float32_at(row + j)
        set_float32(np.float32(x * float32_at(cos + i)) - np.float32(y * float32_at(sin + i)), row + i)
        set_float32(np.float32(y * float32_at(cos + j)) + np.float32(x * float32_at(sin + j)), row + j)


# ---- functions for callers in C ----


@_function
def rms_norm(address: Any) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset) in float32, rounded once."""
    _, rows, dim, x, weight, out, kind, weight_kind, eps, offset = numba.carray(address, 10)
    counter = lanes.address_of(address)
    size = SIZE[kind]
    shift, floor = np.float32(offset), np.int64(eps).view(np.float64)
    begin = take_ticket(counter) * BLOCK
    while begin < rows:
        for row in range(begin, min(begin + BLOCK, rows)):
            source, target = x + row * dim * size, out + row * dim * size
            squares = splat(0.0)
            for i in range(0, dim, LANES):
                value = load_kind(source + size * i, kind)
                squares = lanes.fma(value, value, squares)
            mean = np.float64(lanes.total(squares)) / np.float64(dim)
            factor = np.float32(1.0 / np.sqrt(mean + floor))
            for i in range(0, dim, LANES):
                scale = load_kind(weight + SIZE[weight_kind] * i, weight_kind) + shift
                store_kind(load_kind(source + size * i, kind) * factor * scale, target + size * i, kind)
        begin = take_ticket(counter) * BLOCK


@_function
def silu_gate(address: Any) -> None:
    """gate = gate / (1 + exp(-gate)) * up in float32, rounded once; `vectors` of 16 numbers."""
    _, vectors, gate, up, kind = numba.carray(address, 5)
    counter = lanes.address_of(address)
    step = LANES * SIZE[kind]
    one = np.float32(1)
    begin = take_ticket(counter) * BLOCK
    while begin < vectors:
        for at in range(begin * step, min(begin + BLOCK, vectors) * step, step):
            x = load_kind(gate + at, kind)
            # Of exp(-|x|), which cannot overflow: 1 / (1 + e) for x >= 0, e / (1 + e) below.
            e = exp(lanes.with_sign(x, splat(-1.0)))
            share = one / (one + e)
            share = lanes.where_below(x, 0.0, e * share, share)
            store_kind(x * share * load_kind(up + at, kind), gate + at, kind)
        begin = take_ticket(counter) * BLOCK


@_function
def store_pages(address: Any) -> None:
    """Copy keys and values of packed tokens to their slots, keys rotated if there are angles; one thread."""
    (row, tokens, slots, page_size, heads, dim, value_dim, key, key_token, key_head, value, value_token, value_head,
     source_kind, keys, key_page, key_slot, key_to, values, value_page, value_slot, value_to, kind, cos, sin,
     angle_token, angle_kind, angles) = numba.carray(address, 28)  # fmt: skip
    width = (max(dim, value_dim) + LANES - 1) // LANES * LANES
    cosines, sines = row + 4 * width, row + 8 * width
    one = np.float32(1)
    for token in range(tokens):
        slot = lanes.int64_at(slots, token)
        page = slot // page_size
        slot -= page * page_size
        if angles > 0:
            widen(cos + token * angle_token, angle_kind, angles, cosines)
            widen(sin + token * angle_token, angle_kind, angles, sines)
        for head in range(heads):
            widen(key + token * key_token + head * key_head, source_kind, dim, row)
            if angles > 0:
                rotate(row, cosines, sines, angles)
            narrow(row, one, kind, dim, keys + page * key_page + slot * key_slot + head * key_to)
            widen(value + token * value_token + head * value_head, source_kind, value_dim, row)
            narrow(row, one, kind, value_dim, values + page * value_page + slot * value_slot + head * value_to)
