"""Draft trees: all drafters' guesses for a request, verified in one forward.

The tails of one request share prefixes. Their prefix tree holds every token once; the target verifies all of it in one
forward (each token sees its ancestors only) and the accepted length is that of the best branch (SpecInfer, arXiv
2305.09781). Which tokens are worth it is decided in `policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens as a tree; node i is the guess `token_ids[i]` that follows node `parents[i]`.

    Raises:
        ValueError: The parents do not describe a tree in which siblings differ.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each node's parent, smaller than its own; -1 is the last committed token."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; it must lie between -1 and {node - 1}")
        if len(self.children) < len(self):
            raise ValueError("two children of one node have the same token")

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """The tree of a single tail."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        """Nodes."""
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether it has a single branch; its tokens then are an ordinary tail."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Draft position of each node: 0 for a guess of the next token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """(node or -1, token) → the node's child with this token."""
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True))
        }

    def walk(self, token_ids: Sequence[int]) -> list[int]:
        """Nodes of the longest prefix of `token_ids` that the tree holds, from the first on."""
        children, path, node = self.children, [], -1
        for token in token_ids:
            child = children.get((node, token))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes, in their order here. `nodes` ascend and hold the parent of each of them."""
        if len(nodes) == len(self):
            return self
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes), tuple(place[self.parents[node]] for node in nodes)
        )

    def cut(self, max_depth: int, max_nodes: int, vocab_size: int) -> DraftTree:
        """What is left with draft positions below `max_depth`, the first `max_nodes` nodes, and no tokens outside the
        vocabulary; what hangs on a node that goes, goes too."""
        kept: dict[int, int] = {-1: -1}  # node → its depth
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if len(kept) > max_nodes:
                break
            if parent in kept and kept[parent] + 1 < max_depth and 0 <= token < vocab_size:
                kept[node] = kept[parent] + 1
        del kept[-1]
        return self.keep(list(kept))


def merge_tails(tails: Iterable[Sequence[int]]) -> DraftTree:
    """The prefix tree of these tails. Nodes come tail by tail; the likeliest should come first, since where it is
    accepted its keys and values lie where they belong already."""
    token_ids: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for tail in tails:
        parent = -1
        for token in tail:
            node = children.setdefault((parent, token), len(token_ids))
            if node == len(token_ids):
                token_ids.append(token)
                parents.append(parent)
            parent = node
    return DraftTree(tuple(token_ids), tuple(parents))
