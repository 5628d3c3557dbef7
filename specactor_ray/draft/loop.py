"""The draft loop: drafts ahead of the last known commits, publishes whole tails, and watches how many are right.

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
from zlib import crc32

import numpy as np

from specactor_ray.config.methods import Checkpoint, Traits
from specactor_ray.config.schema import MAX_BRANCHES
from specactor_ray.core.clock import IDLE_WAIT_S, SYSTEM, Clock, Loop
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.step_cost import StepCost
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.requests import DraftRequests
from specactor_ray.transport import inbox
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, TailBatch, WeightSet

logger = logging.getLogger(__name__)

_MAX_FAILURES = 8
_MOST_COSTS = 31
"""Most measurements of the seconds per draft token that are kept."""
ENOUGH = 200
"""Wrong draft tokens in a row that raise the alarm. With 3% right tokens, one such row in 440 is a false alarm."""
_SAMPLED = 1024
"""Most values of a tensor in a checksum, evenly spread."""


def checksum(state_dict: Mapping[str, Any]) -> str:
    """Checksum of names and sampled values of tensors, on any device: eight hex digits, or empty without tensors."""
    total = 0
    for name in sorted(state_dict):
        values = state_dict[name].detach().reshape(-1)
        sample = values[:: values.numel() // _SAMPLED + 1].float().cpu().numpy()
        total = crc32(sample.tobytes(), crc32(name.encode(), total))
    return f"{total:08x}" if state_dict else ""


class Health:
    """Counts since the newest weights, and the alarm of a drafter. Not thread-safe, except `to_dict`. Methods without
    weights have no alarm: a lookup finds nothing right where outputs do not repeat."""

    def __init__(self, drafter_id: str, method: str, traits: Traits) -> None:
        self._drafter_id, self._method = drafter_id, method
        self._has_weights = traits.checkpoint is not Checkpoint.NONE
        self._version, self._checksum = 0, ""
        self._tried = self._right = self._missed = 0
        self._seen = (0, 0)
        self._alarm = False

    def renew(self, version: int, weights: str) -> None:
        """Begin the counts of new weights with this checksum. An alarm stays until a token is right."""
        self._version, self._checksum = version, weights
        self._tried = self._right = self._missed = 0

    def observe(self, tried: int, right: int) -> str:
        """Take the totals of `Proposer.judged`. Returns a message for the log when the alarm begins or ends."""
        tries, hits = tried - self._seen[0], right - self._seen[1]
        if not tries:
            return ""
        self._seen = tried, right
        self._tried, self._right = self._tried + tries, self._right + hits
        self._missed = 0 if hits else self._missed + tries
        was, self._alarm = self._alarm, self._has_weights and self._missed >= (1 if self._alarm else ENOUGH)
        name = f"{self._drafter_id} ({self._method})"
        if self._alarm and not was:
            return (
                f"{name}: none of its last {self._missed} draft tokens was right, with weights of version "
                f"{self._version} (checksum {self._checksum or 'none'}). Outputs are not affected, their speed is. "
                "Fix: compare the checksum with those of other drafters (specactor status); check drafters.N.model "
                "and online of the method, or remove it"
            )
        if was and not self._alarm:
            return f"{name}: its draft tokens are right again, with weights of version {self._version}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Method, version and checksum of the weights, draft tokens `tried` and `right` since then, `missed` since the
        last right one, and `alarm`."""
        names = ("method", "version", "checksum", "tried", "right", "missed", "alarm")
        return {name: getattr(self, f"_{name}") for name in names}


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

    def load_weights(self, weights: WeightSet, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the proposer's weights between two steps; the future raises its errors."""
        return self.call(functools.partial(self.take_weights, weights.version, state_dict))

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
        if hasattr(self.proposer, "history_tokens"):
            counters["history_tokens"] = self.proposer.history_tokens
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
            proposer.budget = len(requests) * (1 + MAX_BRANCHES) if self._cost.is_known else 0
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
