"""Draft trees against brute force: merging, the probabilities of nodes, the choice of those to verify."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specactor_ray.speculation.window import choose_verify_lengths

from specactor_ray.spec.tree import (
    DraftTree,
    TreeCandidate,
    choose_tree_nodes,
    merge_tails,
    node_probabilities,
    tree_candidate,
)

tails = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=4)
costs = st.lists(st.floats(0.01, 10.0), min_size=24, max_size=24)


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
    drafts = draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=3), max_size=3))
    tree, _ = merge_tails({str(i): draft for i, draft in enumerate(drafts)})
    return tree.cut(max_depth=9, max_nodes=max_size, vocab_size=vocab)


@settings(max_examples=200, deadline=None)
@given(tails)
def test_the_merged_tree_is_the_set_of_all_prefixes(drafts: dict[str, tuple[int, ...]]) -> None:
    tree, proposers = merge_tails(drafts)
    naive: dict[tuple[int, ...], set[str]] = {}
    for drafter, tail in drafts.items():
        for end in range(1, len(tail) + 1):
            naive.setdefault(tail[:end], set()).add(drafter)
    prefixes = prefixes_of(tree)
    assert len(set(prefixes)) == len(prefixes)
    assert dict(zip(prefixes, proposers, strict=True)) == naive
    assert list(tree.depths) == [len(prefix) - 1 for prefix in prefixes]
    assert prefixes == list(naive), "nodes come tail by tail, in the order of the mapping"
    for tail in drafts.values():
        assert [prefixes[node] for node in tree.walk(tail)] == [tail[:end] for end in range(1, len(tail) + 1)]
        assert tree.walk((*tail, 99)) == tree.walk(tail)


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


@settings(max_examples=200, deadline=None)
@given(tails, st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4))
def test_probabilities_are_those_of_drafters_that_know_or_guess(
    drafts: dict[str, tuple[int, ...]], rates: list[float]
) -> None:
    """Against the rule's definition: weigh every set of drafters that may know the next token, of one mind."""
    probability = {drafter: min(p, 0.999) for drafter, p in zip("abcd", rates, strict=True)}
    tree, proposers = merge_tails(drafts)
    found = node_probabilities(tree, proposers, probability)
    for parent in {-1, *range(len(tree))}:
        children = [node for node in range(len(tree)) if tree.parents[node] == parent]
        here = sorted(set().union(*(proposers[node] for node in children)))
        weight = dict.fromkeys([-1, *children], 0.0)
        for knows in product([False, True], repeat=len(here)):
            mass, knowing = 1.0, set()
            for drafter, known in zip(here, knows, strict=True):
                mass *= probability[drafter] if known else 1.0 - probability[drafter]
                knowing |= {drafter} if known else set()
            said = [node for node in children if knowing <= proposers[node]]
            if not knowing:
                weight[-1] += mass
            elif said:
                weight[said[0]] += mass
        total = sum(weight.values())
        for node in children:
            assert found[node] == pytest.approx(weight[node] / total, rel=1e-6, abs=1e-9)


def test_agreement_helps_and_contradiction_hurts() -> None:
    rates = {"a": 0.8, "b": 0.5, "sure": 1.0, "too": 1.0}
    assert tree_candidate("r", {"a": (1, 2)}, rates).probabilities == [0.8, 0.8]
    assert tree_candidate("r", {"a": (1, 2), "b": (1,)}, rates).probabilities == [pytest.approx(0.9), 0.8]
    against = tree_candidate("r", {"b": (5,), "a": (1, 2)}, rates)
    assert against.tree.token_ids == (1, 2, 5), "the most promising tail comes first"
    assert against.probabilities == [pytest.approx(4 / 6), 0.8, pytest.approx(1 / 6)]
    both = tree_candidate("r", {"sure": (5,), "too": (1,)}, rates)
    assert both.probabilities == [pytest.approx(0.5), pytest.approx(0.5)]


def closed_sets(tree: DraftTree) -> list[tuple[int, ...]]:
    subsets = [
        tuple(node for node, taken in enumerate(mask) if taken) for mask in product([False, True], repeat=len(tree))
    ]
    return [nodes for nodes in subsets if all(tree.parents[node] in (-1, *nodes) for node in nodes)]


@settings(max_examples=150, deadline=None)
@given(st.data(), costs)
def test_no_other_choice_commits_more_per_second(data: st.DataObject, cost: list[float]) -> None:
    """All prefix-closed sets of small forests, at any cost curve, also one that falls."""
    candidates = []
    for number in range(data.draw(st.integers(1, 3))):
        tree = data.draw(trees(max_size=4))
        rates = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(tree), max_size=len(tree)))
        candidates.append(TreeCandidate(str(number), tree, rates))

    def expected(candidate: TreeCandidate, nodes: tuple[int, ...]) -> float:
        gains: dict[int, float] = {-1: 1.0}
        for node in nodes:
            gains[node] = gains[candidate.tree.parents[node]] * candidate.probabilities[node]
        return sum(gains.values())

    def ratio(choice: tuple[tuple[int, ...], ...]) -> float:
        tokens = sum(expected(candidate, nodes) for candidate, nodes in zip(candidates, choice, strict=True))
        return tokens / cost[len(candidates) + sum(map(len, choice))]

    chosen = choose_tree_nodes(candidates, lambda rows, tokens: cost[tokens])
    assert list(chosen) == [candidate.request_id for candidate in candidates]
    choice = []
    for candidate in candidates:
        prefixes = prefixes_of(candidate.tree)
        nodes = tuple(prefixes.index(prefix) for prefix in prefixes_of(chosen[candidate.request_id]))
        assert nodes in closed_sets(candidate.tree)
        choice.append(nodes)
    best = max(ratio(other) for other in product(*(closed_sets(candidate.tree) for candidate in candidates)))
    assert ratio(tuple(choice)) == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), max_size=4), st.lists(st.floats(0, 10), min_size=29))
def test_a_chain_gets_what_choose_verify_lengths_gives(rows: list[tuple[float, int]], cost: list[float]) -> None:
    candidates = [
        tree_candidate(str(i), {"d": tuple(range(supply))} if supply else {}, {"d": p})
        for i, (p, supply) in enumerate(rows)
    ]
    chosen = choose_tree_nodes(candidates, lambda rows, tokens: cost[tokens])
    lengths = choose_verify_lengths(
        [(str(i), p, supply) for i, (p, supply) in enumerate(rows)], lambda rows, tokens: cost[tokens]
    )
    assert {request_id: len(tree) for request_id, tree in chosen.items()} == lengths
    assert all(tree == DraftTree.chain(range(len(tree))) for tree in chosen.values())
