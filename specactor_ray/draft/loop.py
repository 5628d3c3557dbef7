"""The draft loop: drafts ahead of the last known commits, and publishes whole tails.

A plain class around a proposer, without Ray: a verifier is a link. Other threads deliver messages and commands; one
thread calls `run`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from specactor_ray.core.clock import IDLE_WAIT_S, SYSTEM, Clock, Loop
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.requests import DraftRequests
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.transport import inbox
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, TailBatch, WeightSet

logger = logging.getLogger(__name__)

_MAX_FAILURES = 8


class DraftLoop(Loop):
    """Drives one proposer in its own thread (`run`), over a replica of its requests. `drafter_id`, the incarnation id
    of this draft actor, is part of every message."""

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        super().__init__(clock)
        self.drafter_id = drafter_id
        self.proposer = proposer
        self.runner = DraftRunner(drafter_id, proposer, clock)
        self._inbox = inbox.for_drafter()
        self._links: Mapping[str, Link[TailBatch]] = {}
        """Verifier id → link for tails; any thread may replace it."""
        self.requests = DraftRequests(self.runner)

    # ---- called from other threads ----

    def deliver(self, message: CommitBatch) -> None:
        """Queue a message of a verifier; returns at once. A malformed one is dropped and counted for its sender."""
        self._inbox.put(message)
        self._wake.set()

    def set_verifiers(self, links: Mapping[str, Link[TailBatch]]) -> None:
        """Replace the list of verifiers, id → link for tails. Requests of removed verifiers are dropped."""
        for link in links.values():
            link.on_free = self._wake.set
        self._links = dict(links)
        self._wake.set()

    def load_weights(self, weights: WeightSet, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the proposer's weights between two steps; the future raises its errors."""
        return self.call(functools.partial(self.runner.load_weights, weights.version, state_dict))

    def forget_history(self) -> Future[None]:
        """Clear the proposer's history between two steps."""
        return self.call(self.proposer.forget_history)

    def snapshot(self) -> dict[str, Any]:
        """`DraftRunner.snapshot`, queued messages (`inbox`) and links, and seconds of the running step (`busy_s`)."""
        counters = {**self.runner.snapshot(), **self._inbox.snapshot(), "inbox": len(self._inbox)}
        counters |= {"open_requests": len(self.requests), "busy_s": self.busy_s}
        counters["links"] = {verifier_id: link.snapshot() for verifier_id, link in self._links.items()}
        return counters

    # ---- the loop ----

    def run(self) -> None:
        """Loop until `stop`. Failed steps are logged and counted; after `_MAX_FAILURES` in a row the loop ends."""
        while not self._stopping.is_set():
            if not self.run_once():
                self._wake.wait(IDLE_WAIT_S)
            if self.runner.failures_in_a_row >= _MAX_FAILURES:
                logger.error("%s: %d draft steps failed in a row; the loop ends", self.drafter_id, _MAX_FAILURES)
                return

    def _step(self, begin: float) -> bool:
        """Drain, draft, publish."""
        messages, requests = self._inbox.drain(), self.requests
        for message in messages:
            self.runner.attempt("a message cannot be applied", requests.take, message)
        changed = self.runner.run(requests.view, requests.rows)
        requests.publish(changed, self._links, self.runner.token_s)
        return bool(messages) or len(changed) > 0
