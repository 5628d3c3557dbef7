"""What a verifier knows about each of its drafters: how to reach it, whether to ask it, what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specactor_ray.config.schema import BreakerConfig
from specactor_ray.loops.assignment import DraftSeat
from specactor_ray.messages import DraftTail, ToDrafter
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.acceptance import BreakerState, CircuitBreaker


@dataclass(slots=True)
class DrafterLink:
    """How to reach one drafter."""

    method: str
    window: int
    outbox: Outbox[ToDrafter]
    max_batch: int = 64
    """b_max: most requests it may draft for."""
    reads_features: bool = False
    """It is sent the target's hidden states."""
    remembers: bool = False
    """It looks guesses up and learns from the outputs it follows: it follows all it has room for, race or no race."""
    on_demand: bool = False
    """It runs in the verifier's process and drafts only while a step waits for it."""


@dataclass(slots=True)
class Drafter:
    """What the verifier knows about one drafter."""

    link: DrafterLink
    breaker: CircuitBreaker
    step_drafted: int = 0
    """Draft tokens of this step that were put to the test."""
    step_accepted: int = 0
    heard: bool = True
    """It has sent anything, however stale, since the last wait for it that was in vain."""
    token_s: float = 0.0
    """D: seconds per drafted token for one request at its present load, as it says; 0 if unknown."""
    cost_is_new: bool = False
    """It has said so since somebody looked."""

    def hear(self, tail: DraftTail) -> None:
        """Note what a tail says about its sender."""
        self.heard = True
        if 0.0 < tail.token_s < math.inf:
            self.token_s, self.cost_is_new = tail.token_s, True


class DrafterTable:
    """All drafters of one verifier.

    Args:
        config: When to stop asking a drafter that does not help.
        now: Monotonic seconds.
        cut_off: Drafters that are not listened to any more; may grow.
    """

    def __init__(self, config: BreakerConfig, now: Callable[[], float], cut_off: Container[str] = ()) -> None:
        self._config, self._now, self._cut_off = config, now, cut_off
        self._drafters: dict[str, Drafter] = {}

    def set(self, links: Mapping[str, DrafterLink]) -> list[str]:
        """The complete list of drafters now. Returns the ids of those that left."""
        gone = [drafter_id for drafter_id in self._drafters if drafter_id not in links]
        self._drafters = {
            drafter_id: self._drafters.get(drafter_id) or Drafter(link, CircuitBreaker(self._config))
            for drafter_id, link in links.items()
        }
        return gone

    def get(self, drafter_id: str) -> Drafter | None:
        return self._drafters.get(drafter_id)

    def __getitem__(self, drafter_id: str) -> Drafter:
        return self._drafters[drafter_id]

    def __iter__(self) -> Iterator[Drafter]:
        return iter(self._drafters.values())

    def __len__(self) -> int:
        return len(self._drafters)

    def reachable(self, drafter_id: str, now: float) -> bool:
        """It may be asked and waited for. Raises KeyError for an unknown id."""
        drafter = self._drafters[drafter_id]
        return drafter.link.outbox.failed is None and drafter_id not in self._cut_off and drafter.breaker.allows(now)

    @property
    def methods(self) -> dict[str, str]:
        """Drafter id → method."""
        return {drafter_id: drafter.link.method for drafter_id, drafter in self._drafters.items()}

    @property
    def remembering(self) -> frozenset[str]:
        """Methods that follow every request they have room for, since they learn from it."""
        return frozenset(drafter.link.method for drafter in self if drafter.link.remembers)

    def links(self) -> list[tuple[str, DrafterLink]]:
        """Drafter id and how to reach it."""
        return [(drafter_id, drafter.link) for drafter_id, drafter in self._drafters.items()]

    def seats(self) -> dict[str, DraftSeat]:
        """What the assignment has to know."""
        now = self._now()
        return {
            drafter_id: DraftSeat(drafter.link.method, drafter.link.max_batch, self.reachable(drafter_id, now))
            for drafter_id, drafter in self._drafters.items()
        }

    def of_method(self, method: str) -> list[Drafter]:
        return [drafter for drafter in self if drafter.link.method == method]

    def post(self, drafter_id: str, message: ToDrafter) -> None:
        """Queue a message; it goes out with the next `flush`. Drafters that are gone are ignored."""
        drafter = self._drafters.get(drafter_id)
        if drafter is not None:
            drafter.link.outbox.queue([message])

    def flush(self) -> None:
        """Send off what is queued for drafters that are not still busy with the last delivery."""
        for drafter in self:
            drafter.link.outbox.flush()

    def end_step(self) -> None:
        """Judge every drafter by the step that has ended."""
        for drafter in self:
            drafter.breaker.record(drafter.step_drafted, drafter.step_accepted)
            drafter.step_drafted = drafter.step_accepted = 0

    def states(self) -> tuple[bool, ...]:
        """Which drafters are off, by their breakers or because they are out of reach; changes call for a new
        assignment. Looks at all of them without letting a probe begin."""
        return tuple(
            drafter.breaker.state is BreakerState.OPEN
            or drafter.link.outbox.failed is not None
            or drafter_id in self._cut_off
            for drafter_id, drafter in self._drafters.items()
        )

    def links_snapshot(self) -> dict[str, Any]:
        """How deliveries to each drafter fare, for status displays; may be called from any thread."""
        return {drafter_id: drafter.link.outbox.snapshot() for drafter_id, drafter in list(self._drafters.items())}

    def snapshot(self) -> dict[str, Any]:
        """State of the breakers, for status displays; may be called from any thread."""
        return {
            drafter_id: {
                "state": str(drafter.breaker.state),
                "openings": drafter.breaker.openings,
                "reason": drafter.breaker.reason,
            }
            for drafter_id, drafter in list(self._drafters.items())
        }
