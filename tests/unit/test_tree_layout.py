"""Positions and masks of trees, against their definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.modeling.tree_layout import TreeLayout, set_hidden, set_positions

shapes = st.tuples(
    st.integers(0, 6),  # tokens in the cache
    st.integers(0, 3),  # context tokens among the new ones
    st.lists(st.floats(0, 0.999), max_size=12).map(lambda draws: [int(d * (i + 1)) - 1 for i, d in enumerate(draws)]),
)


def expected(begin: int, context: int, parents: list[int], window: int | None) -> tuple[list[int], torch.Tensor]:
    """Positions of the new tokens, and which of all tokens each of them sees."""
    above = {begin + i: begin + i - 1 for i in range(-begin, context)}
    above |= {begin + context + i: begin + context + parent for i, parent in enumerate(parents)}
    first = begin + context
    for node, parent in enumerate(parents):
        if parent == -1:
            above[first + node] = first - 1
    lines = {}
    for token in range(first + len(parents)):
        line = [token]
        while above[line[-1]] >= 0:
            line.append(above[line[-1]])
        lines[token] = line
    positions = {token: len(line) - 1 for token, line in lines.items()}
    new = range(begin, first + len(parents))
    sees = torch.zeros(len(new), len(lines), dtype=torch.bool)
    for row, token in enumerate(new):
        for ancestor in lines[token]:
            sees[row, ancestor] = window is None or positions[token] - positions[ancestor] < window
    return [positions[token] for token in new], sees


@settings(max_examples=150, deadline=None)
@given(shapes, st.none() | st.integers(1, 8))
def test_a_token_sees_its_ancestors_within_the_window(shape: tuple[int, int, list[int]], window: int | None) -> None:
    begin, context, parents = shape
    layout = TreeLayout(begin, context + len(parents), parents)
    positions, sees = expected(begin, context, parents, window)
    assert layout.positions == positions
    mask = layout.mask(window, torch.float32, torch.device("cpu"))
    assert torch.equal(mask == 0, sees) and torch.equal(mask == float("-inf"), ~sees)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(shapes.filter(lambda shape: shape[1] + len(shape[2])), min_size=1, max_size=3),
    st.none() | st.integers(1, 8),
)
def test_rows_of_a_padded_batch_see_the_same(rows: list[tuple[int, int, list[int]]], window: int | None) -> None:
    """As the batched attention does it: causal by position first, then what new tokens see of each other."""
    trees = [(i, TreeLayout(begin, context + len(p), p)) for i, (begin, context, p) in enumerate(rows)]
    queries = max(layout.count for _, layout in trees)
    key = torch.arange(max(layout.begin + layout.count for _, layout in trees))
    position = torch.zeros(len(trees), queries, dtype=torch.long)
    set_positions(position, trees)
    hidden = key > position.unsqueeze(2)
    if window is not None:
        hidden |= key <= position.unsqueeze(2) - window
    set_hidden(hidden, trees, window)
    for i, layout in trees:
        sees = expected(*rows[i], window)[1]
        assert torch.equal(~hidden[i, : layout.count, : layout.begin + layout.count], sees)
