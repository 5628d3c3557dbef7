"""Requests of a verifier from submission to end, and the events for the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import InputError
from specactor_ray.table._kernels import Committed
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.target.base import StepResult, TargetEngine
from specactor_ray.transport.link import EventQueue
from specactor_ray.transport.messages import Finished, Progress, PromptScores, Refused, ToRollout, Verified
from specactor_ray.verify.drafting import Drafting
from specactor_ray.verify.metrics import PlainEstimate, StepMetrics

_REMEMBERED = 65_536
"""Number of newest requests that keep their attempts: many more than are submitted while a message is in flight."""


class Requests:
    """Keeps the running requests of engine, table and rollout consistent. For the loop's thread; `events` for any."""

    def __init__(self, engine: TargetEngine, drafting: Drafting, clock: Clock = SYSTEM) -> None:
        self.metrics, self.plain = StepMetrics(), PlainEstimate()
        self._engine, self._drafting, self._table = engine, drafting, engine.table
        engine.exports = False
        self.events: EventQueue[ToRollout] = EventQueue(clock)
        """Events for the rollout. All events except `Progress` are urgent."""
        self._attempts: dict[str, int] = {}
        """The newest attempt of each request that was begun or cancelled, the newest requests last: submissions and
        cancellations may be repeated, late, or out of order."""
        self._fresh: list[ToRollout] = []  # events of the step under way

    def __len__(self) -> int:
        """Number of running and waiting requests."""
        return len(self._table)

    def reset_metrics(self) -> None:
        """Set all counters to zero."""
        self.metrics, self.plain = StepMetrics(), PlainEstimate()

    def add(self, request: TargetRequest) -> None:
        """Begin a request, unless this attempt or a newer one was begun or cancelled."""
        request_id, attempt = request.request_id, request.attempt
        if attempt <= self._attempts.get(request_id, -1):
            return
        self._note(request_id, attempt)
        if (row := self._table.row_of.get(request_id)) is not None:
            self.drop(row)
        loaded = self._engine.weight_version
        if request.weight_version != loaded:
            reason = f"it asks for weights of version {request.weight_version}; those loaded are of version {loaded}"
            self._fresh.append(Refused(request_id, attempt, reason))
            return
        reason, error = "", ""
        try:
            request.sampling.check()
            reason = self._begin(request)
        except InputError as problem:
            reason, error = "error", str(problem)
        if reason:
            committed = len(request.committed_token_ids)
            self._fresh.append(Finished(request_id, reason, error, committed, attempt))
        elif request.sampling.prompt_logprobs and len(request.prompt_token_ids) == 1:
            self._fresh.append(PromptScores(request_id, attempt, np.zeros((0, 3), np.float32)))

    def _begin(self, request: TargetRequest) -> str:
        """Open a row and add it to the engine, unless the committed tokens end the output: returns the reason then."""
        table = self._table
        row = table.open(request)
        try:
            if (finish := table.end_of(row)) is None:
                self._engine.add(row)
                return ""
        except InputError:
            table.close(row)
            raise
        table.close(row)
        return finish.reason

    def cancel(self, request_id: str, attempt: int, has_ended: bool = False) -> None:
        """Drop this attempt, or an older one, and never begin it again. `has_ended`: see `VerifyLoop.cancel`."""
        row = self._table.row_of.get(request_id)
        if row is not None and self._attempts.get(request_id, -1) <= attempt:
            self.drop(row, finished=has_ended)
        self._note(request_id, attempt)

    def _note(self, request_id: str, attempt: int) -> None:
        """Record an attempt: it and earlier ones are not begun any more."""
        self._attempts[request_id] = max(attempt, self._attempts.pop(request_id, attempt))
        if len(self._attempts) > _REMEMBERED:
            del self._attempts[next(iter(self._attempts))]

    def drop(self, row: int, finished: bool = False) -> None:
        """Remove a request without an event."""
        self._engine.remove(row)
        self._drafting.close(row, finished)
        self.plain.end(row)

    def clear(self) -> None:
        """Drop all requests."""
        for row in list(self._table.requests):
            self.drop(row)

    def commit(self, result: StepResult, decoding: np.ndarray, seats: np.ndarray) -> int:
        """Commit the tokens of a step, and end completed requests. Returns the number of right draft tokens."""
        for row, scores in result.prompt_logprobs.items():
            self._fresh.append(PromptScores(*self._name(row), scores))
        if len(result.tokens):
            self._record(result, decoding, seats)
        self.plain.commit(result)
        for at in np.flatnonzero(result.finish).tolist():
            self._end(int(result.rows[at]), Finish(result.finish[at]), result.errors)
        return int(result.accepted.sum())

    def _record(self, result: StepResult, decoding: np.ndarray, seats: np.ndarray) -> None:
        table = self._table
        columns = (result.rows, result.starts, result.lengths, result.drafted, result.accepted)
        if not result.lengths.all():
            columns = tuple(column[result.lengths > 0] for column in columns)  # type: ignore[assignment]
        rows, starts, counts, drafted, accepted = columns
        seat_of = np.full(len(table.generation), -1, np.int32)
        seat_of[decoding] = seats
        self._drafting.policy.acceptance.settle(table, Committed(rows, counts, seat_of[rows], drafted, accepted))
        self.metrics.take(table.counts, table.reached)
        names, tops = tuple(map(self._name, rows.tolist())), result.tops
        if tops is not None and len(rows) < len(result.rows):
            tops = replace(tops, counts=tops.counts[result.lengths > 0])
        verified = None
        if drafted.any():
            methods = table.method[seat_of[rows]].astype(np.int8)
            verified = Verified(
                tuple(self._drafting.policy.acceptance.methods),
                methods,
                drafted.astype(np.int16),
                accepted.astype(np.int16),
            )
        self._fresh.append(
            Progress(names, starts, counts, result.tokens, result.logprobs, result.margins, tops, verified)
        )

    def _end(self, row: int, finish: Finish, errors: Mapping[int, str]) -> None:
        (request_id, attempt), total = self._name(row), len(self._table.output(row))
        self._fresh.append(Finished(request_id, finish.reason, errors.get(row, ""), total, attempt))
        self.drop(row, finished=finish is not Finish.ERROR)

    def _name(self, row: int) -> tuple[str, int]:
        """Id and attempt of the request of a row."""
        request = self._table.requests[row]
        return request.request_id, request.attempt

    def publish(self) -> None:
        """Publish all events of this step at once."""
        events, self._fresh = self._fresh, []
        if events:
            self.events.put(events, urgent=not all(isinstance(event, Progress) for event in events))
