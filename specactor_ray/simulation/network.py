"""Actors, calls and objects of the virtual cluster in place of Ray.

A call takes time both ways, runs as a task of the actor's process (eight at once), and fails like Ray's calls once the
actor's process has ended.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from specactor_ray.cluster.backend import ProcessFacts
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import (
    ActorLostError,
    CallError,
    CallTimeoutError,
    RemoteError,
    SpecActorError,
)
from specactor_ray.simulation.kernel import Fiber, Kernel, Process, VirtualClock

_CONCURRENCY = 8
_BESIDE = ("heartbeat", "send_weights")
"""Methods with concurrency groups of their own: they run beside all others."""
_DETECTION_S = (0.01, 1.0)
"""Least and most seconds from the end of an actor to the errors of its callers."""


@dataclass(frozen=True)
class Kind:
    """A kind of machines, and the way from them to those of other kinds."""

    number: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    """Rate of each node, each way."""


@dataclass(eq=False)
class Node:
    """A simulated machine."""

    name: str
    cpus: float
    gpus: float = 0.0
    alive: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    """As those of Ray's nodes; `KIND_LABEL` names the kind of its GPUs."""
    kind: Kind = Kind()
    sends_until: float = 0.0
    receives_until: float = 0.0
    """Virtual times at which its last messages from and to other kinds have passed."""


@dataclass(slots=True, eq=False)
class Reference:
    """The `Answer` to a call."""

    caller: Process | None = None
    """Process of the caller; callbacks are not called once it is dead."""
    done: bool = False
    value: Any = None
    error: SpecActorError | None = None
    waiters: list[tuple[Fiber, int]] = field(default_factory=list)
    callbacks: list[Callable[[Reference], None]] = field(default_factory=list)

    def add_done_callback(self, done: Callable[[Reference], None]) -> None:
        if self.done:
            done(self)
        else:
            self.callbacks.append(done)

    def exception(self) -> SpecActorError | None:
        return self.error

    def result(self, what: str) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(eq=False)
class VirtualActor:
    """An actor and its process; also its handle for calls."""

    name: str
    node: Node
    process: Process
    instance: Any = None
    """The actor's object; None until its constructor has run."""
    running: int = 0
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    open_calls: dict[Reference, None] = field(default_factory=dict)
    """Calls that would fail if the actor died now."""
    node_lost: bool = False
    concurrency: int = _CONCURRENCY
    """Most calls at a time. Those of `_BESIDE` do not count."""

    def lost(self) -> ActorLostError:
        """The error of calls to the actor once its process has ended."""
        return ActorLostError(f"{self.name}: its process ended", self.node_lost)


@dataclass(frozen=True)
class StoredObject:
    """A reference to an object in the store."""

    number: int
    owner: VirtualActor


@dataclass(slots=True, eq=False)
class CallInFlight:
    """A call: `arrive` and `answer` are events, `run` is a task of the actor's process."""

    network: Network
    caller: VirtualActor
    actor: VirtualActor
    method: str
    arguments: Sequence[Any]
    reference: Reference
    value: Any = None
    error: SpecActorError | None = None

    def arrive(self) -> None:
        network, actor = self.network, self.actor
        if actor.process.dead:
            network.fail_later(self.reference, actor.lost())
        else:
            actor.open_calls[self.reference] = None
            if self.method in _BESIDE and actor.instance is not None:
                network.kernel.spawn(self.run, "call", actor.process)
            else:
                actor.queue.append(self.run_in_turn)
                network.start_calls(actor)

    def run_in_turn(self) -> None:
        self.run()
        self.actor.running -= 1
        self.network.start_calls(self.actor)

    def run(self) -> None:
        method, network = self.method, self.network
        try:
            self.value = network.invoke(self.actor, method, self.arguments)
        except CallError as raised:  # concerns an actor that this actor called
            self.error = RemoteError(f"{method}: {type(raised).__name__}: {raised}")
        except SpecActorError as raised:
            self.error = raised
        except Exception as raised:  # noqa: BLE001 - Ray returns any exception of a method to the caller
            self.error = RemoteError(f"{method}: {type(raised).__name__}: {raised}")
        self.send_answer()

    def send_answer(self) -> None:
        self.network.transmit(self.answer, self.actor.node, self.caller.node, self.value)

    def answer(self) -> None:
        self.actor.open_calls.pop(self.reference, None)
        self.network.resolve(self.reference, self.value, self.error)


class Network:
    """The connections of the processes of one simulation. `rng` draws latencies."""

    def __init__(self, kernel: Kernel, rng: random.Random) -> None:
        self.kernel, self.rng = kernel, rng
        self.actors: list[VirtualActor] = []
        self._objects: dict[int, Any] = {}
        self.latency_s = (0.0005, 0.002)
        """Least and most seconds of a call, one way."""

    def latency(self) -> float:
        return self.rng.uniform(*self.latency_s)

    def clock(self, actor: VirtualActor) -> VirtualClock:
        return VirtualClock(self.kernel, actor.process)

    def calls(self, caller: VirtualActor) -> Calls:
        """The calls of an actor."""
        return Calls(VirtualTransport(self, caller), self.clock(caller))

    def start_actor(
        self,
        name: str,
        node: Node,
        make: Callable[[VirtualActor], Any],
        start_s: float,
        concurrency: int = _CONCURRENCY,
    ) -> VirtualActor:
        """Start a process with an actor that is made after `start_s` seconds."""
        process = Process(name, offset_s=self.rng.uniform(0.0, 1e5))
        actor = VirtualActor(name, node, process, concurrency=concurrency)
        self.actors.append(actor)

        def construct() -> None:
            self.clock(actor).sleep(start_s)
            actor.instance = make(actor)
            self.start_calls(actor)

        self.kernel.spawn(construct, "init", process)
        return actor

    def kill(self, actor: VirtualActor, node_lost: bool = False) -> None:
        """End an actor's process; calls to it fail after a while."""
        if actor.process.dead:
            return
        actor.node_lost = node_lost
        self.kernel.kill(actor.process)
        for reference in list(actor.open_calls):
            self.fail_later(reference, actor.lost())
        actor.open_calls.clear()
        actor.queue.clear()

    # ---- calls ----

    def send(self, caller: VirtualActor, actor: VirtualActor, method: str, arguments: Sequence[Any]) -> Reference:
        """Begin a call."""
        call = CallInFlight(self, caller, actor, method, arguments, Reference(caller.process))
        self.transmit(call.arrive, caller.node, actor.node, arguments)
        return call.reference

    def transmit(self, arrived: Callable[[], None], sender: Node, receiver: Node, message: Any) -> None:
        """Carry a call or an answer: `arrived` is called after its latency, and the time on links."""
        self.kernel.at(self.kernel.now + self.latency() + self.link_s(sender, receiver, message), arrived)

    def link_s(self, sender: Node, receiver: Node, message: Any) -> float:
        """Seconds on the way between nodes of two kinds, behind earlier messages of both; 0 within a kind."""
        ours, theirs = sender.kind, receiver.kind
        if ours == theirs:
            return 0.0
        seconds, rate = ours.latency_s + theirs.latency_s, min(ours.bytes_per_s, theirs.bytes_per_s)
        if rate < math.inf:
            begin = max(self.kernel.now, sender.sends_until, receiver.receives_until)
            sender.sends_until = receiver.receives_until = begin + num_bytes(message) / rate
            seconds += sender.sends_until - self.kernel.now
        return seconds

    def start_calls(self, actor: VirtualActor) -> None:
        """Begin waiting calls, as many as may run at a time."""
        while actor.queue and actor.instance is not None and actor.running < actor.concurrency:
            actor.running += 1
            self.kernel.spawn(actor.queue.popleft(), "call", actor.process)

    def invoke(self, actor: VirtualActor, method: str, arguments: Sequence[Any]) -> Any:
        """Run a method of an actor, in the current task."""
        if method == "__ray_call__":  # process_facts; the pid is the same number in each run
            return ProcessFacts(zlib.crc32(actor.name.encode()), 0, actor.node.name)
        taken = [self.get(value) if isinstance(value, StoredObject) else value for value in arguments]
        return getattr(actor.instance, method)(*taken)

    def resolve(self, reference: Reference, value: Any, error: SpecActorError | None) -> None:
        """Record an answer that has arrived; the first one counts."""
        if reference.done:
            return
        reference.done, reference.value, reference.error = True, value, error
        for waiter in reference.waiters:
            self.kernel.wake(waiter)
        reference.waiters.clear()
        if reference.callbacks and not (reference.caller and reference.caller.dead):
            for callback in reference.callbacks:
                callback(reference)

    def fail_later(self, reference: Reference, error: SpecActorError) -> None:
        """Resolve a call with the error of an actor that has ended, once that is detected."""
        when = self.kernel.now + self.rng.uniform(*_DETECTION_S)
        self.kernel.at(when, lambda: self.resolve(reference, None, error))

    # ---- objects ----

    def put(self, owner: VirtualActor, value: Any) -> StoredObject:
        number = len(self._objects)
        self._objects[number] = value
        return StoredObject(number, owner)

    def get(self, stored: StoredObject) -> Any:
        if stored.owner.process.dead:
            raise ActorLostError("the owner of the object is gone", stored.owner.node_lost)
        return self._objects[stored.number]


class VirtualTransport:
    """The `Transport` of one simulated process."""

    def __init__(self, network: Network, caller: VirtualActor) -> None:
        self._network, self._caller, self._kernel = network, caller, network.kernel

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Reference:
        return self._network.send(self._caller, actor, method, arguments)

    def wait(self, references: Sequence[Any], timeout_s: float) -> set[Any]:
        done = {reference for reference in references if reference.done}
        if done or timeout_s <= 0.0:
            return done
        waiter = self._kernel.arm()
        for reference in references:
            reference.waiters.append(waiter)
        self._kernel.block(timeout_s)
        return {reference for reference in references if reference.done}

    def put(self, value: Any) -> StoredObject:
        return self._network.put(self._caller, value)

    def fetch(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        network, node = self._network, self._caller.node
        took = network.latency()
        crossing = [one for one in references if one.owner.node.kind != node.kind]
        took += max((network.link_s(one.owner.node, node, network.get(one)) for one in crossing), default=0.0)
        if took > timeout_s:
            raise CallTimeoutError("fetching an object: not in time")
        self._network.clock(self._caller).sleep(took)
        return [self._network.get(reference) for reference in references]

    def export(self, rows: Any, run: str = "") -> None:
        pass


_NUMBER = 8
"""Bytes of a number, and of a handle."""


def num_bytes(value: Any) -> int:
    """Bytes of a message: of its arrays and texts, and 8 for each other value. Handles and references are one value."""
    if isinstance(value, VirtualActor | StoredObject):
        return _NUMBER
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(num_bytes(key) + num_bytes(item) for key, item in value.items())
    if isinstance(value, Sequence | set | frozenset):
        return sum(map(num_bytes, value))
    if is_dataclass(value):
        return sum(num_bytes(getattr(value, one.name)) for one in fields(value))
    return _NUMBER
