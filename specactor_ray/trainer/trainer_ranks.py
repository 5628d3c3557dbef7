"""The trainer's ranks, called together as one trainer; their placement, start and end as Ray actors."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from specactor_ray.cluster.backend import find_group, make_actor, request_group
from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.cluster.cores import limit_spins
from specactor_ray.cluster.names import actor_name
from specactor_ray.cluster.supply import Demand, cluster_supply, demand_against_supply
from specactor_ray.config.schema import Config
from specactor_ray.controller.seating import bundle_of_verifier
from specactor_ray.core.errors import ActorLostError, CallError, ClusterError, SpecActorError
from specactor_ray.learner.deepspeed_engine import LOOPBACK, Rendezvous

if TYPE_CHECKING:
    from specactor_ray.learner.batching import Sample
    from specactor_ray.learner.engine import SavedPart
    from specactor_ray.transport.messages import WeightSet

_POLL_S = 5.0
"""Seconds between two checks of a rank's progress."""
_GRACE_S = 10.0
"""Seconds for the other ranks to answer once one has failed; after that they are assumed to wait in a collective."""
_VISIBLE_S = 10
"""Seconds until files of other nodes are visible in a shared folder."""


class TrainerRanks:
    """Calls the ranks together.

    Every wait ends: with the answers, with the first error of a rank, or when a rank makes no progress for
    `stall_timeout_s`. Once ranks may be out of step (one is gone or hangs, or one failed and another does not answer)
    every further call is refused at once. `ranks` are handles of `TrainerActor`s.
    """

    def __init__(self, ranks: Sequence[Any], calls: Calls, stall_timeout_s: float) -> None:
        self._ranks = list(ranks)
        self._calls, self._stall_timeout_s = calls, stall_timeout_s
        self._broken = ""
        self._numbers = itertools.count(1)

    def start(self, config: Config, checkpoint: Path | None, address: str, port: int, threads: int) -> None:
        """Load the policy in all ranks, which meet at this address."""
        places = [Rendezvous(rank, len(self._ranks), address, port) for rank in range(len(self._ranks))]
        self._call_each("start", [(config, checkpoint, place, threads) for place in places])

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step, once; returns the metrics of `PolicyUpdater.update`. Raises SpecActorError
        if a rank failed, is gone or hangs; the weights are undefined then."""
        shared = self._calls.transport.put(list(samples))
        metrics: dict[str, float] = self._call("update", shared, step, seed)[0]
        return metrics

    def train_drafter(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Train the drafter with `online.where=trainer` on the samples of one step, once; returns its weights, if there
        is a new version of them."""
        shared = self._calls.transport.put(list(samples))
        weights: WeightSet | None = self._call("train_drafter", shared, step)[0]
        return weights

    def export_weights(self, version: int) -> WeightSet:
        """The current weights, in the object store of rank 0's node."""
        weights: WeightSet = self._call("export_weights", version, next(self._numbers))[0]
        return weights

    def save(self, folder: Path) -> None:
        """Write the model and the state of all ranks. Raises OSError if a rank could not write, or its files are not
        visible here, and SpecActorError if one failed otherwise."""
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

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_each(method, [arguments] * len(self._ranks))

    def _call_each(self, method: str, arguments: Iterable[Sequence[Any]]) -> list[Any]:
        """Answers of all ranks, each called with its own arguments."""
        if self._broken:
            raise ActorLostError(
                f"the trainer cannot be used any more: {self._broken}. Fix: start again with resume=auto, which "
                "continues from the newest checkpoint"
            )
        calls = [
            self._calls.start(rank, method, *each, deadline_s=math.inf)  # the checks of progress bound the wait
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
        if isinstance(error, ActorLostError):
            return error
        clock = self._calls.clock
        end = clock.now() + _GRACE_S
        while (left := [call for call in calls if not call.done]) and clock.now() < end:
            self._calls.wait(left, end - clock.now())
        lost = [(call.error, rank) for rank, call in enumerate(calls) if call.done]
        return next((_explained(lost, rank, method) for lost, rank in lost if isinstance(lost, ActorLostError)), error)

    def _wait(self, method: str, calls: Sequence[Call]) -> None:
        """Wait until all ranks have answered. Raises the first error, or ActorLostError for one without progress."""
        clock, limit_s = self._calls.clock, self._stall_timeout_s
        waiting = dict(enumerate(calls))
        beats, counts, moved_at = dict[int, Call](), dict[int, int](), dict.fromkeys(waiting, clock.now())
        while waiting:
            self._calls.wait(list(waiting.values()), min(_POLL_S, limit_s / 4))
            for rank in [rank for rank, call in waiting.items() if call.done]:
                call = waiting.pop(rank)
                if call.error is not None:
                    raise _explained(call.error, rank, method)
            for rank in waiting:
                if rank in beats:
                    if not (beat := beats[rank]).poll():
                        continue
                    if isinstance(beat.error, ActorLostError):
                        raise _explained(beat.error, rank, "heartbeat")
                    if beat.error is None and beat.result() != counts.get(rank):
                        counts[rank], moved_at[rank] = beat.result(), clock.now()
                beats[rank] = self._calls.start(self._ranks[rank], "heartbeat", deadline_s=limit_s)
            if stalled := [str(rank) for rank in waiting if clock.now() - moved_at[rank] >= limit_s]:
                raise ActorLostError(
                    f"trainer rank {', '.join(stalled)}: no progress for {limit_s:g} s in {method}; it hangs, or one "
                    "piece of its work takes longer than trainer.stall_timeout_s"
                )

    def _refuse_unseen(self, folder: Path, parts: Sequence[SavedPart]) -> None:
        """Check that all files written by the ranks are visible; a network file system may delay them."""
        written = [(rank, part.node, name, part.sizes[name]) for rank, part in enumerate(parts) for name in part.sizes]
        for _ in range(_VISIBLE_S):
            if not (unseen := [one for one in written if _size(folder / one[2]) != one[3]]):
                return
            self._calls.clock.sleep(1.0)
        rank, node, name, _ = unseen[0]
        raise OSError(
            f"trainer rank {rank} wrote {name} on node {node}, and {folder} here does not have it (and "
            f"{len(unseen) - 1} others). checkpoint.dir must be a folder that all nodes share"
        )


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


# ---- placement, start and end ----


@contextlib.contextmanager
def trainer_group(config: Config, run: str, checkpoint: Path | None = None) -> Iterator[TrainerRanks]:
    """Place and start the ranks, which end with the context.

    With `trainer.colocate` each is in the bundle of a verifier. Ranks with `trainer.cores` or `trainer.gpus` get one
    placement group; otherwise they share the cores of this node with the verifiers, since trainer and verifiers work in
    turns. Raises ClusterError if there is no room for them, and
    the errors of their start; nothing is left running then. `checkpoint` is the one to continue from.
    """
    trainer, calls, actors = config.trainer, Calls(), list[Any]()
    with contextlib.ExitStack() as started:
        for rank, strategy in enumerate(_place(config, run, started)):
            actors.append(_launch(config, run, rank, strategy))
            started.callback(ray.kill, actors[-1])
        limit_s = config.cluster.start_timeout_s
        asked = [calls.start(actor, "find_port", deadline_s=limit_s) for actor in actors]
        places = [call.result() for call in asked]
        address, port = places[0]
        if all(place[0] == address for place in places):
            address = LOOPBACK  # no other machine is involved
        ranks = TrainerRanks(actors, calls, trainer.stall_timeout_s)
        threads = trainer.cores or max(1, len(os.sched_getaffinity(0)) // trainer.ranks)
        ranks.start(config, checkpoint, address, port, threads)
        yield ranks


def _place(config: Config, run: str, held: contextlib.ExitStack) -> list[Any]:
    """Ray's scheduling strategy for each rank. A placement group of their own ends with `held`."""
    trainer, limit_s = config.trainer, config.cluster.placement_timeout_s
    if trainer.colocate:
        places = [bundle_of_verifier(rank, config, run) for rank in range(trainer.ranks)]
        return [PlacementGroupSchedulingStrategy(find_group(name), bundle) for name, bundle in places]
    if trainer.cores is None and not trainer.gpus:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return [here] * trainer.ranks
    demand = Demand("trainer", float(trainer.cores or 1), float(trainer.gpus), accelerator=trainer.accelerator)
    supply = cluster_supply()
    group = request_group(actor_name(run, "trainer"), [demand] * trainer.ranks)
    held.callback(remove_placement_group, group)
    if not group.wait(limit_s):
        table = demand_against_supply([demand] * trainer.ranks, supply)
        raise ClusterError(f"the trainer found no room within {limit_s:g} s.\n{table}")
    return [PlacementGroupSchedulingStrategy(group, rank) for rank in range(trainer.ranks)]


def _launch(config: Config, run: str, rank: int, strategy: Any) -> Any:
    from specactor_ray.actors.trainer import HEARTBEAT, SENDING, TrainerActor

    trainer = config.trainer
    shares_cores = trainer.cores is None and not trainer.gpus
    return make_actor(
        TrainerActor,
        actor_name(run, f"trainer-{rank}"),
        strategy,
        config.run.log_level,
        groups={HEARTBEAT: 1, SENDING: 1},
        num_cpus=0.0 if shares_cores else float(trainer.cores or 1),
        num_gpus=trainer.gpus / 2 if trainer.colocate else trainer.gpus,
        runtime_env={"env_vars": limit_spins()},
    )
