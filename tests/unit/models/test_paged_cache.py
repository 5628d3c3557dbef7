"""The paged cache against lists of tokens, and packed forwards over it against fresh ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.models.packed_linear import PackedLinear, cheapest_row_counts
from specactor_ray.models.paged_cache import ROW_BYTES, LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.ragged_model import RaggedModel
from tests.tiny import tiny_target

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


def check_groups(cache: PagedCache, rows: list[int]) -> None:
    """Each group has the full pages in common that it says, and rows of two groups have none."""
    full = [pages_of(cache, row, int(cache.lengths[row]) // cache.page_size * cache.page_size) for row in rows]
    groups, firsts = cache.groups(np.array(rows, np.int64)), [pages[0] for pages in full if pages]
    if groups is None:
        assert len(set(firsts)) == len(firsts)
        return
    assert sorted(groups.rows.tolist()) == list(range(len(rows))) and len(groups.starts) == len(groups.pages) + 1
    seen = set[int]()
    for (begin, end), pages in zip(itertools.pairwise(groups.starts.tolist()), groups.pages.tolist(), strict=True):
        members = [full[place] for place in groups.rows[begin:end]]
        unlike = (place for place, pages_there in enumerate(zip(*members, strict=False)) if len(set(pages_there)) > 1)
        assert pages == (next(unlike, min(map(len, members))) if len(members) > 1 else 0)
        begun = {some[0] for some in members if some}
        assert not begun & seen
        seen |= begun


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
        check_groups(cache, [row for row, tokens in rows.items() if tokens])
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


def test_rolling_forward_is_refused() -> None:
    cache = PagedCache(SHAPES, 1 << 15, torch.float32, CPU)
    rows = np.array([cache.open(8), cache.open(8)])
    write(cache, rows[0], [1, 2])
    with pytest.raises(ValueError, match="roll forward"):
        cache.truncate(rows, 1)
    assert cache.lengths[rows].tolist() == [2, 0]


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32), 32 << 20)


def forward(model: RaggedModel, rows: Sequence[int], tokens: Sequence[Sequence[int]], logits: int) -> torch.Tensor:
    """Append tokens to rows; up to so many last ones of each yield logits."""
    counts = np.array([len(some) for some in tokens])
    return model.forward(np.array(rows), counts, np.concatenate(tokens), np.minimum(counts, logits)).logits


@pytest.mark.parametrize("seed", range(2))
def test_random_appends_rollbacks_and_forks_equal_a_fresh_forward(model: RaggedModel, seed: int) -> None:
    """Rows of different lengths grow, roll back and are replaced by forks of others at random; the logits are those
    of a clean slate."""
    rng, cache = random.Random(seed), model.cache
    rows = [cache.open(8) for _ in range(5)]
    contexts: list[list[int]] = [[] for _ in rows]
    for _ in range(14):
        active = [i for i in range(len(rows)) if rng.random() < 0.8] or [0]
        fed = []
        for i in active:
            if contexts[i] and rng.random() < 0.4:
                del contexts[i][rng.randint(0, len(contexts[i])) :]
                cache.truncate(np.array([rows[i]]), len(contexts[i]))
            elif rng.random() < 0.2:
                cache.free(rows[i])
                source = rng.choice([j for j in range(len(rows)) if j != i])
                (rows[i],) = cache.fork(np.array([rows[source]]), cache.lengths[[rows[source]]]).tolist()
                contexts[i] = list(contexts[source])
            fed.append([rng.randrange(model.vocab_size) for _ in range(rng.choice([1, 1, 2, 5, 70]))])
        for i, tokens in zip(active, fed, strict=True):
            contexts[i] = contexts[i][: int(cache.lengths[rows[i]])] + tokens
            assert cache.reserve(rows[i], len(contexts[i]))
        logits = forward(model, [rows[i] for i in active], fed, 2)
        expected = []
        for i, tokens in zip(active, fed, strict=True):
            assert cache.lengths[rows[i]] == len(contexts[i])
            fresh = cache.open(len(contexts[i]))
            expected.append(forward(model, [fresh], [contexts[i]], min(2, len(tokens))))
            cache.free(fresh)
        assert torch.allclose(logits, torch.cat(expected), atol=2e-3, rtol=1e-3)
    for row in rows:
        cache.free(row)
    assert cache.free_slots == cache.slots


def test_packed_linear_equals_linear() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(48, 96, bias=bias)
        packed = PackedLinear(linear.weight, linear.bias)
        for rows in (1, 2, 5, 33):
            x = torch.randn(rows, 48)
            assert torch.allclose(packed(x), linear(x), atol=1e-5)
    choice = cheapest_row_counts([packed], up_to=6)
    assert choice[0] == 0 and all(rows <= choice[rows] <= 6 for rows in range(1, 7))
