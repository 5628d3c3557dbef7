"""The trainer's ranks, called together as one trainer, independent of their location."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.core.errors import ActorLostError, CallError, SpecActorError

if TYPE_CHECKING:
    from specactor_ray.learner.batching import Sample
    from specactor_ray.learner.engine import SavedPart
    from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

_NO_DEADLINE = float("inf")
"""Deadline of a rank's work: none, since the check of its progress bounds the wait."""
_POLL_S = 5.0
"""Seconds between two checks of a rank's progress."""
_GRACE_S = 10.0
"""Seconds for the other ranks to answer once one has failed; after that they are assumed to wait in a collective."""
_STOP_S = 5.0
_VISIBLE_TRIES = 10
"""Seconds until files of other nodes are visible in a shared folder."""


class TrainerRanks:
    """Calls the ranks together.

    Every wait ends: with the answers, with the first error of a rank, or when a rank makes no progress. Once ranks may
    be out of step (one is gone or hangs, or one failed and another does not answer) every further call is refused at
    once; the caller must close it.

    Args:
        ranks: Handles in order; each has the methods of `TrainerActor`.
        stall_timeout_s: Longest time without progress of a rank.
    """

    def __init__(self, ranks: Sequence[Any], calls: Calls, stall_timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._calls, self._stall_timeout_s = calls, stall_timeout_s
        self._broken = ""
        self._numbers = itertools.count(1)

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step; returns the metrics of `PolicyUpdater.update`. A step is done once:
        repeated calls for the last step return the same result.

        Raises:
            SpecActorError: A rank failed, is gone or hangs; the weights are undefined then.
        """
        shared = self._calls.transport.put(list(samples))
        metrics: dict[str, float] = self._call("update", shared, step, seed)[0]
        return metrics

    def teach_drafter(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Train the drafter with `online.where=trainer` on the samples of one step, once; returns its weights, if there
        is a new version of them."""
        shared = self._calls.transport.put(list(samples))
        weights: WeightSet | None = self._call("teach_drafter", shared, step)[0]
        return weights

    def export_weights(self, version: int) -> WeightSet:
        """The current weights, in the object store of rank 0's node."""
        weights: WeightSet = self._call("export_weights", version, next(self._numbers))[0]
        return weights

    def save(self, folder: Path) -> None:
        """Write the model and the state of all ranks.

        Raises:
            OSError: A rank could not write, or its files are not visible in the folder to this process.
            SpecActorError: A rank failed otherwise, is gone or hangs.
        """
        parts: list[SavedPart] = self._call("save", str(folder), next(self._numbers))
        for rank, part in enumerate(parts):
            if part.problem:
                raise OSError(f"trainer rank {rank} on node {part.node} could not write: {part.problem}")
        self._refuse_unseen(folder, parts)

    def offload(self) -> None:
        """Free device memory until `reload`."""
        self._call("offload")

    def reload(self) -> None:
        self._call("reload")

    def close(self) -> None:
        """End the ranks in order, within a short time. Idempotent."""
        ranks, self._ranks = self._ranks, []
        if self._broken:
            return
        calls = [self._calls.start(rank, "stop", deadline_s=_STOP_S, retry=False) for rank in ranks]
        self._answered(calls, _STOP_S)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_each(method, [arguments] * len(self._ranks))

    def _call_each(self, method: str, arguments: Iterable[Sequence[Any]]) -> list[Any]:
        """Answers of all ranks, each called with its own arguments."""
        if self._broken:
            raise ActorLostError(
                f"the trainer cannot be used any more: {self._broken}. Fix: start again with resume=auto, which "
                "continues from the newest checkpoint"
            )
        start = self._calls.start
        calls = [
            start(rank, method, *each, deadline_s=_NO_DEADLINE)
            for rank, each in zip(self._ranks, arguments, strict=True)
        ]
        try:
            self._wait(method, calls)
        except SpecActorError as error:
            cause = self._cause(error, method, calls)
            if isinstance(cause, ActorLostError) or not all(call.done for call in calls):
                self._broken = str(cause)
            raise cause from (None if cause is error else error)
        return [call.result() for call in calls]

    def _cause(self, error: SpecActorError, method: str, calls: Sequence[Call]) -> SpecActorError:
        """First cause of an error: a lost rank makes the others fail in their collective, maybe with earlier errors."""
        if not isinstance(error, ActorLostError):
            self._answered(calls, _GRACE_S)
            for rank, call in enumerate(calls):
                if call.done and isinstance(call.error, ActorLostError):
                    return _explained(call.error, rank, method)
        return error

    def _wait(self, method: str, calls: Sequence[Call]) -> None:
        """Wait until all ranks have answered.

        Raises:
            SpecActorError: The first error; or a rank makes no progress.
        """
        watch = _Watch(self._calls, self._ranks, self._stall_timeout_s)
        waiting = dict(enumerate(calls))
        while waiting:
            self._calls.wait(list(waiting.values()), watch.poll_s)
            for rank in [rank for rank, call in waiting.items() if call.done]:
                call = waiting.pop(rank)
                if call.error is not None:
                    raise _explained(call.error, rank, method)
            watch.look(waiting, method)

    def _answered(self, calls: Sequence[Call], timeout_s: float) -> bool:
        """Wait for these calls; returns whether all of them ended within `timeout_s` seconds."""
        end = self._calls.clock.now() + timeout_s
        while (left := [call for call in calls if not call.done]) and self._calls.clock.now() < end:
            self._calls.wait(left, end - self._calls.clock.now())
        return not left

    def _refuse_unseen(self, folder: Path, parts: Sequence[SavedPart]) -> None:
        """Check that all files written by the ranks are visible; a network file system may delay them."""
        for attempt in range(_VISIBLE_TRIES):
            unseen = [
                (rank, part.node, name)
                for rank, part in enumerate(parts)
                for name, size in part.sizes.items()
                if _size(folder / name) != size
            ]
            if not unseen:
                return
            if attempt < _VISIBLE_TRIES - 1:
                self._calls.clock.sleep(1.0)
        rank, node, name = unseen[0]
        raise OSError(
            f"trainer rank {rank} wrote {name} on node {node}, and {folder} here does not have it (and "
            f"{len(unseen) - 1} others). checkpoint.dir must be a folder that all nodes share"
        )


class _Watch:
    """Reads the progress of working ranks, and raises if one makes none."""

    def __init__(self, calls: Calls, ranks: Sequence[Any], stall_timeout_s: float) -> None:
        self.poll_s = min(_POLL_S, stall_timeout_s / 4)
        self._calls, self._ranks, self._limit_s = calls, ranks, stall_timeout_s
        now = calls.clock.now()
        self._moved_at = [now] * len(ranks)
        self._counts: list[int | None] = [None] * len(ranks)
        self._asked: dict[int, Call] = {}

    def look(self, waiting: Mapping[int, Call], method: str) -> None:
        """Process arrived answers and send new calls; never waits.

        Raises:
            ActorLostError: A rank is gone, or made no progress for too long.
        """
        now = self._calls.clock.now()
        for rank in waiting:
            asked = self._asked.get(rank)
            if asked is not None and asked.poll():
                del self._asked[rank]
                self._take(rank, asked, now)
            if rank not in self._asked:
                self._asked[rank] = self._calls.start(self._ranks[rank], "heartbeat", deadline_s=self._limit_s)
        stalled = [rank for rank in waiting if now - self._moved_at[rank] >= self._limit_s]
        if stalled:
            names = ", ".join(map(str, stalled))
            raise ActorLostError(
                f"trainer rank {names}: no progress for {self._limit_s:g} s in {method}; it hangs, or one piece of its "
                "work takes longer than trainer.stall_timeout_s"
            )

    def _take(self, rank: int, answered: Call, now: float) -> None:
        if isinstance(answered.error, ActorLostError):
            raise _explained(answered.error, rank, "heartbeat")
        if answered.error is not None:
            logger.debug("trainer rank %d: no heartbeat: %s", rank, answered.error)
            return
        count = answered.result()
        if count != self._counts[rank]:
            self._counts[rank], self._moved_at[rank] = count, now


def _explained(error: SpecActorError, rank: int, method: str) -> SpecActorError:
    """The same error, with its rank."""
    if not isinstance(error, CallError):
        return error
    message = f"trainer rank {rank}, {method}: {error}"
    if isinstance(error, ActorLostError):
        return ActorLostError(message, error.node_lost)
    return type(error)(message)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
