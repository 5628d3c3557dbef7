"""Pieces of compiled kernels: numbers of three kinds, read and written 16 at a time, and functions of 16 numbers.

All addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.jit import kernel
from specactor_ray.models import lanes
from specactor_ray.models.lanes import (
    LANES,
    add,
    divide,
    float32_at,
    fma,
    load,
    load_bfloat16,
    load_float16,
    move16,
    multiply,
    power_of_two,
    set_float32,
    splat,
    store,
    store_bfloat16,
    store_float16,
    subtract,
    where_below,
    with_sign,
)

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
SIZE = (4, 2, 2)
"""Bytes of a number of each kind."""

_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_SHIFT = np.float32(1.5 * 2.0**23 + 127)

_jit: Any = kernel(sources=[lanes])


@_jit
def move(source: Any, target: Any, bytes_: Any) -> None:
    for at in range(0, bytes_, 2):
        move16(source + at, target + at)


@_jit
def load_kind(address: Any, kind: Any) -> Any:
    if kind == BFLOAT16:
        return load_bfloat16(address)
    if kind == FLOAT16:
        return load_float16(address)
    return load(address)


@_jit
def store_kind(value: Any, address: Any, kind: Any) -> None:
    if kind == BFLOAT16:
        store_bfloat16(value, address)
    elif kind == FLOAT16:
        store_float16(value, address)
    else:
        store(value, address)


@_jit
def widen(source: Any, stride: Any, kind: Any, rows: Any, count: Any, target: Any, width: Any, spare: Any) -> None:
    """Rows of `count` numbers of a kind become float32, zeros up to `width`; `spare` holds 64 bytes."""
    whole = count // LANES * LANES
    for r in range(rows):
        begin, to = source + r * stride, target + 4 * r * width
        if kind == BFLOAT16:
            for i in range(0, whole, LANES):
                store(load_bfloat16(begin + 2 * i), to + 4 * i)
        elif kind == FLOAT16:
            for i in range(0, whole, LANES):
                store(load_float16(begin + 2 * i), to + 4 * i)
        else:
            for i in range(0, whole, LANES):
                store(load(begin + 4 * i), to + 4 * i)
        if whole < count:
            store(splat(np.float32(0)), spare)
            move(begin + SIZE[kind] * whole, spare, SIZE[kind] * (count - whole))
            store(load_kind(spare, kind), to + 4 * whole)


@_jit
def narrow(source: Any, scale: Any, kind: Any, count: Any, target: Any, spare: Any) -> None:
    """`count` float32 numbers, each divided by `scale`, become numbers of a kind."""
    divisor = splat(scale)
    for i in range(0, count, LANES):
        value = divide(load(source + 4 * i), divisor)
        to = target + SIZE[kind] * i if i + LANES <= count else spare
        store_kind(value, to, kind)
        if to == spare:
            move(spare, target + SIZE[kind] * i, SIZE[kind] * (count - i))


@_jit
def exp(x: Any) -> Any:
    """exp of x <= 0, relative error below 2e-7; 0 under e^-87, NaN of NaN."""
    shifted = fma(x, splat(_LOG2_E), splat(_SHIFT))
    k = subtract(shifted, splat(_SHIFT))
    r = fma(k, splat(-_LN2_HIGH), x)
    r = fma(k, splat(-_LN2_LOW), r)
    p = splat(np.float32(1.0 / 5040.0))
    p = fma(p, r, splat(np.float32(1.0 / 720.0)))
    p = fma(p, r, splat(np.float32(1.0 / 120.0)))
    p = fma(p, r, splat(np.float32(1.0 / 24.0)))
    p = fma(p, r, splat(np.float32(1.0 / 6.0)))
    p = fma(p, r, splat(np.float32(0.5)))
    p = fma(p, r, splat(np.float32(1.0)))
    p = fma(p, r, splat(np.float32(1.0)))
    return where_below(x, np.float32(-87.0), splat(np.float32(0)), multiply(p, power_of_two(shifted)))


@_jit
def tanh(x: Any) -> Any:
    e = exp(with_sign(multiply(x, splat(np.float32(2))), splat(np.float32(-1))))
    one = splat(np.float32(1))
    return with_sign(divide(subtract(one, e), add(one, e)), x)


@_jit
def rotate(row: Any, cos: Any, sin: Any, dim: Any) -> None:
    """Rotate the pairs (i, i + dim / 2) of a float32 row in place; `cos` and `sin` are float32 rows of `dim`."""
    half = dim // 2
    whole = half // LANES * LANES
    for i in range(0, 4 * whole, 4 * LANES):
        j = i + 4 * half
        x, y = load(row + i), load(row + j)
        store(subtract(multiply(x, load(cos + i)), multiply(y, load(sin + i))), row + i)
        store(add(multiply(y, load(cos + j)), multiply(x, load(sin + j))), row + j)
    for i in range(4 * whole, 4 * half, 4):
        j = i + 4 * half
        x, y = float32_at(row + i), float32_at(row + j)
        set_float32(np.float32(x * float32_at(cos + i)) - np.float32(y * float32_at(sin + i)), row + i)
        set_float32(np.float32(y * float32_at(cos + j)) + np.float32(x * float32_at(sin + j)), row + j)
