"""The trainer's ranks, called together as one trainer; their placement, start and end as Ray actors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from specactor_ray.cluster.backend import Demand, cluster_supply, demand_against_supply, make_actor
from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.cluster.cores import limit_spins
from specactor_ray.cluster.names import actor_name
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ActorLostError, CallError, ClusterError, SpecActorError
from specactor_ray.learner.deepspeed_engine import LOOPBACK, Rendezvous
from specactor_ray.learner.trainer import TrainerSpec

if TYPE_CHECKING:
    from specactor_ray.learner.batching import Sample
    from specactor_ray.learner.engine import SavedPart
    from specactor_ray.transport.messages import WeightSet

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
        progress = [_Progress(self._calls, rank, self._stall_timeout_s) for rank in self._ranks]
        waiting = dict(enumerate(calls))
        while waiting:
            self._calls.wait(list(waiting.values()), min(_POLL_S, self._stall_timeout_s / 4))
            for rank in [rank for rank, call in waiting.items() if call.done]:
                call = waiting.pop(rank)
                if call.error is not None:
                    raise _explained(call.error, rank, method)
            for rank in waiting:
                try:
                    progress[rank].poll()
                except ActorLostError as error:
                    raise _explained(error, rank, "heartbeat") from None
            if stalled := [rank for rank in waiting if progress[rank].stalled]:
                raise ActorLostError(
                    f"trainer rank {', '.join(map(str, stalled))}: no progress for {self._stall_timeout_s:g} s in "
                    f"{method}; it hangs, or one piece of its work takes longer than trainer.stall_timeout_s"
                )

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


class _Progress:
    """Progress of one working rank, as it reports it."""

    def __init__(self, calls: Calls, rank: Any, limit_s: float) -> None:
        self._calls, self._rank, self._limit_s = calls, rank, limit_s
        self._count: int | None = None
        self._moved_at = calls.clock.now()
        self._asked: Call | None = None

    @property
    def stalled(self) -> bool:
        return self._calls.clock.now() - self._moved_at >= self._limit_s

    def poll(self) -> None:
        """Process an answer that has arrived, and ask again; never waits. Raises ActorLostError."""
        answered = self._asked
        if answered is not None and not answered.poll():
            return
        self._asked = self._calls.start(self._rank, "heartbeat", deadline_s=self._limit_s)
        if answered is None:
            return
        if isinstance(answered.error, ActorLostError):
            raise answered.error
        if answered.error is None and answered.result() != self._count:
            self._count, self._moved_at = answered.result(), self._calls.clock.now()


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


class TrainerGroup(TrainerRanks):
    """Places and starts the ranks, and calls them together.

    Ranks with `trainer.cores` or `trainer.gpus` get one placement group; otherwise they share the cores of this node
    with the verifiers, since trainer and verifiers work in turns.

    Args:
        checkpoint: Folder of the checkpoint to continue from.

    Raises:
        ClusterError: There is no room for the ranks.
        ModelLoadError, ConfigError, SpecActorError: As raised by a rank. Nothing is left running.
    """

    def __init__(self, config: Config, run: str, checkpoint: Path | None = None) -> None:
        super().__init__([], Calls(), config.trainer.stall_timeout_s)
        self._config = config
        self._group: PlacementGroup | None = None
        try:
            self._place()
            self._ranks = [self._launch(run, rank) for rank in range(config.trainer.ranks)]
            self._start(checkpoint)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks and free their resources. Idempotent."""
        ranks = self._ranks
        super().close()
        for rank in ranks:
            ray.kill(rank)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _place(self) -> None:
        trainer, cluster = self._config.trainer, self._config.cluster
        if trainer.cores is None and not trainer.gpus:
            return
        demand = Demand("trainer", float(trainer.cores or 1), float(trainer.gpus))
        supply = cluster_supply()
        self._group = placement_group([demand.bundle()] * trainer.ranks, strategy="PACK", lifetime=None)
        if not self._group.wait(cluster.placement_timeout_s):
            table = demand_against_supply([demand] * trainer.ranks, supply)
            problem = f"the trainer found no room within {cluster.placement_timeout_s:g} s."
            raise ClusterError(f"{problem}\n{table}")

    def _launch(self, run: str, rank: int) -> Any:
        from specactor_ray.actors.trainer import HEARTBEAT, TrainerActor

        trainer = self._config.trainer
        if self._group is None:
            strategy: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            cpus = 0.0
        else:
            strategy = PlacementGroupSchedulingStrategy(self._group, rank)
            cpus = float(trainer.cores or 1)
        return make_actor(
            TrainerActor,
            actor_name(run, f"trainer-{rank}"),
            strategy,
            self._config.run.log_level,
            groups={HEARTBEAT: 1},
            num_cpus=cpus,
            num_gpus=trainer.gpus,
            runtime_env={"env_vars": limit_spins()},
        )

    def _start(self, checkpoint: Path | None) -> None:
        trainer = self._config.trainer
        limit_s = self._config.cluster.start_timeout_s
        asked = [self._calls.start(rank, "find_port", deadline_s=limit_s) for rank in self._ranks]
        places = [call.result() for call in asked]
        address, port = places[0]
        if all(place[0] == address for place in places):
            address = LOOPBACK  # no other machine is involved
        threads = trainer.cores or max(1, len(os.sched_getaffinity(0)) // trainer.ranks)
        where = str(checkpoint) if checkpoint is not None else None
        specs = [
            TrainerSpec(self._config, where, Rendezvous(rank, trainer.ranks, address, port))
            for rank in range(trainer.ranks)
        ]
        self._call_each("start", [(spec, threads) for spec in specs])
