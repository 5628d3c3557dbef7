"""A network whose calls are lost, repeated, delayed and cut off, as a seed determines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.core.errors import ActorUnavailableError, CallError
from specactor_ray.simulation.kernel import Kernel
from specactor_ray.simulation.network import CallInFlight, Network, Node, Reference, StoredObject, VirtualActor

_UNAVAILABLE_S = (0.05, 5.0)
"""Least and most seconds from a call to an unreachable actor to the caller's error."""


@dataclass
class LinkFaults:
    """Probabilities of faults of calls; changed while the simulation runs."""

    lost_before: float = 0.0
    """The call does not arrive; it fails like one to an unavailable actor."""
    lost_after: float = 0.0
    """The call is carried out, and its answer is lost."""
    repeated: float = 0.0
    """The call is carried out twice."""
    delayed: float = 0.0
    """The call takes up to `delay_s` longer, so that calls overtake each other."""
    delay_s: float = 2.0
    object_lost: float = 0.0
    """A fetch of an object fails."""


@dataclass(eq=False)
class FaultyCall(CallInFlight):
    """A call whose answer may be lost, and which does not cross the border of a node that is cut off."""

    network: FaultyNetwork
    keeps_answer: bool = True

    @property
    def is_cut_off(self) -> bool:
        nodes = self.network.cut_off
        return (self.caller.node in nodes) != (self.actor.node in nodes)

    def arrive(self) -> None:
        if self.is_cut_off and not self.actor.process.dead:
            self.network.unavailable(self.reference, self.method)
            return
        super().arrive()
        if not self.keeps_answer:
            self.actor.open_calls.pop(self.reference, None)

    def send_answer(self) -> None:
        if self.keeps_answer:
            super().send_answer()

    def answer(self) -> None:
        if self.is_cut_off:
            self.network.unavailable(self.reference, self.method)
        else:
            super().answer()


class FaultyNetwork(Network):
    """`faults` strike calls at random. `hits`: fault → number of affected calls. `cut_off`: nodes that no call reaches
    or leaves."""

    def __init__(self, kernel: Kernel, rng: random.Random) -> None:
        super().__init__(kernel, rng)
        self.faults, self.hits, self.cut_off = LinkFaults(), Counter[str](), set[Node]()

    def send(self, caller: VirtualActor, actor: VirtualActor, method: str, arguments: Sequence[Any]) -> Reference:
        reference, call = Reference(caller.process), (self, caller, actor, method, arguments)
        if self._strikes("lost_before"):
            self.unavailable(reference, method)
            return reference
        loses_answer = self._strikes("lost_after")
        way = caller.node, actor.node, arguments
        self.transmit(FaultyCall(*call, reference, keeps_answer=not loses_answer).arrive, *way)
        if self._strikes("repeated"):
            self.transmit(FaultyCall(*call, Reference()).arrive, *way)
        if loses_answer:
            self.unavailable(reference, method, after_s=self.rng.uniform(0.01, 1.0))
        return reference

    def transmit(self, arrived: Callable[[], None], sender: Node, receiver: Node, message: Any) -> None:
        latency_s = self.latency() + self.link_s(sender, receiver, message)
        delay_s = self.rng.uniform(0.0, self.faults.delay_s) if self._strikes("delayed") else 0.0
        self.kernel.at(self.kernel.now + latency_s + delay_s, arrived)

    def get(self, stored: StoredObject) -> Any:
        value = super().get(stored)
        if self._strikes("object_lost"):
            raise CallError("the object is lost")
        return value

    def unavailable(self, reference: Reference, method: str, after_s: float = 0.0) -> None:
        """Resolve a call like one to an unreachable actor, some time after `after_s` seconds."""
        error = ActorUnavailableError(f"{method}: out of reach")
        when = self.kernel.now + after_s + self.rng.uniform(*_UNAVAILABLE_S)
        self.kernel.at(when, lambda: self.resolve(reference, None, error))

    def lose_node(self, node: Node) -> None:
        """End a machine with all its actors."""
        node.alive = False
        for actor in self.actors:
            if actor.node is node:
                self.kill(actor, node_lost=True)

    def _strikes(self, fault: str) -> bool:
        probability = getattr(self.faults, fault)
        strikes = probability > 0.0 and self.rng.random() < probability
        self.hits[fault] += strikes
        return strikes
