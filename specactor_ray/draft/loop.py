"""The draft loop: drafts ahead of the last known commits and publishes whole tails.

A plain class around a proposer, without Ray: a verifier is a link. Other threads deliver messages and commands; one
thread calls `run`.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from specactor_ray.config.schema import MAX_BRANCHES
from specactor_ray.core.clock import IDLE_WAIT_S, SYSTEM, Clock, Loop
from specactor_ray.core.environment import fallbacks
from specactor_ray.draft.health import Health, checksum
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.requests import DraftRequests
from specactor_ray.plan.costs import StepCost
from specactor_ray.transport import inbox
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, TailBatch

logger = logging.getLogger(__name__)

_MAX_FAILURES = 8
_MOST_COSTS = 31
"""Most measurements of the seconds per draft token that are kept."""


class DraftLoop(Loop):
    """Drives one proposer, in its own thread (`run`) or in that of a verifier (`run_guarded`). `drafter_id`, the
    incarnation id of this draft actor, is part of every message."""

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        super().__init__(clock)
        self.drafter_id = drafter_id
        self.proposer = proposer
        self._inbox = inbox.for_drafter(proposer.vocab_size)
        self._links: Mapping[str, Link[TailBatch]] = {}
        """Verifier id → link for tails; any thread may replace it."""
        self._requests = DraftRequests(drafter_id, proposer)
        self._health = Health(drafter_id, proposer.method, proposer.traits)
        self._costs = deque[float](maxlen=_MOST_COSTS)
        self._token_s = 0.0
        """Lower quartile of `_costs` in seconds, which leaves out delayed forwards and those that read prompts."""
        self._cost = StepCost()
        """Seconds of a forward by its rows, each with one token."""
        self._failures_in_a_row = 0

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

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the proposer's weights between two steps; the future raises its errors."""
        return self.call(functools.partial(self.take_weights, version, state_dict))

    def forget_history(self) -> Future[None]:
        """Clear the proposer's history between two steps."""
        return self.call(self.proposer.forget_history)

    def snapshot(self) -> dict[str, Any]:
        """Counters, open requests, queued messages (`inbox`), seconds per draft token of a model (`token_s`) and of the
        running step (`busy_s`), `Health.to_dict`, and the size of the proposer's history."""
        counters: dict[str, Any] = {**self._requests.counters, **self._inbox.snapshot()}
        counters |= {"open_requests": len(self._requests), "inbox": len(self._inbox), "token_s": self._token_s}
        counters |= {"busy_s": self.busy_s, "fallbacks": fallbacks(), "health": self._health.to_dict()}
        counters["cost"] = self._cost.points()
        counters["failures"] = len(self._requests.failures) + len(getattr(self.proposer, "failures", ()))
        counters["links"] = {verifier_id: link.snapshot() for verifier_id, link in self._links.items()}
        for name in ("history_tokens", "history_bytes"):
            if hasattr(self.proposer, name):
                counters[name] = getattr(self.proposer, name)
        return counters

    # ---- the loop ----

    def take_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the proposer's weights, in the thread of the loop; raises its errors."""
        self.proposer.load_weights(version, state_dict)
        self._health.renew(version, checksum(state_dict))

    def run(self) -> None:
        """Loop until `stop`. Failed steps are logged and counted; after `_MAX_FAILURES` in a row the loop ends."""
        while not self._stopping.is_set():
            if not self.run_guarded():
                self._wake.wait(IDLE_WAIT_S)
            if self._failures_in_a_row >= _MAX_FAILURES:
                logger.error("%s: %d draft steps failed in a row; the loop ends", self.drafter_id, _MAX_FAILURES)
                return

    def run_guarded(self) -> bool:
        """`run_once`; a failure is logged, counted, and drops the open requests."""
        try:
            return self.run_once()
        except BaseException as error:  # noqa: BLE001 - a user's class may call sys.exit; the thread has to go on
            self._failures_in_a_row += 1
            what = f"{self.drafter_id}: a draft step failed, its requests are opened again"
            self._requests.failures.add(what, error)
            self._requests.lose_all()
            return False

    def take_turn(self, most: int) -> int:
        """`run_guarded` with at most `most` tokens per request. Returns their number, at least 1; 0: nothing to do."""
        self.proposer.burst = most
        return max(self.proposer.drafted, 1) if self.run_guarded() else 0

    def _step(self, begin: float) -> bool:
        """Drain, extend, publish."""
        messages = self._inbox.drain()
        for message in messages:
            self._requests.take(message)
        proposer, requests = self.proposer, self._requests
        if proposer.traits.branches:
            proposer.budget = len(requests) * (1 + MAX_BRANCHES) if self._cost.is_known and requests.began else 0
            proposer.forward_s = self._cost.curve(0, proposer.budget)
        begin = self._clock.now()
        changed = np.asarray(proposer.extend(), np.int32)
        if len(changed):
            if not proposer.traits.looks_up:
                self._costs.append((self._clock.now() - begin) / max(proposer.drafted, 1))
                self._cost.record(proposer.rows_drafted, self._costs[-1])
                self._token_s = sorted(self._costs)[len(self._costs) // 4]
            requests.counters["extends"] += 1
            self._failures_in_a_row = 0
        requests.publish(changed, self._links, self._token_s)
        if news := self._health.observe(*proposer.judged.tolist()):
            logger.warning("%s", news)
        return bool(messages) or len(changed) > 0
