"""The virtual cluster: machines, the `Backend` of a simulated controller, the `ActorHost` of simulated processes with
models that take virtual time, and a run of them all in one kernel."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import ActorSpec
from specactor_ray.cluster.backend import GroupFacts, ProcessFacts
from specactor_ray.cluster.supply import Demand, NodeSupply, Place
from specactor_ray.config.accelerators import KIND_LABEL, allows
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.controller.controller import Controller
from specactor_ray.draft.proposer import Proposer
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.operations import ask
from specactor_ray.rollout.queue import RequestQueue
from specactor_ray.simulation.kernel import Kernel, Process
from specactor_ray.simulation.models import SimulatedEngine, SimulatedProposer
from specactor_ray.simulation.network import Network, Node, VirtualActor
from specactor_ray.simulation.world import World
from specactor_ray.verify.drafting import Drafting

LINGER_S = (0.0, 1.5)
"""Least and most seconds from the request to end a process to its end."""


def silence() -> None:
    """Turn off the log of this process, to which simulated actors write."""
    logging.disable(logging.CRITICAL)


@dataclass(eq=False)
class VirtualGroup:
    """A placement group."""

    name: str
    demands: Sequence[Demand]
    """Those of its bundles."""
    nodes: list[Node | None]
    """That of each bundle."""

    @property
    def homeless(self) -> list[int]:
        """The bundles without a live node, the largest first."""
        found = [number for number, node in enumerate(self.nodes) if node is None or not node.alive]
        return sorted(found, key=lambda number: (-self.demands[number].gpus, -self.demands[number].cpus))


@dataclass
class Machines:
    """The nodes of a cluster, and their CPUs and GPUs in use."""

    nodes: list[Node]
    groups: list[VirtualGroup] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)
    """Draws the order in which groups are placed."""

    def free(self, node: Node) -> tuple[float, float]:
        """Free CPUs and GPUs of a live node."""
        bundles = (pair for group in self.groups for pair in zip(group.nodes, group.demands, strict=True))
        here = [demand for at, demand in bundles if at is node]
        return node.cpus - sum(demand.cpus for demand in here), node.gpus - sum(demand.gpus for demand in here)

    def place(self) -> None:
        """Give nodes to the groups that lack some, in any order, as Ray does."""
        waiting = [group for group in self.groups if group.homeless]
        self.rng.shuffle(waiting)
        for group in waiting:
            self._pack(group)

    def _pack(self, group: VirtualGroup) -> None:
        """Give a node to each bundle without one, as few nodes as there is room on; none if not all find one."""
        before, group.nodes = group.nodes, [node if node and node.alive else None for node in group.nodes]
        for node in [node for node in self.nodes if node.alive]:
            for number in group.homeless:
                demand, (cpus, gpus) = group.demands[number], self.free(node)
                if cpus >= demand.cpus and gpus >= demand.gpus and allows(demand.accelerator, node.labels):
                    group.nodes[number] = node
        if group.homeless:
            group.nodes = before


class VirtualBackend:
    """The `Backend` of a simulated controller. `numbers` are for names: no two actors of a simulation have the same."""

    start_s: tuple[float, float] = (0.1, 2.0)
    """Least and most seconds of the start of an actor's process."""

    def __init__(
        self,
        network: Network,
        machines: Machines,
        controller: VirtualActor,
        make_host: Callable[[VirtualActor], ActorHost],
        numbers: Iterator[int],
    ) -> None:
        self._network, self.machines, self._make_host = network, machines, make_host
        self.calls = network.calls(controller)
        self.actors: dict[str, VirtualActor] = {}
        """Actor id → every launched actor."""
        self._numbers = numbers
        self._ending: list[VirtualActor] = []

    def suffix(self) -> str:
        return f"{next(self._numbers):04x}"

    def supply(self) -> Sequence[NodeSupply]:
        supplies = []
        for node in self.machines.nodes:
            if node.alive:
                free = dict(zip(("CPU", "GPU"), self.machines.free(node), strict=True))
                total = {"CPU": node.cpus, "GPU": node.gpus}
                supplies.append(NodeSupply(node.name, node.name, total, free, node.labels))
        return supplies

    def request(self, name: str, demands: Sequence[Demand]) -> VirtualGroup:
        group = VirtualGroup(name, demands, [None] * len(demands))
        self.machines.groups.append(group)
        return group

    def groups(self) -> Mapping[str, GroupFacts]:
        self.machines.place()
        found = {}
        for group in self.machines.groups:
            nodes = tuple(_place(node) if node and node.alive else None for node in group.nodes)
            sums = (sum(getattr(demand, size) for demand in group.demands) for size in ("cpus", "gpus"))
            found[group.name] = GroupFacts(nodes, dict(zip(("CPU", "GPU"), sums, strict=True)))
        return found

    def remove(self, group: VirtualGroup) -> None:
        if group in self.machines.groups:
            self.machines.groups.remove(group)

    def cores(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        node = next(node for node in self.machines.nodes if node.name == node_id)
        return node.name, tuple(range(int(node.cpus)))

    def launch(self, cls: Any, spec: Any, name: str, group: VirtualGroup, bundle: int, demand: Demand) -> VirtualActor:
        network, node = self._network, group.nodes[bundle]
        assert node is not None  # the seat was settled
        start_s = network.rng.uniform(*self.start_s)
        actor = self.actors[spec.actor_id] = network.start_actor(
            spec.actor_id, node, lambda actor: cls(spec, self._make_host(actor)), start_s
        )
        if not node.alive:
            network.kill(actor, node_lost=True)
        return actor

    def end(self, handle: VirtualActor, facts: ProcessFacts | None) -> None:
        kernel, network = self._network.kernel, self._network
        kernel.at(kernel.now + network.rng.uniform(*LINGER_S), lambda: network.kill(handle, handle.node_lost))
        if facts is not None:
            self._ending.append(handle)

    def poll_ends(self) -> int:
        self._ending = [actor for actor in self._ending if not actor.process.dead]
        return len(self._ending)


def _place(node: Node) -> Place:
    return Place(node.name, node.name, node.labels.get(KIND_LABEL, ""))


class SimulatedHost(ActorHost):
    """Interface of a simulated process to its actor."""

    def __init__(self, network: Network, actor: VirtualActor, world: World) -> None:
        super().__init__(network.calls(actor))
        self._world, self._clock = world, network.clock(actor)

    def configure(self, actor_id: str, cores: Sequence[int], log_level: str) -> None:
        pass

    def build_engine(self, spec: ActorSpec) -> SimulatedEngine:
        world, target = self._world, spec.config.target
        self._clock.work(world.load_s)
        limits = (target.max_batch, target.max_step_tokens, world.cache_tokens)
        return SimulatedEngine(self._clock, world, *limits)

    def build_drafting(self, spec: ActorSpec, engine: Any) -> Drafting:
        drafting = super().build_drafting(spec, engine)
        engine.speculates = lambda: len(drafting) > 0 and not drafting.policy.suspension.is_quiet
        return drafting

    def build_proposer(self, drafter: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
        self._clock.work(self._world.load_s)
        return SimulatedProposer(drafter.method, self._clock, self._world, drafter.max_batch, drafter.branches)

    def unpack(self, buckets: Sequence[Any]) -> dict[str, Any]:
        return {}


class VirtualRun:
    """The parts of one run: a driver and a controller, on a machine beside `nodes`, and its actors. `world`: the ground
    truth of the models; `seed`: of latencies and of the order of simultaneous events."""

    def __init__(
        self,
        config: Config,
        world: World,
        nodes: Sequence[Node],
        seed: int,
        network: type[Network] = Network,
    ) -> None:
        self.config, self.world = config, world
        self.kernel = Kernel(seed)
        self.network = network(self.kernel, random.Random(f"network {seed}"))
        self.machines = Machines(list(nodes), rng=random.Random(f"placement {seed}"))
        self.head = Node("head", cpus=0.0, kind=nodes[0].kind)
        offset_s = random.Random(f"driver {seed}").uniform(0.0, 1e5)
        self.driver = VirtualActor("driver", self.head, Process("driver", offset_s=offset_s))
        self.clock, self.calls = self.network.clock(self.driver), self.network.calls(self.driver)
        self.backend: VirtualBackend | None = None
        self.queues: list[RequestQueue] = []
        self._suffixes = itertools.count()

    def start_run(self) -> None:
        """Start a controller and its actors, as the driver's task."""
        self.controller = self.network.start_actor("controller", self.head, self._make_controller, 0.1)
        self.calls.ask(self.controller, "start", deadline_s=300.0)
        self.queue = RequestQueue(self.config, self.controller, self.calls)
        self.queues.append(self.queue)

    def stream(self, entries: Sequence[JournalEntry]) -> Generator[JournalEntry, None, None]:
        """Run requests as `Rollout.stream`."""
        with self.queue.opening_stream() as number:
            yield from self.queue.run(entries, number)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the controller, as the driver."""
        return ask(self.calls, self.controller, method, *arguments)

    def shut_down(self) -> None:
        """End the run in order. Raises SpecActorError if the controller does not."""
        self.queue.close()
        self.ask("shutdown")

    def end_run(self) -> None:
        """End all actors, as Ray does after the end of the driver."""
        for actor in self.network.actors:
            self.network.kill(actor)
        self.machines.groups.clear()

    def make_host(self, actor: VirtualActor) -> ActorHost:
        """The parts of a simulated process."""
        return SimulatedHost(self.network, actor, self.world)

    def _make_controller(self, actor: VirtualActor) -> Controller:
        self.backend = VirtualBackend(self.network, self.machines, actor, self.make_host, self._suffixes)
        return Controller(self.config, "sim", backend=self.backend)
