"""Compiled functions of lanes and of rows in memory. All addresses and strides are in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.core.jit import kernel
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
    where_below,
    with_sign,
)

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
def widen(source: Any, stride: Any, kind: Any, rows: Any, count: Any, target: Any, width: Any) -> None:
    """Rows of `count` numbers of a kind become rows of `width` float32; zeros fill up the last 16 of a row."""
    whole, room = count // LANES * LANES, spare()
    for r in range(rows):
        begin, to = source + r * stride, target + 4 * r * width
        if kind == BFLOAT16:
            for i in range(0, whole, LANES):
                store(load_bfloat16(begin + 2 * i), to + 4 * i)
        else:
            for i in range(0, whole, LANES):
                store(load(begin + 4 * i), to + 4 * i)
        if whole < count:
            store(splat(0.0), room)
            copy(begin + SIZE[kind] * whole, room, SIZE[kind] * (count - whole))
            store(load_kind(room, kind), to + 4 * whole)


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
