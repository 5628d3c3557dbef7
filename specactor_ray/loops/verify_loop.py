"""The verifier's loop: verify the best draft tail of every running request, commit what is right, tell everyone.

A plain class around a target engine. Other threads put requests, drafts and drafter lists in; one thread calls
`run`. It knows no Ray: a drafter is an outbox, the rollout is an event queue. Nothing a drafter does can change a
token (the engine checks every draft token) or block one (every wait is bounded).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.errors import InputError
from specactor_ray.loops.attempts import EndedAttempts
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.loops.inline_drafters import InlineDrafter, InlineDrafters
from specactor_ray.loops.speculator import Speculator
from specactor_ray.loops.step_metrics import StepMetrics
from specactor_ray.messages import Finished, Progress, Refused, RequestStats, ToRollout, ToVerifier
from specactor_ray.queues.events import EventQueue
from specactor_ray.targets.base import RowOutput, TargetEngine, TargetRequest

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""Longest sleep without work; messages wake the loop at once."""


@dataclass(slots=True)
class _Tally:
    """Counters of one running request."""

    attempt: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    supplied_steps: int = 0


class VerifyLoop:
    """Drives one target engine.

    Args:
        engine: The target; only the loop's thread touches it after `run` began.
        speculator: The side of drafts: which tails there are, which to verify, whom to tell.
        inline: Drafters in this process, which the loop drives; the others are made known by `set_drafters`.
        clock: What steps and waits are measured by; the same as the speculator's.
    """

    def __init__(
        self,
        engine: TargetEngine,
        speculator: Speculator,
        inline: Sequence[InlineDrafter] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self.metrics = StepMetrics()
        self.vocab_size = engine.vocab_size
        self.error: BaseException | None = None
        """What ended the loop, if the engine failed."""
        self._engine, self._clock = engine, clock
        self._speculator = speculator
        speculator.use_metrics(self.metrics)
        self._events: EventQueue[ToRollout] = EventQueue(clock)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = clock.event()
        self._ended = clock.event()
        self._stopping = clock.event()
        self._tallies: dict[str, _Tally] = {}
        self._ended_attempts = EndedAttempts()
        self._heartbeat = Heartbeat(clock.now)
        self._fresh: list[ToRollout] = []
        """Events of the step under way."""
        self._inline = InlineDrafters(speculator.verifier_id, inline, speculator.inbox.put, clock)
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
            self._command(functools.partial(self._add, request))

    def cancel(self, items: Sequence[tuple[str, int]]) -> None:
        """Drop requests without a `Finished`: pairs of request id and attempt.

        An older attempt that runs is dropped too, a newer one is not. Should the submission of a cancelled attempt
        still arrive, it is ignored.
        """
        for request_id, attempt in items:
            self._command(functools.partial(self._cancel, request_id, attempt))

    def deliver(self, messages: Sequence[ToVerifier]) -> None:
        """Take messages of drafters; returns at once."""
        self._speculator.inbox.put(messages)
        self._wake.set()

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters in other processes, by id."""
        self._links = links
        self._command(lambda: self._speculator.set_drafters({**self._inline.links, **links}))

    @property
    def drafter_links(self) -> Mapping[str, DrafterLink]:
        """The drafters in other processes as they were set last."""
        return self._links

    def reset_metrics(self) -> None:
        """Set all counters to zero."""
        self._command(self._clear_metrics)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights between two steps. Requests that still run are dropped without a `Finished`, since an
        output must not mix two versions: whoever sends new weights has given them up. Weights that are not newer than
        those loaded are ignored: the message came twice, or late."""
        return self._call(functools.partial(self._load_weights, version, state_dict))

    def forget_history(self) -> Future[None]:
        """Let the drafters of this process forget earlier outputs."""
        return self._call(self._inline.forget_history)

    def sleep(self) -> Future[None]:
        """Give up the cache's memory until `wake`."""
        return self._call(self._engine.sleep)

    def wake(self) -> Future[None]:
        """Take the memory back."""
        return self._call(self._engine.wake)

    def poll(self, after: int, timeout_s: float, linger_s: float = 0.0) -> tuple[int, list[ToRollout]]:
        """Events from number `after` on, waiting up to `timeout_s` seconds for the first; see `EventQueue.read`.

        After that `linger_s` more are granted, or until a request has ended, so that a step that only makes progress
        is not interrupted by a poll of its own. Events before `after` are forgotten, the others are kept: a poll whose
        answer was lost can be repeated.

        Returns:
            Number of the first event returned, and the events.
        """
        first, events = self._events.read(after, timeout_s)
        if linger_s <= 0 or not events:
            return first, events
        if all(isinstance(event, Progress) for event in events):
            self._ended.wait(linger_s)
        self._ended.clear()  # before reading: whatever ends from now on wakes the next poll
        return self._events.read(after)

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """Counters of the loop and of the drafts. `inbox`: messages of drafters that wait. `busy_s`: seconds since the
        step or command under way began, 0 when there is none; for how long the engine, or whatever else runs in the
        loop's thread, has not come back."""
        counters = {**self.metrics.to_dict(), **self._speculator.snapshot()}
        loads = {
            "running": len(self._tallies),
            "inbox": len(self._speculator.inbox),
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
        self._run_commands()
        if not self._engine.has_work():
            self._speculator.take_messages()
            self._speculator.flush()
            self._inline.draft()  # nothing but to close what has ended
            return False
        decoding = self._engine.decoding()
        waiting_s = self._await_drafts(decoding)
        tails = self._speculator.choose_tails(decoding)
        result = self._engine.step(tails)
        for output in result.outputs:
            self._commit(output)
        self._publish()
        self._speculator.observe_step(result)
        self._speculator.flush()
        self.metrics.record_step(result, self._clock.now() - begin, waiting_s)
        return True

    def _command(self, command: Callable[[], Any]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the loop's thread; the future has its outcome."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._command(run)
        return future

    def _load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if version <= self._engine.weight_version:
            return
        for request_id in list(self._tallies):
            self._drop(request_id, finished=False)
        self._engine.load_weights(version, state_dict)
        self._inline.load_weights(version, state_dict)

    def _clear_metrics(self) -> None:
        self.metrics = StepMetrics()
        self._speculator.use_metrics(self.metrics)

    def _run_commands(self) -> None:
        if self._commands.empty():
            return
        while not self._commands.empty():
            self._heartbeat.begin()
            self._commands.get()()
        self._heartbeat.begin()
        self._publish()

    def _await_drafts(self, decoding: Sequence[str]) -> float:
        """Take what drafters sent; wait, bounded, where a wait pays. Returns the seconds spent waiting."""
        self._inline.look_up()
        self._speculator.take_messages()
        begin = self._clock.now()
        deadline = self._speculator.plan_waits(decoding)
        if deadline <= begin or self._speculator.all_answered(decoding):
            return 0.0
        self._speculator.flush()
        answered = False
        while not answered and not self._stopping.is_set():
            left = deadline - self._clock.now()
            if left <= 0:
                break
            if not self._inline.draft():
                if not self._links:
                    break  # nobody is left who could answer
                self._wake.wait(left)
                self._wake.clear()
            self._speculator.take_messages()
            self._speculator.flush()
            answered = self._speculator.all_answered(decoding)
        self._speculator.record_wait(decoding, answered)
        return self._clock.now() - begin

    def _publish(self) -> None:
        """Hand out the events of this step, all at once."""
        if not self._fresh:
            return
        events, self._fresh = self._fresh, []
        self._events.put(events)
        if not all(isinstance(event, Progress) for event in events):
            self._ended.set()

    def _add(self, request: TargetRequest) -> None:
        request_id, attempt = request.request_id, request.attempt
        running = self._tallies.get(request_id)
        if self._ended_attempts.covers(request_id, attempt) or (running is not None and running.attempt >= attempt):
            return
        if running is not None:
            self._drop(request_id, finished=False)
        loaded = self._engine.weight_version
        if request.weight_version != loaded:
            reason = f"it asks for weights of version {request.weight_version}; those loaded are of version {loaded}"
            self._ended_attempts.note(request_id, attempt)
            self._fresh.append(Refused(request_id, attempt, reason))
            return
        try:
            self._engine.add(request)
        except InputError as error:
            self.metrics.failed_requests += 1
            committed = len(request.committed_token_ids)
            self._ended_attempts.note(request_id, attempt)
            self._fresh.append(Finished(request_id, "error", RequestStats(), str(error), committed, attempt))
            return
        self._tallies[request_id] = _Tally(attempt)
        self._speculator.open(request)

    def _cancel(self, request_id: str, attempt: int) -> None:
        self._ended_attempts.note(request_id, attempt)
        running = self._tallies.get(request_id)
        if running is not None and running.attempt <= attempt:
            self._drop(request_id, finished=False)

    def _drop(self, request_id: str, finished: bool) -> None:
        self._engine.remove(request_id)
        self._tallies.pop(request_id, None)
        self._speculator.close(request_id, finished)

    def _commit(self, output: RowOutput) -> None:
        """Journal one row's tokens and tell its drafters, then end it if it ended."""
        tally = self._tallies[output.request_id]
        if output.token_ids:
            supplied, depth = self._speculator.supplied(output.request_id), self._speculator.depth(output)
            self._speculator.commit(output)
            self.metrics.record_row(len(output.token_ids), supplied, output.num_drafted, output.num_accepted, depth)
            tally.steps += 1
            tally.drafted += output.num_drafted
            tally.accepted += output.num_accepted
            tally.supplied_steps += supplied > 0
            self._fresh.append(_progress(output, tally.attempt))
        if output.finish_reason is None:
            return
        self.metrics.failed_requests += output.finish_reason == "error"
        stats = RequestStats(
            tally.steps,
            tally.drafted,
            tally.accepted,
            tally.supplied_steps,
            self._speculator.accepted_by_drafter(output.request_id),
        )
        total = output.start + len(output.token_ids)
        self._fresh.append(Finished(output.request_id, output.finish_reason, stats, output.error, total, tally.attempt))
        self._ended_attempts.note(output.request_id, tally.attempt)
        self._drop(output.request_id, finished=output.finish_reason != "error")


def _progress(output: RowOutput, attempt: int) -> Progress:
    return Progress(
        output.request_id,
        output.start,
        tuple(output.token_ids),
        tuple(output.logprobs),
        None if output.margins is None else tuple(output.margins),
        attempt,
    )
