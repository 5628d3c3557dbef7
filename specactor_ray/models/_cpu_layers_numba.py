"""Compiled part of `cpu_layers`: norms, gates, and the storing of keys and values in pages.

A call's sizes, addresses and strides (in bytes) are int64 numbers, in the order of the first line of each function.
Threads take blocks of rows by a counter, the first of these numbers; a result depends on its own row alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from specactor_ray.core.jit import c_function
from specactor_ray.models import lane_functions, lanes
from specactor_ray.models.lane_functions import exp, load_kind, narrow, rotate, store_kind, widen
from specactor_ray.models.lanes import LANES, SIZE, splat, take_ticket

BLOCK = 32
"""Rows, or vectors of 16 numbers, that a thread takes at a time."""

_function: Any = c_function(types.int64, sources=[lanes, lane_functions])


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
            widen(cos + token * angle_token, 0, angle_kind, 1, angles, cosines, width)
            widen(sin + token * angle_token, 0, angle_kind, 1, angles, sines, width)
        for head in range(heads):
            widen(key + token * key_token + head * key_head, 0, source_kind, 1, dim, row, width)
            if angles > 0:
                rotate(row, cosines, sines, angles)
            narrow(row, one, kind, dim, keys + page * key_page + slot * key_slot + head * key_to)
            widen(value + token * value_token + head * value_head, 0, source_kind, 1, value_dim, row, width)
            narrow(row, one, kind, value_dim, values + page * value_page + slot * value_slot + head * value_to)
