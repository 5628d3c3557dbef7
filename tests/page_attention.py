"""Attention over pages in tests: sequences, a call for parts of them, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from specactor_ray.models.cpu_attention import AttentionRules, PageRows, attend_pages

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
options_of = st.fixed_dictionaries(
    {},
    optional={
        "scaling": st.sampled_from([0.05, 0.3]),
        "window": st.sampled_from([1, 7, 64, 100, 200]),
        "softcap": st.sampled_from([0.01, 0.7, 30.0]),
        "sinks": st.just(True),
    },
)


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if "sinks" in options else options


def rules_of(options: dict[str, Any], dim: int) -> AttentionRules:
    return AttentionRules(**{"scaling": dim**-0.5, **options})


@dataclass
class Sequence:
    """Queries, keys and values of every position of one row."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def sequence(
    seed: int, length: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> Sequence:
    made = torch.Generator().manual_seed(seed)
    shapes = (length, heads, dim), (length, kv_heads, dim), (length, kv_heads, value_dim)
    return Sequence(*(torch.randn(shape, generator=made).to(dtype) for shape in shapes))


def on_cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    rules: AttentionRules,
) -> torch.Tensor:
    keys, values = (
        torch.nn.functional.pad(one, (0, -one.shape[3] % 32), value=torch.nan)[..., : one.shape[3]]
        for one in (keys, values)
    )
    output = attend_pages(query, keys, values, PageRows(pages, starts, lengths), rules)
    assert not output[starts[-1] :].any()
    return output


def attend(
    parts: list[tuple[Sequence, int, int]],
    page_size: int = 16,
    padding: int = 0,
    seed: int = 0,
    run: Callable[..., torch.Tensor] = on_cpu,
    **options: Any,
) -> list[torch.Tensor]:
    """Queries [first, end) of sequences in one call, their pages anywhere in a cache that is full of NaN."""
    first = parts[0][0]
    needed = [-(-end // page_size) for _, _, end in parts]
    order = np.random.default_rng(seed).permutation(sum(needed) + 3).astype(np.int32)
    pages = np.zeros((len(parts), max(needed)), np.int32)
    shape = (len(order), page_size)
    keys = torch.full((*shape, *first.key.shape[1:]), torch.nan, dtype=first.key.dtype)
    values = torch.full((*shape, *first.value.shape[1:]), torch.nan, dtype=first.value.dtype)
    taken = 0
    for row, ((one, _, end), count) in enumerate(zip(parts, needed, strict=True)):
        pages[row, :count] = order[taken : taken + count]
        taken += count
        at = torch.arange(end)
        page, slot = torch.from_numpy(pages[row].astype(np.int64))[at // page_size], at % page_size
        keys[page, slot], values[page, slot] = one.key[:end], one.value[:end]
    queries = torch.cat([one.query[begin:end] for one, begin, end in parts])
    queries = torch.cat([queries, torch.full((padding, *queries.shape[1:]), torch.nan, dtype=queries.dtype)])
    counts = [end - begin for _, begin, end in parts]
    starts = np.cumsum([0, *counts]).astype(np.int64)
    lengths = np.array([end for _, _, end in parts], np.int64)
    output = run(queries, keys, values, pages, starts, lengths, rules_of(options, first.query.shape[2]))
    assert output.shape == (len(queries), first.query.shape[1], first.value.shape[2])
    assert output.dtype == first.query.dtype
    return list(output[: starts[-1]].split(counts))


def reference(one: Sequence, begin: int, end: int, **options: Any) -> torch.Tensor:
    """The same in float64, written as the textbook does."""
    group = one.query.shape[1] // one.key.shape[1]
    key, value = (x[:end].double().repeat_interleave(group, 1) for x in (one.key, one.value))
    scaling, window = options.get("scaling") or one.query.shape[2] ** -0.5, options.get("window")
    scores = torch.einsum("qhd,khd->hqk", one.query[begin:end].double(), key) * scaling
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    at, of = torch.arange(begin, end)[:, None], torch.arange(end)
    hidden = (of > at) | ((of <= at - window) if window else torch.zeros_like(of > at))
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.get("sinks") is not None:
        sinks = options["sinks"].double()[:, None, None].expand(-1, end - begin, 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :end], value)


def check_against_float64(
    run: Callable[..., list[torch.Tensor]], rows: list[tuple[int, int]], heads: tuple[int, int], dim: tuple[int, int],
    dtype: torch.dtype, options: dict[str, Any],
) -> None:  # fmt: skip
    """`run`: `attend` of rows with so many new tokens, and so many before them."""
    options, parts = with_sinks(options, heads[0]), []
    for seed, (count, before) in enumerate(rows):
        parts.append((sequence(seed, before + count, *heads, *dim, dtype), before, before + count))
    for part, output in zip(parts, run(parts, **options), strict=True):
        expected = reference(*part, **options)
        torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.int32 if one.element_size() == 4 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
