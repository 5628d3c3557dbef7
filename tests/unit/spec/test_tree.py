"""Draft trees against the set of their branches: merging, cutting, and what is no tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.spec.tree import DraftTree, merge_tails

tails = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=4)


def prefix_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(tree.token_ids[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def prefixes_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [prefix_of(tree, node) for node in range(len(tree))]


@st.composite
def trees(draw: st.DrawFn, max_size: int = 5, vocab: int = 3) -> DraftTree:
    tree = merge_tails(draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=3), max_size=3)))
    return tree.cut(max_depth=9, max_nodes=max_size, vocab_size=vocab)


@settings(max_examples=200, deadline=None)
@given(tails)
def test_the_merged_tree_is_the_set_of_all_prefixes(drafts: list[tuple[int, ...]]) -> None:
    tree = merge_tails(iter(drafts))
    naive = list(dict.fromkeys(tail[:end] for tail in drafts for end in range(1, len(tail) + 1)))
    prefixes = prefixes_of(tree)
    assert prefixes == naive, "nodes come tail by tail, in the order in which they were given"
    assert list(tree.depths) == [len(prefix) - 1 for prefix in prefixes]
    for tail in drafts:
        assert [prefixes[node] for node in tree.walk(tail)] == [tail[:end] for end in range(1, len(tail) + 1)]
        assert tree.walk((*tail, 99)) == tree.walk(tail)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_kept_keeps_its_place(data: st.DataObject) -> None:
    tree = data.draw(trees(max_size=12))
    kept: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent in (-1, *kept) and data.draw(st.booleans()):
            kept.append(node)
    assert prefixes_of(tree.keep(kept)) == [prefix_of(tree, node) for node in kept]


def test_a_shape_that_is_no_tree_is_refused() -> None:
    for tokens, parents, reason in (
        ((1, 2), (-1,), "2 tokens have 1 parents"),
        ((1, 2), (-1, 1), "node 1 has parent 1"),
        ((1, 2), (-2, 0), "node 0 has parent -2"),
        ((1, 2, 2), (-1, 0, 0), "same token"),
    ):
        with pytest.raises(ValueError, match=reason):
            DraftTree(tokens, parents)
    assert DraftTree((2, 2, 3), (-1, 0, 0)).depths == (0, 1, 1)
    assert DraftTree.chain([4, 4]) == DraftTree((4, 4), (-1, 0)) and DraftTree.chain([4, 4]).is_chain
    assert not DraftTree((4, 5), (-1, -1)).is_chain


@settings(max_examples=200, deadline=None)
@given(trees(max_size=12, vocab=4), st.integers(-1, 4), st.integers(0, 12), st.integers(1, 4))
def test_cutting_drops_nodes_with_all_that_hangs_on_them(tree: DraftTree, depth: int, nodes: int, vocab: int) -> None:
    fitting = [p for p in prefixes_of(tree) if len(p) <= depth and all(token < vocab for token in p)]
    assert prefixes_of(tree.cut(depth, nodes, vocab)) == fitting[:nodes]
