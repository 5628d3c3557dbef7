"""Draft trees: all drafters' guesses for a request in one forward, and which of their tokens are worth verifying.

The tails of one request share prefixes. Their prefix tree holds every token once; the target verifies all of it in one
forward (each token sees its ancestors only) and the accepted length is that of the best branch. The idea of verifying
a tree: SpecInfer, arXiv 2305.09781. Choosing its tokens by measured cost and acceptance: Sequoia, arXiv 2402.12374,
here made exact for a whole batch by the argument of `choose_verify_lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specactor_ray.speculation.acceptance import expected_accepted
from specactor_ray.speculation.window import count_worth_verifying

_ALMOST_SURE = 1.0 - 1e-9
"""Largest probability of a guess that another guess contradicts."""


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


def merge_tails(tails: Mapping[str, Sequence[int]]) -> tuple[DraftTree, list[frozenset[str]]]:
    """The prefix tree of all tails, and for each node the drafters that proposed it.

    Nodes come in the order of the mapping, tail by tail. The likeliest tail should come first: where it is accepted
    its keys and values lie where they belong already.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    proposers: list[set[str]] = []
    children: dict[tuple[int, int], int] = {}
    for drafter_id, tail in tails.items():
        parent = -1
        for token in tail:
            node = children.setdefault((parent, token), len(token_ids))
            if node == len(token_ids):
                token_ids.append(token)
                parents.append(parent)
                proposers.append(set())
            proposers[node].add(drafter_id)
            parent = node
    return DraftTree(tuple(token_ids), tuple(parents)), [frozenset(drafters) for drafters in proposers]


def node_probabilities(
    tree: DraftTree, proposers: Sequence[frozenset[str]], probability: Mapping[str, float]
) -> list[float]:
    """Chance that each node is right given that its parent is.

    The rule is Dempster's rule of combination. Take a drafter of probability `p` as one that *knows* the next token
    with chance `p` and else says anything, and let drafters know independently of each other. What they said rules
    out that two of them know who said different things; given that,

        P(node) = o / (1 + sum of o over the node and its siblings),   o = 1 / prod_{d proposed it} (1 - p_d) - 1

    - one drafter alone: `p`, as for a tail;
    - drafters agree: `1 - prod(1 - p_d)`, wrong only if none of them knows. Never less than the best of them alone,
      since a second voice is evidence;
    - siblings compete: each loses by what speaks for the others, and together they stay below 1. A drafter earned its
      average mostly where no other contradicted it, so where one does its guess is worth less than the average.

    Drafters whose errors are alike (two that look up the same text) agree more often than the rule assumes and so are
    trusted too much together. The price is a few positions verified in vain; no token depends on it.

    Args:
        tree: The tree.
        proposers: Of each node, from `merge_tails`.
        probability: Drafter id → chance that its token is right given that those before it are.
    """
    voices = [_voice([min(max(probability[d], 0.0), 1.0) for d in sorted(drafters)]) for drafters in proposers]
    siblings: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        siblings.setdefault(parent, []).append(node)
    for nodes in siblings.values():
        if len(nodes) > 1:
            odds = [p / (1.0 - p) for p in (min(voices[node], _ALMOST_SURE) for node in nodes)]
            total = 1.0 + sum(odds)
            for node, o in zip(nodes, odds, strict=True):
                voices[node] = o / total
    return voices


def _voice(probabilities: Sequence[float]) -> float:
    """What drafters that say the same are worth together."""
    if len(probabilities) == 1:
        return probabilities[0]
    doubt = 1.0
    for p in probabilities:
        doubt *= 1.0 - p
    return 1.0 - doubt


class TreeCandidate(NamedTuple):
    """A row of the next step."""

    request_id: str
    tree: DraftTree
    """All that was drafted; empty for a row that only decodes."""
    probabilities: Sequence[float]
    """Of each node: chance that it is right given that its parent is."""


def tree_candidate(
    request_id: str, tails: Mapping[str, Sequence[int]], probability: Mapping[str, float]
) -> TreeCandidate:
    """All tails of a request as one tree, the most promising tail first."""
    order = sorted(tails, key=lambda d: (-expected_accepted(probability[d], len(tails[d])), -len(tails[d]), d))
    tree, proposers = merge_tails({drafter_id: tails[drafter_id] for drafter_id in order})
    return TreeCandidate(request_id, tree, node_probabilities(tree, proposers, probability))


def choose_tree_nodes(
    candidates: Sequence[TreeCandidate], step_cost: Callable[[int, int], float]
) -> dict[str, DraftTree]:
    """The nodes to verify per request, so that expected committed tokens per second are the most.

    A row commits one token and one more for each node on the accepted path, so a node gains the probability that the
    path down to it is right, the product of the probabilities along it. A node's gain never exceeds its parent's, and
    the cost depends only on how many positions there are in all: for every total the best choice takes the largest
    gains, and what it takes is closed under parents by itself. So it is enough to compare the totals, and the result
    is exact. A candidate whose tree is a chain of one probability gets what `choose_verify_lengths` gives it.

    Args:
        candidates: All rows of the step, also those without drafts.
        step_cost: (rows, positions) → seconds of a step; `StepCostModel.seconds`. Positions count one per row and one
            per node.

    Returns:
        request id → the tree of the chosen nodes, for every candidate. Of equal quotients the one with fewer nodes.
    """
    losses = sorted(
        (-gain, node, number)
        for number, candidate in enumerate(candidates)
        for node, gain in enumerate(_gains(candidate))
        if gain > 0.0
    )
    count = count_worth_verifying(len(candidates), [loss for loss, _, _ in losses], step_cost)
    kept: list[list[int]] = [[] for _ in candidates]
    for _, node, number in losses[:count]:
        kept[number].append(node)
    return {
        candidate.request_id: candidate.tree.keep(sorted(nodes))
        for candidate, nodes in zip(candidates, kept, strict=True)
    }


def _gains(candidate: TreeCandidate) -> list[float]:
    gains: list[float] = []
    for parent, probability in zip(candidate.tree.parents, candidate.probabilities, strict=True):
        above = gains[parent] if parent >= 0 else 1.0
        gains.append(above * min(max(probability, 0.0), 1.0))
    return gains
