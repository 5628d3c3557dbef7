"""Which verifiers get a version of weights by broadcast; without processes and without a clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

_MOST_FAILED = 3
"""Failed broadcasts in a row after which there are no more."""


class Broadcasts:
    """Plans of broadcasts. The object store has every version, so a plan that fails costs time only.

    A version is planned once, for the verifiers that it is sent to first. Each gets it once with its rank; a repeated
    load, and a verifier that joins later, get it from the object store. A plan ends with the answer of the sender. A
    version that comes before this end has no plan: it does not wait for a receiver that hangs.
    """

    def __init__(self) -> None:
        self._version, self._is_open, self._failed = 0, False, 0
        self._planned: WeightSet | None = None
        self._ranks = dict[str, int]()
        """Verifiers that have not got the planned version yet."""

    def plan(self, weights: WeightSet, verifiers: Sequence[str]) -> WeightSet | None:
        """The version as its sender gets it, if it goes to these verifiers by broadcast."""
        if weights.broadcast is None or weights.version <= self._version or not verifiers:
            return None
        self._version, self._ranks = weights.version, {}
        if self._is_open or self._failed >= _MOST_FAILED:
            return None
        self._is_open, self._ranks = True, {name: rank for rank, name in enumerate(verifiers, 1)}
        # Other runs may broadcast the same version of the same trainer.
        group = f"{weights.version} to {verifiers[0]}"
        self._planned = replace(weights, broadcast=replace(weights.broadcast, group=group, size=1 + len(verifiers)))
        return self._planned

    def of(self, weights: WeightSet, verifier: str) -> WeightSet:
        """The version as this verifier gets it now."""
        if weights.broadcast is None:
            return weights
        planned, rank = self._planned, self._ranks.pop(verifier, 0) if weights.version == self._version else 0
        if not rank or planned is None or planned.broadcast is None:
            return replace(weights, broadcast=None)
        return replace(planned, broadcast=replace(planned.broadcast, rank=rank))

    def end(self, problem: str) -> None:
        """Take the answer of the sender: empty, or why the broadcast failed."""
        self._is_open, self._failed, self._ranks = False, self._failed + 1 if problem else 0, {}
        if not problem:
            return
        logger.warning("weights of version %d come from the object store: %s", self._version, problem)
        if self._failed == _MOST_FAILED:
            logger.error(
                "%d broadcasts of weights failed in a row; there are no more in this run. Fix: open the ports between "
                "the nodes, or use trainer.weight_transport=object_store",
                self._failed,
            )
