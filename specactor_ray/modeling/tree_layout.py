"""Where the new tokens of a row stand when the last of them form a tree, and which of them see which.

Tokens of a tree are appended to the row's cache slot by slot like any others, but a token's position is its depth, and
of the tree it sees only its ancestors. So a slot says nothing about position or order, and the mask says it all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class TreeLayout:
    """Positions and visibility of the `count` new tokens of one row.

    Args:
        begin: Tokens in the row's cache already.
        count: New tokens; the last `len(parents)` of them are the tree.
        parents: Of each node, as an index in the tree, smaller than its own; -1 is the token before the tree.
    """

    def __init__(self, begin: int, count: int, parents: Sequence[int]) -> None:
        context = count - len(parents)
        self.begin, self.count = begin, count
        self._seen = np.tri(count, dtype=bool)
        self._seen[context:, context:] = False
        positions = list(range(begin, begin + context))
        for node, parent in enumerate(parents, start=context):
            above = parent + context  # for -1: the last token before the tree
            if parent >= 0:
                self._seen[node, context:] = self._seen[above, context:]
            self._seen[node, node] = True
            positions.append(positions[above] + 1 if above >= 0 else begin)
        self.positions = positions
        """Position id of each new token: a node's is its parent's plus one."""

    def hidden_among_new(self, window: int | None) -> np.ndarray:
        """`(count, count)` bool: new token (column) that a new token (row) does not see."""
        hidden = ~self._seen
        if window is not None:
            position = np.array(self.positions)
            hidden |= position[None, :] <= position[:, None] - window
        return hidden

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive mask `(count, begin + count)` over the row's whole region."""
        hidden = np.zeros((self.count, self.begin + self.count), dtype=bool)
        if window is not None:
            hidden[:, : self.begin] = np.arange(self.begin)[None, :] <= np.array(self.positions)[:, None] - window
        hidden[:, self.begin :] = self.hidden_among_new(window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask.to(device)


def set_positions(position: torch.Tensor, trees: Sequence[tuple[int, TreeLayout]]) -> None:
    """Put the positions of rows with trees into `position` `(rows, queries)`, in place; `trees`: (row, layout)."""
    rows = np.concatenate([np.full(layout.count, row) for row, layout in trees])
    columns = np.concatenate([np.arange(layout.count) for _, layout in trees])
    values = np.concatenate([np.array(layout.positions) for _, layout in trees])
    _put(position, (rows, columns), values)


def set_hidden(hidden: torch.Tensor, trees: Sequence[tuple[int, TreeLayout]], window: int | None) -> None:
    """Put what new tokens see of each other into `hidden` `(rows, queries, keys)` bool, in place, for rows with trees.

    What they see of the context is a matter of positions and stays.
    """
    rows, queries, keys, values = [], [], [], []
    for row, layout in trees:
        query, key = np.indices((layout.count, layout.count)).reshape(2, -1)
        rows.append(np.full(query.size, row))
        queries.append(query)
        keys.append(key + layout.begin)
        values.append(layout.hidden_among_new(window).reshape(-1))
    _put(hidden, tuple(np.concatenate(parts) for parts in (rows, queries, keys)), np.concatenate(values))


def _put(tensor: torch.Tensor, indices: tuple[np.ndarray, ...], values: np.ndarray) -> None:
    device = tensor.device
    places = tuple(torch.from_numpy(index).to(device) for index in indices)
    tensor.index_put_(places, torch.from_numpy(values).to(device))
