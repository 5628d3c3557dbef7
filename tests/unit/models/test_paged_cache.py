"""The paged cache against lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.shapes import ROW_BYTES

CPU = torch.device("cpu")
SHAPES = [LayerShape(1, 1, 2), LayerShape(2, 1, 1)]


def write(cache: PagedCache, row: int, stamps: Sequence[int]) -> None:
    """Append tokens that are recognised by their stamps in all layers."""
    batch = RaggedBatch(cache, np.array([row]), np.array([len(stamps)]), ())
    for pool in (*cache.keys, *cache.values):
        flat = pool.flatten(0, 1)
        flat[batch.slots] = torch.tensor(stamps, dtype=flat.dtype).view(-1, 1, 1).expand(-1, *flat.shape[1:])
    cache.lengths[row] += len(stamps)


def pages_of(cache: PagedCache, row: int, tokens: int) -> list[int]:
    """Pages of a row's first tokens."""
    pages: list[int] = cache.page_table(np.array([row]), np.array([tokens]))[0].tolist()
    return pages


def contents(cache: PagedCache, row: int) -> list[int]:
    """The stamps of a row, which are the same in all layers."""
    length = int(cache.lengths[row])
    pages = torch.tensor(pages_of(cache, row, length), dtype=torch.long)
    read = [pool[pages].flatten(0, 1)[:length].flatten(1) for pool in (*cache.keys, *cache.values)]
    stamps = read[0][:, 0]
    assert all(torch.equal(layer, stamps[:, None].expand_as(layer)) for layer in read)
    return stamps.long().tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["open", "append", "append all", "fork", "truncate", "free"]), st.integers(0, 999)),
        max_size=60,
    ),
)
def test_rows_and_forks_are_independent_and_no_page_is_lost(page_size: int, operations: list[tuple[str, int]]) -> None:
    """After any history every row holds its own tokens; what is refused for lack of pages changes nothing."""
    pages, stamp = 12, 0
    budget = pages * page_size * sum(2 * shape.heads * ROW_BYTES for shape in SHAPES)
    cache = PagedCache(SHAPES, budget, torch.float64, CPU, page_size)
    assert cache.pages == pages
    rows: dict[int, list[int]] = {}
    for operation, number in operations:
        if operation == "open":
            free, row = cache.free_slots, cache.open(number % 20)
            assert (row is None) == (max(number % 20, 1) > free)
            if row is not None:
                assert row not in rows
                rows[row] = []
            continue
        if not rows:
            continue
        row = sorted(rows)[number % len(rows)]
        if operation == "append":
            stamps = list(range(stamp, stamp + 1 + number % 7))
            if cache.reserve(row, len(rows[row]) + len(stamps)):
                assert cache.room(np.array([row]))[0] >= len(rows[row]) + len(stamps)
                write(cache, row, stamps)
                rows[row] += stamps
                stamp += len(stamps)
        elif operation == "fork":
            lengths = [len(rows[row]), number % (len(rows[row]) + 1)]
            for fork, length in zip(cache.fork(np.array([row, row]), np.array(lengths)).tolist(), lengths, strict=True):
                rows[fork] = rows[row][:length]
        elif operation == "append all":
            wanted = np.array([len(tokens) + 1 + number % 3 for tokens in rows.values()])
            fits = cache.reserve_rows(np.array(list(rows)), wanted)
            for fitting, (one, tokens) in zip(fits.tolist(), rows.items(), strict=True):
                if fitting:
                    write(cache, one, range(stamp, stamp + 1 + number % 3))
                    tokens += range(stamp, stamp + 1 + number % 3)
                    stamp += 3
        elif operation == "truncate":
            rows[row] = rows[row][: number % (len(rows[row]) + 1)]
            cache.truncate(np.array([row]), len(rows[row]))
        else:
            cache.free(row)
            del rows[row]
        assert {row: contents(cache, row) for row in rows} == rows
    for row in rows:
        cache.free(row)
    assert cache.free_slots == cache.slots == pages * page_size


def test_a_fork_takes_no_page_before_one_of_the_two_writes() -> None:
    cache = PagedCache(SHAPES, 1 << 15, torch.float32, CPU, 4)
    row = cache.open(6)
    write(cache, row, range(6))
    before = cache.free_slots
    (fork,) = cache.fork(np.array([row]), np.array([6])).tolist()
    assert cache.free_slots == before and cache.room(np.array([row, fork])).tolist() == [0, 0]
    for shared in (row, fork):
        with pytest.raises(ValueError, match="no room"):
            write(cache, shared, [7])
    assert cache.reserve(fork, 7) and cache.free_slots == before - 4, "the page in which it goes on is copied"
    assert cache.reserve(row, 8) and cache.free_slots == before - 4, "it is the row's own again"
    write(cache, fork, [9])
    assert contents(cache, row) == list(range(6)) and contents(cache, fork) == [*range(6), 9]
