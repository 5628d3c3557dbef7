"""Nodes, placement groups and processes of the virtual cluster: the `Backend` of a simulated controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.cluster.backend import Demand, NodeSupply, Placement, ProcessFacts, Reaper
from specactor_ray.cluster.calls import Calls
from specactor_ray.simulation.host import SimulatedHost
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import Network, Node, VirtualActor, VirtualTransport
from specactor_ray.simulation.world import World

LINGER_S = (0.0, 1.5)
"""Least and most seconds from the request to end a process to its end."""


@dataclass(eq=False)
class VirtualGroup:
    """A placement group of one bundle."""

    demand: Demand
    node: Node | None = None
    removed: bool = False


@dataclass
class Machines:
    """The nodes of a cluster, and their CPUs and GPUs in use."""

    nodes: list[Node]
    groups: list[VirtualGroup] = field(default_factory=list)

    def free(self, node: Node) -> tuple[float, float]:
        """Free CPUs and GPUs of a node."""
        if not node.alive:
            return 0.0, 0.0
        here = [group.demand for group in self.groups if group.node is node]
        return node.cpus - sum(demand.cpus for demand in here), node.gpus - sum(demand.gpus for demand in here)

    def place(self, group: VirtualGroup) -> None:
        """Assign a node with room to the group, if it has no live node."""
        if group.node is None or not group.node.alive:
            group.node = None
            group.node = next((node for node in self.nodes if self._has_room(node, group.demand)), None)

    def _has_room(self, node: Node, demand: Demand) -> bool:
        cpus, gpus = self.free(node)
        return node.alive and cpus >= demand.cpus and gpus >= demand.gpus


class VirtualReaper:
    """The `Reaper` of a simulated controller."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._dying: dict[ProcessFacts, VirtualActor] = {}

    def reap(self, handle: VirtualActor, facts: ProcessFacts | None) -> None:
        kernel, network = self._network.kernel, self._network
        kernel.at(kernel.now + network.rng.uniform(*LINGER_S), lambda: network.kill(handle, handle.node_lost))
        if facts is not None:
            self._dying[facts] = handle

    def poll(self) -> int:
        self._dying = {facts: actor for facts, actor in self._dying.items() if not actor.process.dead}
        return len(self._dying)


class VirtualBackend:
    """The `Backend` of a simulated controller. `numbers` are for names: no two actors of a simulation have the same."""

    start_s: tuple[float, float] = (0.1, 2.0)
    """Least and most seconds of the start of an actor's process."""

    def __init__(
        self, network: Network, machines: Machines, controller: VirtualActor, world: World, numbers: Iterator[int]
    ) -> None:
        self._network, self.machines, self._world = network, machines, world
        clock = VirtualClock(network.kernel, controller.process)
        self.calls = Calls(VirtualTransport(network, controller), clock)
        self.reaper: Reaper = VirtualReaper(network)
        self.actors: dict[str, VirtualActor] = {}
        """Actor id → every launched actor."""
        self._numbers = numbers

    def suffix(self) -> str:
        return f"{next(self._numbers):04x}"

    def supply(self) -> Sequence[NodeSupply]:
        supplies = []
        for node in self.machines.nodes:
            if node.alive:
                free = dict(zip(("CPU", "GPU"), self.machines.free(node), strict=True))
                supplies.append(NodeSupply(node.name, node.name, {"CPU": node.cpus, "GPU": node.gpus}, free))
        return supplies

    def request(self, name: str, demand: Demand) -> VirtualGroup:
        group = VirtualGroup(demand)
        self.machines.groups.append(group)
        self.machines.place(group)
        return group

    def resolve(self, group: VirtualGroup) -> Placement | None:
        self.machines.place(group)
        return Placement(group, 0, group.node.name, group.node.name) if group.node is not None else None

    def remove(self, group: VirtualGroup) -> None:
        if not group.removed:
            group.removed = True
            self.machines.groups.remove(group)

    def cores(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        node = next(node for node in self.machines.nodes if node.name == node_id)
        return node.name, tuple(range(int(node.cpus)))

    def launch(self, cls: Any, spec: Any, name: str, where: Placement, demand: Demand) -> VirtualActor:
        network = self._network
        node = where.group.node
        start_s = network.rng.uniform(*self.start_s)

        def make(actor: VirtualActor) -> Any:
            return cls(spec, SimulatedHost(network, actor, self._world))

        actor = network.start_actor(spec.actor_id, node, make, start_s)
        self.actors[spec.actor_id] = actor
        if not node.alive:
            network.kill(actor, node_lost=True)
        return actor
