"""The draft loop: keep drafting ahead of the last commit that is known, publish whole tails.

A plain class around a proposer. Other threads only put messages into its inbox and change its list of verifiers; one
thread calls `run`. It knows no Ray: a verifier is a link.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.draft.cost import DraftCost
from specactor_ray.draft.mirrors import DraftCounters, Mirrors
from specactor_ray.drafters.base import KeepsHistory, Proposer
from specactor_ray.loops.commands import Commands
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.messages import CommitBatch, TailBatch
from specactor_ray.queues import inbox
from specactor_ray.queues.link import Link

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""Longest sleep without work; messages wake the loop at once."""
_MAX_FAILURES = 8


class DraftLoop:
    """Drives one proposer, in a thread of its own (`run`) or in that of a verifier (`run_guarded`).

    Args:
        drafter_id: Incarnation id of this draft actor; goes into every message.
        proposer: The draft method.
        clock: What waits and the cost of a draft token are measured by.
    """

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        self.drafter_id = drafter_id
        self.proposer = proposer
        self._clock = clock
        self._looks_up = isinstance(proposer, KeepsHistory)
        self._heartbeat = Heartbeat(clock.now)
        self._cost = DraftCost()
        self._inbox = inbox.for_drafter(proposer.vocab_size, on_cut=self._leave)
        self._wake = clock.event()
        self._stopping = clock.event()
        self._commands = Commands(self._wake.set, self._heartbeat)
        self._mirrors = Mirrors(drafter_id, proposer, clock)
        self._failures_in_a_row = 0

    @property
    def counters(self) -> DraftCounters:
        """What it has done so far."""
        return self._mirrors.counters

    # ---- called from other threads ----

    def deliver(self, message: CommitBatch) -> None:
        """Take a message of a verifier; returns at once. A malformed one is dropped and counted for its sender."""
        self._inbox.put(message)
        self._wake.set()

    def set_verifiers(self, links: Mapping[str, Link[TailBatch]]) -> None:
        """The complete list of verifiers, id → where to send tails. Mirrors of those that left are dropped."""
        self._mirrors.set_verifiers(links)
        for link in links.values():
            link.on_free = self._wake.set
        self._wake.set()

    def _leave(self, verifier_id: str) -> None:
        """Nothing will come of this verifier any more."""
        self._mirrors.leave(verifier_id)
        self._wake.set()

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the proposer's weights between two steps; the future raises what it raises."""
        return self._commands.call(functools.partial(self.proposer.load_weights, version, state_dict))

    def forget_history(self) -> Future[None]:
        """Let the proposer forget earlier outputs, if it keeps any."""
        forget = self.proposer.forget_history if isinstance(self.proposer, KeepsHistory) else lambda: None
        return self._commands.call(forget)

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """Counters, the number of open requests and of messages that wait (`inbox`), what a draft token costs
        (seconds), how long the step under way has taken so far (`busy_s`, 0 when there is none), and what a proposer
        that remembers outputs takes for them."""
        memory = {
            name: getattr(self.proposer, name)
            for name in ("history_tokens", "history_bytes")
            if hasattr(self.proposer, name)
        }
        counters: dict[str, Any] = {**asdict(self.counters), **self._inbox.snapshot()}
        counters |= {"open_requests": len(self._mirrors), "inbox": len(self._inbox), "token_s": self._cost.token_s}
        counters["busy_s"] = self._heartbeat.busy_s
        counters["links"] = {verifier_id: link.snapshot() for verifier_id, link in self._mirrors.links.items()}
        return {**counters, **memory}

    # ---- the loop ----

    def run(self) -> None:
        """Loop until `stop`. A failing proposer is logged and counted; drafts are only a matter of speed. If steps fail
        again and again without drafting in between (a broken device stays broken), the loop ends."""
        while not self._stopping.is_set():
            if not self.run_guarded():
                self._wake.wait(_IDLE_WAIT_S)
            if self._failures_in_a_row >= _MAX_FAILURES:
                logger.error("%s: %d draft steps failed in a row; the loop ends", self.drafter_id, _MAX_FAILURES)
                return

    def run_guarded(self) -> bool:
        """`run_once`; a failure is logged and counted, and loses the open requests."""
        self._heartbeat.begin()
        try:
            worked = self.run_once()
            self.counters.steps += worked
            return worked
        except Exception:
            self.counters.failures += 1
            self._failures_in_a_row += 1
            logger.exception("%s: a draft step failed; its requests will be opened again", self.drafter_id)
            self._mirrors.lose_all()
            return False
        finally:
            self._heartbeat.end()

    def run_once(self) -> bool:
        """Drain, extend, publish. Returns False when there was nothing to do."""
        self._wake.clear()
        self._commands.run()
        mirrors, messages = self._mirrors, self._inbox.drain()
        for message, _ in messages:
            mirrors.take(message)
        mirrors.drop_orphans()
        begin = self._clock.now()
        changed = self.proposer.extend()
        if changed:
            self._note_cost(self._clock.now() - begin, changed, any(message.opened for message, _ in messages))
            self.counters.extends += 1
            self._failures_in_a_row = 0
            mirrors.note_changed(changed)
        mirrors.offer(self._cost.token_s)
        return bool(messages or changed)

    def _note_cost(self, seconds: float, changed: Sequence[str], opened: bool) -> None:
        """Models add a token to each request, lookups whole tails."""
        tokens = len(self.proposer.tails(changed).tokens) if self._looks_up else len(changed)
        self._cost.record(seconds, len(changed), tokens, reads_prompts=opened and not self._looks_up)
