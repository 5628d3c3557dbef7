"""A run on a virtual cluster: a driver, a controller and its actors, in one kernel."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence

from specactor_ray.actors.draft import DraftActor
from specactor_ray.actors.verifier import VerifierActor
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import Config
from specactor_ray.controller.controller import Controller
from specactor_ray.controller.members import ActorClasses
from specactor_ray.rollout.run_client import RunClient
from specactor_ray.simulation.cluster import Machines, VirtualBackend
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.network import Network, Node, VirtualActor, VirtualTransport
from specactor_ray.simulation.world import World


def silence() -> None:
    """Turn off the log of this process, to which simulated actors write."""
    logging.disable(logging.CRITICAL)


class VirtualRun:
    """The parts of one run.

    Args:
        config, world: The package's configuration, and the ground truth of its models.
        nodes: The machines; the driver and the controller have a separate machine.
        seed: Seed of latencies and of the order of simultaneous events.
        trace: Called with (time, what) for each event.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        nodes: Sequence[Node],
        seed: int,
        trace: Callable[[float, str], None] | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.kernel = Kernel(seed, trace)
        self.network = Network(self.kernel, random.Random(f"network {seed}"))
        self.machines = Machines(list(nodes))
        self.head = Node("head", cpus=0.0)
        offset_s = random.Random(f"driver {seed}").uniform(0.0, 1e5)
        self.driver = VirtualActor("driver", self.head, Process("driver", offset_s=offset_s))
        self.clock = VirtualClock(self.kernel, self.driver.process)
        self.calls = Calls(VirtualTransport(self.network, self.driver), self.clock)
        self.backend: VirtualBackend | None = None
        self.clients: list[RunClient] = []
        self._suffixes = itertools.count()

    def start_run(self) -> None:
        """Start a controller and its actors, as the driver's task."""
        self.controller = self.network.start_actor("controller", self.head, self._make_controller, 0.1)
        self.calls.ask(self.controller, "start", deadline_s=300.0)
        self.client = RunClient(self.config, self.controller, self.calls)
        self.clients.append(self.client)

    def end_run(self) -> None:
        """End all actors, as Ray does after the end of the driver."""
        for actor in self.network.actors:
            self.network.kill(actor)
        self.machines.groups.clear()

    def _make_controller(self, actor: VirtualActor) -> Controller:
        self.backend = VirtualBackend(self.network, self.machines, actor, self.world, self._suffixes)
        classes = ActorClasses(VerifierActor, DraftActor)
        return Controller(self.config, "sim", classes, backend=self.backend)
