"""A few processes on the simulator's kernel and network, for tests that drive one part of the product by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import SpecActorError
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.network import Network, Node, Reference, VirtualActor, VirtualTransport

T = TypeVar("T")


class Bench:
    """A driver process on a node of its own, and whatever actors a test starts beside it.

    Args:
        seed: Of the order of events, and of latencies.
        network: What connects the processes.
    """

    def __init__(self, seed: int = 0, network: type[Network] = Network) -> None:
        self.kernel = Kernel(seed)
        self.network: Any = network(self.kernel, random.Random(seed))
        self.node = Node("node", cpus=8.0)
        self.driver = VirtualActor("driver", Node("head", cpus=0.0), Process("driver", offset_s=1000.0))
        self.clock = VirtualClock(self.kernel, self.driver.process)
        self.calls = Calls(VirtualTransport(self.network, self.driver), self.clock)

    def start(self, instance: Any, name: str = "actor") -> VirtualActor:
        """An actor that serves at once."""
        return self.network.start_actor(name, self.node, lambda _actor: instance, 0.0)

    def clock_of(self, actor: VirtualActor) -> VirtualClock:
        return VirtualClock(self.kernel, actor.process)

    def run(self, body: Callable[[], T], limit_s: float = 10_000.0) -> T:
        """Run the body as the driver until it returns; what it raises is raised here."""
        results: list[T] = []
        self.kernel.spawn(lambda: results.append(body()), "body", self.driver.process)
        self.kernel.run(until=limit_s, done=lambda: bool(results or self.kernel.crashes))
        crashes = list(self.kernel.crashes)
        self.kernel.close()
        for _name, error in crashes:
            raise error
        assert results, f"the driver had not ended after {limit_s:g} s"
        return results[0]


class Script(VirtualTransport):
    """Answers each call as the test wrote down: (seconds, value or error) for one call after the other; None: never.

    Attributes:
        sent: (virtual seconds, actor, method, arguments) of each call.
    """

    def __init__(self, bench: Bench, answers: Sequence[tuple[float, Any] | None]) -> None:
        super().__init__(bench.network, bench.driver)
        self._bench, self._answers = bench, list(answers)
        self.sent: list[tuple[float, Any, str, tuple[Any, ...]]] = []

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Reference:
        kernel, reference = self._bench.kernel, Reference()
        self.sent.append((kernel.now, actor, method, tuple(arguments)))
        answer = self._answers.pop(0)
        if answer is not None:
            value = answer[1]
            error = value if isinstance(value, SpecActorError) else None
            kernel.at(kernel.now + answer[0], lambda: self._bench.network.resolve(reference, value, error))
        return reference

    def calls(self) -> Calls:
        return Calls(self, self._bench.clock)
