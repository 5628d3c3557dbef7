"""The verifier's loop: verify the best draft tail of every running request, commit what is right, tell everyone.

A plain class around a target engine. Other threads put requests, drafts and drafter lists in; one thread calls
`run`. It knows no Ray: a drafter is a link, the rollout is an event queue. Nothing a drafter does can change a
token (the engine checks every draft token) or block one (every wait is bounded).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.loops.commands import Commands
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.messages import TailBatch, ToRollout
from specactor_ray.spec.policy import Positions, Seconds
from specactor_ray.targets.base import Tail, TargetEngine, TargetRequest
from specactor_ray.verify.drafting import Drafting
from specactor_ray.verify.inline import InlineDrafter, InlineDrafters
from specactor_ray.verify.metrics import StepMetrics
from specactor_ray.verify.requests import Requests
from specactor_ray.verify.seat import DrafterLink

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""Longest sleep without work; messages wake the loop at once."""


class VerifyLoop:
    """Drives one target engine.

    Args:
        engine: The target; only the loop's thread touches it after `run` began.
        drafting: The side of drafts: who drafts, what is verified, whom to tell.
        inline: Drafters in this process, which the loop drives; the others are made known by `set_drafters`.
        clock: What steps and waits are measured by; the same as of `drafting`.
    """

    def __init__(
        self,
        engine: TargetEngine,
        drafting: Drafting,
        inline: Sequence[InlineDrafter] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self.vocab_size = engine.vocab_size
        self.error: BaseException | None = None
        """What ended the loop, if the engine failed."""
        self._engine, self._clock = engine, clock
        self._drafting, self._table = drafting, drafting.table
        self._suspension = drafting.policy.suspension
        self._wake = clock.event()
        self._stopping = clock.event()
        self._heartbeat = Heartbeat(clock.now)
        self._commands = Commands(self._wake.set, self._heartbeat)
        self._requests = Requests(engine, drafting, clock)
        self._inline = InlineDrafters(drafting.verifier_id, inline, drafting.inbox.put, clock)
        self._links: Mapping[str, DrafterLink] = {}
        if inline:
            self.set_drafters({})

    # ---- called from other threads ----

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        """Queue requests; submitting one again is harmless.

        A request that can never run comes back as `Finished` with its reason, one that asks for other weights than
        those loaded as `Refused`. An attempt that runs or has ended, or one older than that, is ignored; a newer one
        takes the place of the older without a `Finished` for it.
        """
        for request in requests:
            self._commands.put(functools.partial(self._requests.add, request))

    def cancel(self, items: Sequence[tuple[str, int]]) -> None:
        """Drop requests without a `Finished`: pairs of request id and attempt.

        An older attempt that runs is dropped too, a newer one is not. Should the submission of a cancelled attempt
        still arrive, it is ignored.
        """
        for request_id, attempt in items:
            self._commands.put(functools.partial(self._requests.cancel, request_id, attempt))

    def deliver(self, message: TailBatch) -> None:
        """Take a message of a drafter; returns at once."""
        self._drafting.inbox.put(message)
        self._wake.set()

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters in other processes, by id."""
        self._links = links
        self._commands.put(lambda: self._drafting.set_drafters({**self._inline.links, **links}))

    @property
    def drafter_links(self) -> Mapping[str, DrafterLink]:
        """The drafters in other processes as they were set last."""
        return self._links

    def reset_metrics(self) -> None:
        """Set all counters to zero."""

        def clear() -> None:
            self._requests.metrics = StepMetrics()

        self._commands.put(clear)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights between two steps. Requests that still run are dropped without a `Finished`, since an
        output must not mix two versions: whoever sends new weights has given them up. Weights that are not newer than
        those loaded are ignored: the message came twice, or late."""
        return self._commands.call(functools.partial(self._load_weights, version, state_dict))

    def teach(self, method: str, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights of a drafter of this process between two steps."""
        return self._commands.call(functools.partial(self._inline.teach, method, version, state_dict))

    def forget_history(self) -> Future[None]:
        """Let the drafters of this process forget earlier outputs."""
        return self._commands.call(self._inline.forget_history)

    def sleep(self) -> Future[None]:
        """Give up the cache's memory until `wake`."""
        return self._commands.call(self._engine.sleep)

    def wake(self) -> Future[None]:
        """Take the memory back."""
        return self._commands.call(self._engine.wake)

    def poll(self, after: int, timeout_s: float, linger_s: float = 0.0) -> tuple[int, list[ToRollout]]:
        """Events for the rollout; see `Requests.poll`."""
        return self._requests.poll(after, timeout_s, linger_s)

    @property
    def metrics(self) -> StepMetrics:
        """Counters since the last `reset_metrics`."""
        return self._requests.metrics

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """Counters of the loop and of the drafts. `inbox`: messages of drafters that wait. `busy_s`: seconds since the
        step or command under way began, 0 when there is none; for how long the engine, or whatever else runs in the
        loop's thread, has not come back."""
        counters = {**self.metrics.to_dict(), **self._drafting.snapshot()}
        loads = {
            "running": len(self._requests),
            "inbox": len(self._drafting.inbox),
            "weight_version": self._engine.weight_version,
            "busy_s": self._heartbeat.busy_s,
        }
        return {**counters, **loads, "inline": self._inline.snapshot()}

    # ---- the loop ----

    def run(self) -> None:
        """Loop until `stop`, then close the engine. An engine that fails ends the loop; `error` then says why."""
        try:
            while not self._stopping.is_set():
                if not self.run_once():
                    self._wake.wait(_IDLE_WAIT_S)
        except Exception as error:
            self.error = error
            logger.exception("the verifier's engine failed")
        finally:
            self._close_engine()

    def _close_engine(self) -> None:
        """What an engine has outside this process (ranks, shared memory) would outlive a process that is killed."""
        try:
            self._engine.close()
        except Exception:
            logger.exception("the verifier's engine did not close in order")

    def run_once(self) -> bool:
        """One step. Returns False when there was nothing to do."""
        begin = self._heartbeat.begin()
        try:
            return self._step(begin)
        finally:
            self._heartbeat.end()

    def _step(self, begin: float) -> bool:
        self._wake.clear()
        if self._commands.run():
            self._requests.publish()
        if not self._engine.has_work():
            self._drafting.take_messages()
            self._drafting.flush()
            self._inline.draft()  # nothing but to close what has ended
            return False
        rows = self._requests.decoding()
        waiting_s = self._await_drafts(rows)
        seats, tails = self._choose(rows)
        result = self._engine.step(tails)
        accepted = self._requests.commit(result, rows, seats)
        self._requests.publish()
        if not self._suspension.is_quiet:
            self._drafting.flush()
        seconds = Seconds(self._clock.now() - begin, result.forward_s + result.sampling_s, waiting_s)
        self.metrics.record_step(result, seconds, len(self._drafting) > 0 and self._suspension.is_on)
        positions = Positions(result.num_tokens, result.num_prefill_tokens)
        self._drafting.policy.record(len(rows), positions, accepted, seconds)
        return True

    # ---- drafts ----

    def _await_drafts(self, rows: np.ndarray) -> float:
        """Take what drafters sent; wait, bounded, where a wait pays. Returns the seconds spent waiting."""
        drafting, policy = self._drafting, self._drafting.policy
        if not len(drafting) or self._suspension.is_quiet:
            return 0.0
        self._inline.look_up()
        drafting.take_messages()
        drafting.revise(rows)
        if not len(rows) or self._suspension.is_on:
            return 0.0
        rounds, seconds = policy.plan_wait(rows)
        if not rounds or policy.is_served(rows):
            return 0.0
        drafting.flush()
        begin = self._clock.now()
        served = False
        while not served and not self._stopping.is_set():
            left = begin + seconds - self._clock.now()
            if left <= 0:
                drafting.note_silence(seconds)
                break
            if not self._inline.draft():
                if not self._links:
                    break  # nobody is left who could answer
                self._wake.wait(left)
                self._wake.clear()
            if drafting.take_messages():
                served = policy.is_served(rows)
        return self._clock.now() - begin

    def _choose(self, rows: np.ndarray) -> tuple[np.ndarray, dict[str, Tail]]:
        """What to verify: `(rows,)` whose tail, and request → tail."""
        if not len(self._drafting) or not len(rows) or self._suspension.is_on:
            return np.full(len(rows), -1, np.int32), {}
        seats, lengths = self._drafting.policy.choose(rows)
        chosen = np.flatnonzero(lengths)
        tails = self._table.tail[seats[chosen], rows[chosen]].tolist()
        requests, counts = self._table.requests, lengths[chosen].tolist()
        return seats, {
            requests[row].request_id: tail[:count]  # type: ignore[union-attr]
            for row, tail, count in zip(rows[chosen].tolist(), tails, counts, strict=True)
        }

    def _load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if version <= self._engine.weight_version:
            return
        self._requests.clear()
        self._engine.load_weights(version, state_dict)
        self._inline.load_weights(version, state_dict)
