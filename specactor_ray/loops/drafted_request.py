"""The drafting side of one running request, as its verifier keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from specactor_ray.drafters.mirror import common_prefix
from specactor_ray.messages import Features
from specactor_ray.targets.base import RowOutput, TargetRequest

_KEPT_POSITIONS = 2048
"""Hidden states kept per request, at least those of so many of the newest positions, for drafters that join later."""


@dataclass(slots=True)
class DraftedRequest:
    """What its drafters said for the step under way, and what became of their drafts so far."""

    request: TargetRequest
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    """Drafter id → [drafted, accepted], of tails that were verified."""
    chosen: str | None = None
    """Drafter whose tail is in the step under way; of a tree, one with the longest tail."""
    branches: dict[str, int] = field(default_factory=dict)
    """If a tree is in the step under way: drafter id → how many tokens of its tail the tree holds."""
    usable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Usable tails of its drafters when the step under way began."""
    answered: tuple[str, ...] = ()
    """Drafters that had said something about its newest commit then, be it that they have no guess."""
    features: list[Features] = field(default_factory=list)
    """Hidden states of the newest positions, for drafters that join later."""

    def credit(self, output: RowOutput) -> Iterator[tuple[str, int, int]]:
        """Count what was verified for those who drafted it, and yield (drafter id, drafted, accepted). A node of a tree
        counts for each drafter it came from, so these may add up to more than the counts of the request."""
        if not self.chosen or not output.num_drafted:
            return
        right = output.token_ids[: output.num_accepted]
        for drafter_id, length in (self.branches or {self.chosen: output.num_drafted}).items():
            tail = self.usable[drafter_id][: min(length, output.num_drafted)]
            if not tail:
                continue
            accepted = common_prefix(tail, right)
            pair = self.by_drafter.setdefault(drafter_id, [0, 0])
            pair[0] += len(tail)
            pair[1] += accepted
            yield drafter_id, len(tail), accepted

    def keep_features(self, output: RowOutput) -> tuple[Features, ...]:
        """What the step exported of this request, as it travels; kept for drafters that join later too."""
        if output.hidden_states is None:
            return ()
        features = Features(output.hidden_start, output.hidden_states)
        self.features.append(features)
        while features.end - self.features[0].end >= _KEPT_POSITIONS:
            self.features.pop(0)
        return (features,)

    def end_step(self) -> None:
        """The step is over: what was said for it is of no more use."""
        self.usable, self.chosen, self.branches, self.answered = {}, None, {}, ()
