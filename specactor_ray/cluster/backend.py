"""Interface of the controller to its cluster: placement, processes and calls of actors, by Ray or by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specactor_ray.cluster import placement
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.names import NAMESPACE, random_suffix
from specactor_ray.cluster.placement import Demand, NodeSupply, Placement
from specactor_ray.cluster.processes import ActorReaper, CoreSurvey, ProcessFacts

ACTOR_OPTIONS: Mapping[str, Any] = {
    "namespace": NAMESPACE,
    "max_concurrency": 8,  # a long poll or a load must not hold up health checks and deliveries
    "max_restarts": 0,
    "max_task_retries": 0,
}
"""Options of every named actor of a run."""


class Reaper(Protocol):
    """Ends actors and follows their processes until they are gone; see `processes.ActorReaper`."""

    def reap(self, handle: Any, facts: ProcessFacts | None) -> None: ...

    def poll(self) -> int: ...


class Backend(Protocol):
    """Makes, places and ends actors. Nothing here blocks for long."""

    calls: Calls
    reaper: Reaper

    def suffix(self) -> str:
        """A random suffix of a name."""

    def supply(self) -> Sequence[NodeSupply]:
        """The live nodes, each with its total and its free resources."""

    def request(self, name: str, demand: Demand) -> Any:
        """Request a placement group; returns at once, whether or not there is room."""

    def resolve(self, group: Any) -> Placement | None:
        """The placement of the group; None while it waits for room."""

    def remove(self, group: Any) -> None:
        """Release the group's resources. Idempotent."""

    def cores(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        """`(machine, core ids)` that processes on a node may use; None until the answer has arrived."""

    def launch(self, cls: Any, spec: Any, name: str, where: Placement, demand: Demand) -> Any:
        """Make the actor `cls(spec)` in its placement group; returns its handle at once. A crashed actor is never
        restarted: it would come back without its state under the same name."""


class RayBackend:
    """The cluster that this process is connected to."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.reaper: Reaper = ActorReaper(self.calls)
        self._survey = CoreSurvey(self.calls.transport)
        self.suffix = random_suffix
        self.supply = placement.cluster_supply
        self.request = placement.request
        self.resolve = placement.resolve
        self.remove = placement.remove
        self.cores = self._survey.look

    def launch(self, cls: Any, spec: Any, name: str, where: Placement, demand: Demand) -> Any:
        options: dict[str, Any] = {
            **ACTOR_OPTIONS,
            "name": name,
            "num_cpus": demand.cpus,
            "num_gpus": demand.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(where.group, where.bundle_index),
        }
        return ray.remote(cls).options(**options).remote(spec)
