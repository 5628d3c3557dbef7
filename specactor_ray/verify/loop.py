"""The verifier's loop: verify the best draft tail of every running request, commit what is right, tell everyone.

A plain class around a target engine. Other threads put requests, drafts and drafter lists in; one thread calls
`run`. It knows no Ray: a drafter is a link, the rollout is an event queue. Nothing a drafter does can change a
token (the engine checks every draft token) or block one (every wait is bounded).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.errors import InputError
from specactor_ray.loops.attempts import EndedAttempts
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.messages import Features, Finished, Progress, Refused, RequestStats, TailBatch, ToRollout
from specactor_ray.queues.events import EventQueue
from specactor_ray.spec.table import Committed
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetEngine, TargetRequest
from specactor_ray.verify.drafting import DrafterLink, Drafting
from specactor_ray.verify.inline import InlineDrafter, InlineDrafters
from specactor_ray.verify.metrics import StepMetrics

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
        self.metrics = StepMetrics()
        self.vocab_size = engine.vocab_size
        self.error: BaseException | None = None
        """What ended the loop, if the engine failed."""
        self._engine, self._clock = engine, clock
        self._drafting, self._table = drafting, drafting.table
        self._events: EventQueue[ToRollout] = EventQueue(clock)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = clock.event()
        self._ended = clock.event()
        self._stopping = clock.event()
        self._row_of: dict[str, int] = {}
        """Running request → its row."""
        self._ended_attempts = EndedAttempts()
        self._heartbeat = Heartbeat(clock.now)
        self._fresh: list[ToRollout] = []
        """Events of the step under way."""
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
            self._command(functools.partial(self._add, request))

    def cancel(self, items: Sequence[tuple[str, int]]) -> None:
        """Drop requests without a `Finished`: pairs of request id and attempt.

        An older attempt that runs is dropped too, a newer one is not. Should the submission of a cancelled attempt
        still arrive, it is ignored.
        """
        for request_id, attempt in items:
            self._command(functools.partial(self._cancel, request_id, attempt))

    def deliver(self, message: TailBatch) -> None:
        """Take a message of a drafter; returns at once."""
        self._drafting.inbox.put(message)
        self._wake.set()

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters in other processes, by id."""
        self._links = links
        self._command(lambda: self._drafting.set_drafters({**self._inline.links, **links}))

    @property
    def drafter_links(self) -> Mapping[str, DrafterLink]:
        """The drafters in other processes as they were set last."""
        return self._links

    def reset_metrics(self) -> None:
        """Set all counters to zero."""

        def clear() -> None:
            self.metrics = StepMetrics()

        self._command(clear)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights between two steps. Requests that still run are dropped without a `Finished`, since an
        output must not mix two versions: whoever sends new weights has given them up. Weights that are not newer than
        those loaded are ignored: the message came twice, or late."""
        return self._call(functools.partial(self._load_weights, version, state_dict))

    def teach(self, method: str, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights of a drafter of this process between two steps."""
        return self._call(functools.partial(self._inline.teach, method, version, state_dict))

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
        counters = {**self.metrics.to_dict(), **self._drafting.snapshot()}
        loads = {
            "running": len(self._row_of),
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
        self._run_commands()
        if not self._engine.has_work():
            self._drafting.take_messages()
            self._drafting.flush()
            self._inline.draft()  # nothing but to close what has ended
            return False
        rows = np.array([self._row_of[request_id] for request_id in self._engine.decoding()], np.int32)
        waiting_s = self._await_drafts(rows)
        seats, tails = self._choose(rows)
        result = self._engine.step(tails)
        self._commit(result, rows, seats)
        self._publish()
        self._drafting.flush()
        self.metrics.record_step(result, self._clock.now() - begin, waiting_s)
        return True

    # ---- drafts ----

    def _await_drafts(self, rows: np.ndarray) -> float:
        """Take what drafters sent; wait, bounded, where a wait pays. Returns the seconds spent waiting."""
        drafting, policy = self._drafting, self._drafting.policy
        if not len(drafting):
            return 0.0
        self._inline.look_up()
        drafting.take_messages()
        drafting.revise(rows)
        if not len(rows):
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
        if not len(self._drafting) or not len(rows):
            return np.full(len(rows), -1, np.int32), {}
        seats, lengths = self._drafting.policy.choose(rows)
        chosen = np.flatnonzero(lengths)
        tails = self._table.tail[seats[chosen], rows[chosen]].tolist()
        requests, counts = self._table.requests, lengths[chosen].tolist()
        return seats, {
            requests[row].request_id: tail[:count]  # type: ignore[union-attr]
            for row, tail, count in zip(rows[chosen].tolist(), tails, counts, strict=True)
        }

    # ---- commits ----

    def _commit(self, result: StepResult, decoding: np.ndarray, seats: np.ndarray) -> None:
        """Journal what the step committed, judge drafts by it, and end requests that ended."""
        outputs = [output for output in result.outputs if output.token_ids]
        if outputs:
            self._record(outputs, decoding, seats)
        if 2 * result.num_prefill_tokens <= result.num_tokens:
            self._drafting.policy.cost.record(result.num_tokens, result.forward_s + result.sampling_s)
        for output in result.outputs:
            if output.finish_reason is not None:
                self._end(output)

    def _record(self, outputs: Sequence[RowOutput], decoding: np.ndarray, seats: np.ndarray) -> None:
        table, row_of = self._table, self._row_of
        numbers = [(row_of[one.request_id], len(one.token_ids), one.num_drafted, one.num_accepted) for one in outputs]
        rows, counts, drafted, accepted = np.ascontiguousarray(np.array(numbers, np.int32).T)
        tokens = np.array([token for output in outputs for token in output.token_ids], np.int32)
        starts = table.committed[rows]
        seat_of = np.full(len(table.generation), -1, np.int32)
        seat_of[decoding] = seats
        step = Committed(rows, counts, tokens, seat_of[rows], drafted, accepted)
        supplied = self._drafting.commit(step)
        self._credit(step)
        self.metrics.record_rows(counts, supplied, drafted, accepted)
        for row, output in zip(rows.tolist(), outputs, strict=True):
            if output.hidden_states is not None:
                self._drafting.keep_features(row, Features(output.hidden_start, output.hidden_states))
        requests = [table.requests[row] for row in rows.tolist()]
        margins = [output.margins for output in outputs]
        self._fresh.append(
            Progress(
                tuple((one.request_id, one.attempt) for one in requests if one is not None),
                starts,
                counts,
                tokens,
                np.array([value for output in outputs for value in output.logprobs], np.float32),
                np.array([value for one in margins for value in one or ()], np.float32)
                if margins[0] is not None
                else None,
            )
        )

    def _credit(self, step: Committed) -> None:
        """Count what was verified for those who drafted it."""
        metrics, drafters, mine = self.metrics, self._drafting.policy.drafters, np.flatnonzero(step.drafted)
        if not len(mine):
            return
        rows, seats, drafted, accepted = (one[mine] for one in (step.rows, step.seats, step.drafted, step.accepted))
        keys = self._table.version[seats, rows].astype(np.int64) * len(drafters) + seats
        keys, inverse = np.unique(keys, return_inverse=True)
        sums = (np.bincount(inverse, drafted), np.bincount(inverse, accepted))
        for key, *numbers in zip(keys.tolist(), *(one.astype(int).tolist() for one in sums), strict=True):
            version, seat = divmod(key, len(drafters))
            if (drafter := drafters[seat]) is not None:
                metrics.record_drafter(drafter.drafter_id, *numbers)
                metrics.record_version(drafter.method, version, *numbers)

    def _end(self, output: RowOutput) -> None:
        row, table = self._row_of[output.request_id], self._table
        request = table.requests[row]
        assert request is not None
        self.metrics.failed_requests += output.finish_reason == "error"
        seats = {
            drafter.drafter_id: (int(table.seat_drafted[seat, row]), int(table.seat_accepted[seat, row]))
            for seat, drafter in enumerate(self._drafting.policy.drafters)
            if drafter is not None and table.seat_drafted[seat, row]
        }
        steps, drafted, accepted, supplied = table.totals[:, row].tolist()
        stats = RequestStats(steps, drafted, accepted, supplied, seats)
        total, attempt = int(table.committed[row]), request.attempt
        reason = str(output.finish_reason)
        self._fresh.append(Finished(output.request_id, reason, stats, output.error, total, attempt))
        self._ended_attempts.note(output.request_id, attempt)
        self._drop(output.request_id, finished=reason != "error")

    # ---- commands ----

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

    def _run_commands(self) -> None:
        if self._commands.empty():
            return
        while not self._commands.empty():
            self._heartbeat.begin()
            self._commands.get()()
        self._heartbeat.begin()
        self._publish()

    def _publish(self) -> None:
        """Hand out the events of this step, all at once."""
        if not self._fresh:
            return
        events, self._fresh = self._fresh, []
        self._events.put(events)
        if not all(isinstance(event, Progress) for event in events):
            self._ended.set()

    def _load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if version <= self._engine.weight_version:
            return
        for request_id in list(self._row_of):
            self._drop(request_id, finished=False)
        self._engine.load_weights(version, state_dict)
        self._inline.load_weights(version, state_dict)

    def _add(self, request: TargetRequest) -> None:
        request_id, attempt = request.request_id, request.attempt
        row = self._row_of.get(request_id)
        running = self._table.requests[row] if row is not None else None
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
        self._row_of[request_id] = self._table.open(request)

    def _cancel(self, request_id: str, attempt: int) -> None:
        self._ended_attempts.note(request_id, attempt)
        row = self._row_of.get(request_id)
        running = self._table.requests[row] if row is not None else None
        if running is not None and running.attempt <= attempt:
            self._drop(request_id, finished=False)

    def _drop(self, request_id: str, finished: bool) -> None:
        self._engine.remove(request_id)
        self._drafting.close(self._row_of.pop(request_id), finished)
