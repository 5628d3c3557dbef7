"""Matrix products and sums of rows in Triton with bits that do not depend on the number of rows.

A program of `multiply` takes a tile of rows and columns over the whole inner dimension, in blocks of one size, into one
sum, so a row is added up in one order, whatever shares its tile. Many rows take a larger tile with the same blocks,
once a comparison on the device has found its bits to be equal. `add_up` gives each row a program.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernels run on tensors of the CPU.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specactor_ray.core.machine import fall_back

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types of factors and terms; both kernels add in float32."""
_MANY, _MANY_COLUMNS, _WIDE = 256, 2048, 1 << 14
"""Rows and columns from which on large tiles keep a device busy; columns from which on those of few rows are wide."""
_WIDEST_SUM = 1024
"""Most columns that `add_up` reads at once."""


class Tile(NamedTuple):
    """Constants of `multiply`: rows, columns, length of a block of the inner dimension, and options of the launch."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def tile_of(itemsize: int, columns: int, many: bool = False) -> Tile:
    """The tile of a product: narrow where few columns must keep the device busy; `many`: for many rows. The length of
    its blocks depends on the size of the numbers alone."""
    if itemsize == 4:
        return Tile(16, 64, 32, 4, 3)
    if many and columns >= _MANY_COLUMNS:
        return Tile(128, 128, 64, 8, 3)
    return Tile(64, 128, 64, 4, 4) if columns >= _WIDE else Tile(64, 32, 64, 4, 6)


@functools.cache
def _agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all tiles give the same bits on a device, found by sums of which nothing but their roundings is left."""
    part = torch.arange(128 * 256, device=device).sin().to(dtype).view(1, 128, 256)
    x, weight = torch.cat((part, part), 2), torch.cat((part, -part), 2).transpose(1, 2)
    tiles = tile_of(2, 0), tile_of(2, _WIDE), tile_of(2, _WIDE, True)
    first, *others = (_multiply(x, weight, None, None, tile) for tile in tiles)
    if equal := all(torch.equal(first, other) for other in others):
        return equal
    fall_back(logger, f"Products of many rows take the tile for few rows on {device}: the larger one has other bits")
    return equal


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight + bias`, for any strides of the weight. Nothing waits for the device.

    Args:
        x: `(batch, rows, inner)`.
        weight: `(batch, inner, columns)`; with `ends` `(groups, inner, columns)`.
        bias: `(columns,)`.
        ends: int32 `(groups,)`: the rows of a batch of 1 up to `ends[0]` take the first weight, those up to `ends[1]`
            the second one, and so on. Rows past the last one are undefined.

    Returns:
        `(batch, rows, columns)` in the data type of `x`.
    """
    many = ends is None and x.itemsize == 2 and x.shape[1] >= _MANY and _agree(x.device, x.dtype)
    return _multiply(x, weight, bias, ends, tile_of(x.itemsize, weight.shape[2], many))


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    x = x if len(x) == 1 and x.stride(2) == 1 else x.contiguous()
    batch, rows, inner = x.shape
    columns, groups = weight.shape[2], 0 if ends is None else len(ends)
    out = x.new_empty(batch, rows, columns)
    if not out.numel():
        return out
    grid = (triton.cdiv(rows, tile.rows) + groups, triton.cdiv(columns, tile.columns), batch)
    with torch.cuda.device_of(x):
        multiply[grid](
            x, weight, bias, ends, out, rows, columns, inner, groups, x.stride(1), *weight.stride(),
            ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, WHOLE=inner % tile.inner == 0,
            GROUPS=triton.next_power_of_2(groups) if groups else 0, num_warps=tile.num_warps,
            num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sums(x: torch.Tensor) -> torch.Tensor:
    """float32: sums over the last dimension."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = x.new_empty(len(flat), dtype=torch.float32)
    block = min(triton.next_power_of_2(max(flat.shape[1], 1)), _WIDEST_SUM)
    if len(flat):
        options = {"BLOCK": block, "num_warps": max(block // 256, 1), "enable_fp_fusion": False}
        with torch.cuda.device_of(x):
            add_up[len(flat),](flat, out, flat.shape[1], flat.stride(0), **options)
    return out.view(x.shape[:-1])


@triton.jit
def _group(ends, groups, tile, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """(group, its first row in the tile, its end) of a tile. Each group begins a tile of its own."""
    g = tl.arange(0, GROUPS)
    end = tl.load(ends + g, mask=g < groups, other=0)
    begin = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    count = tl.where(g < groups, (end - begin + ROWS - 1) // ROWS, 0)
    group = tl.sum(((tl.cumsum(count, 0) <= tile) & (g < groups)).to(tl.int32))
    before = tl.sum(tl.where(g < group, count, 0))
    first = tl.sum(tl.where(g == group, begin, 0)) + (tile - before) * ROWS
    return group, first, tl.sum(tl.where((g == group) & (g < groups), end, 0))


@triton.jit(do_not_specialize=["rows", "groups"], do_not_specialize_on_alignment=["ends"])
def multiply(
    x, weight, bias, ends, out, rows, columns, inner, groups, x_row, w_batch, w_inner, w_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of columns, batch): programs that run together read the same part of the weight."""
    batch, first, end = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS, rows
    group = batch
    if GROUPS > 0:
        group, first, end = _group(ends, groups, tl.program_id(0), ROWS, GROUPS)
        group = group.to(tl.int64)
    if first < end:
        PRECISION: tl.constexpr = "tf32x3" if x.dtype.element_ty == tl.float32 else "ieee"
        m, n, k = first + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
        x_at = x + (batch * rows + m)[:, None] * x_row + k[None, :]
        w_at = weight + group * w_batch + k[:, None] * w_inner + n.to(tl.int64)[None, :] * w_column
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, inner, INNER):
            row, column = (m < end)[:, None], (n < columns)[None, :]
            if not WHOLE:
                row, column = row & (begin + k < inner)[None, :], column & (begin + k < inner)[:, None]
            left, right = tl.load(x_at, mask=row, other=0.0), tl.load(w_at, mask=column, other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            x_at += INNER
            w_at += INNER * w_inner
        if bias is not None:
            total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        out_at = out + (batch * rows + m)[:, None] * columns + n[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < columns)[None, :])


@triton.jit
def add_up(x, out, columns, x_row, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        total += tl.load(x + row * x_row + begin + c, mask=begin + c < columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total))
