"""Engines that break down, and drafters that draft nonsense."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.actors.specs import ActorSpec
from specactor_ray.core.clock import Clock
from specactor_ray.core.errors import FetchError
from specactor_ray.draft.proposer import Proposer
from specactor_ray.simulation import _kernels
from specactor_ray.simulation.cluster import SimulatedHost
from specactor_ray.simulation.models import SimulatedEngine
from specactor_ray.simulation.network import Network, VirtualActor
from specactor_ray.simulation.world import World
from specactor_ray.table.view import TableView
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.transport.messages import JOIN_S, SLOWEST_S, WeightSet


class Groups:
    """Process groups of broadcasts: they bring the weights if all members live until the end."""

    def __init__(self) -> None:
        self._members: dict[str, dict[int, VirtualActor]] = {}
        self.clashes: list[str] = []
        """Ranks that two processes had."""
        self.whole = 0
        """Broadcasts that a verifier received."""

    def take_part(self, actor: VirtualActor, clock: Clock, weights: WeightSet) -> None:
        """As `actors.broadcast`: returns when the weights are there; FetchError if the group failed."""
        plan = weights.broadcast
        assert plan is not None
        members, end = self._members.setdefault(plan.group, {}), clock.now() + JOIN_S
        if plan.rank in members or not 0 <= plan.rank < plan.size:
            self.clashes.append(f"rank {plan.rank} of {plan.size} in group {plan.group!r}")
        members[plan.rank] = actor
        while len(members) < plan.size:
            if clock.now() >= end:
                raise FetchError("not all have met")
            clock.sleep(0.05)
        clock.sleep(zlib.crc32(plan.group.encode()) % 100 / 100)
        if any(one.process.dead for one in members.values()):
            raise FetchError("a member is gone")
        if any(one.process.frozen for one in members.values()):
            clock.sleep(SLOWEST_S)
            raise FetchError("a member hangs")
        self.whole += plan.rank > 0


@dataclass
class ModelFaults:
    """What is wrong now."""

    poison: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Seed of a request → its fault (`crash` or `wedge` of the engine), and the output position of the fault."""
    wedged: set[str] = field(default_factory=set)
    """Verifiers whose engine does not return from its next step."""
    busy: set[str] = field(default_factory=set)
    """Verifiers that are in a step."""
    corrupt: set[str] = field(default_factory=set)
    """Draft actors with wrong drafts."""
    users: dict[str, set[VirtualActor]] = field(default_factory=lambda: {"verifiers": set(), "trainer": set()})
    """Actors with memory on the device that `trainer.offload` shares."""
    crowds: list[str] = field(default_factory=list)
    """Times at which both had."""
    groups: Groups = field(default_factory=Groups)

    def use_device(self, kind: str, actor: VirtualActor, uses: bool) -> None:
        (self.users[kind].add if uses else self.users[kind].discard)(actor)
        verifiers, ranks = ([one.name for one in of if not one.process.dead] for of in self.users.values())
        if verifiers and ranks:
            self.crowds.append(f"the device holds both {verifiers} and {ranks}")


class FaultyHost(SimulatedHost):
    """Builds engines and proposers with faults."""

    def __init__(self, network: Network, actor: VirtualActor, world: World, faults: ModelFaults) -> None:
        super().__init__(network, actor, world)
        self._network, self._actor, self._faults = network, actor, faults

    def join_broadcast(self, weights: WeightSet) -> list[Any]:
        self._faults.groups.take_part(self._actor, self.clock, weights)
        return [self._network.get(reference) for reference in weights.buckets]

    def build_engine(self, spec: ActorSpec) -> SimulatedEngine:
        use_device = functools.partial(self._faults.use_device, "verifiers", self._actor)
        use_device(True)
        engine = super().build_engine(spec)
        step, busy, name = engine.step, self._faults.busy, self._actor.name
        sleep, wake = engine.sleep, engine.wake
        engine.sleep = lambda keep=True: (sleep(keep), use_device(False))[0]  # type: ignore[method-assign]
        engine.wake = lambda: (wake(), use_device(True))[0]  # type: ignore[method-assign]

        in_flight, room = zlib.crc32(name.encode()) % 2 == 1, 0

        def faulty_step(drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
            nonlocal room
            self._break_down(engine)
            busy.add(name)
            # Every other engine keeps a step in flight: it verifies drafts only where the call before announced them.
            drafts, room = NO_DRAFTS if in_flight and not room else drafts, window
            result = step(drafts, window)
            busy.discard(name)
            return result

        engine.step = faulty_step  # type: ignore[method-assign]
        return engine

    def build_proposer(self, *arguments: Any) -> Proposer:
        proposer: Any = super().build_proposer(*arguments)
        propose: Callable[[TableView, np.ndarray], np.ndarray] = proposer.propose

        def faulty_propose(view: TableView, rows: np.ndarray) -> np.ndarray:
            changed = propose(view, rows)
            if self._actor.name in self._faults.corrupt:
                tails, random = view.table.tail[view.seat], self._network.rng.random
                for row in changed.tolist():
                    tails[row] = [[int(random() * 2e9) - 10**9 for _ in tail] for tail in tails[row]]
            return changed

        proposer.propose = faulty_propose
        return proposer

    def _break_down(self, engine: SimulatedEngine) -> None:
        """End or block the process because of a poison request or a fault."""
        if self._actor.name in self._faults.wedged:
            self._clock.sleep(float("inf"))
        engine.decoding()  # admits requests
        for row in engine._admitted if self._faults.poison else ():
            kind, position = self._faults.poison.get(engine.table.requests[row].sampling.seed, ("", -1))
            if kind and engine._numbers[_kernels.OUTPUT, row] >= position:
                if kind == "crash":
                    self._network.kill(self._actor)
                self._clock.sleep(float("inf"))
