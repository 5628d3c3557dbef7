"""`ActorHost` of a simulated process: models that take virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost
from specactor_ray.actors.specs import VerifierSpec
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import TargetConfig
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.registry import build_proposer
from specactor_ray.simulation.clairvoyant import KnownAcceptance, KnownCost
from specactor_ray.simulation.engine import SimulatedEngine
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import Network, VirtualActor, VirtualTransport
from specactor_ray.simulation.proposers import SimulatedProposer, TimedProposer
from specactor_ray.simulation.text import RecordedText
from specactor_ray.simulation.world import World
from specactor_ray.transport.messages import WeightSet
from specactor_ray.verify.drafting import Drafting


class SimulatedHost(ActorHost):
    """Interface of a simulated process to its actor."""

    def __init__(self, network: Network, actor: VirtualActor, world: World) -> None:
        self._network, self._actor, self._world = network, actor, world
        self._clock = VirtualClock(network.kernel, actor.process)
        self.calls = Calls(VirtualTransport(network, actor), self._clock)

    def configure(self, actor_id: str, cores: Sequence[int], log_level: str) -> None:
        pass

    def facts(self) -> dict[str, object]:
        return {"pid": 0, "cores": []}

    def build_engine(self, spec: VerifierSpec) -> SimulatedEngine:
        world, target = self._world, spec.target
        self._clock.work(world.times.load_s)
        limits = (target.max_batch, target.max_step_tokens, world.cache_tokens)
        return SimulatedEngine(self._actor, self._clock, self._network, world, *limits)

    def build_drafting(self, spec: VerifierSpec, engine: Any, *figures: Any) -> Drafting:
        world = self._world
        known = (KnownAcceptance(world), KnownCost(world, engine, self._clock)) if world.clairvoyant else ()
        drafting = super().build_drafting(spec, engine, *known)
        engine.speculates = lambda: len(drafting) > 0 and not drafting.policy.suspension.is_quiet
        return drafting

    def build_proposer(self, drafter: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
        """Build a simulated proposer; lookups in a recorded text are the package's own."""
        world, clock, name = self._world, self._clock, self._actor.name
        clock.work(world.times.load_s)
        if traits(drafter.method).looks_up and isinstance(world.text, RecordedText):
            return TimedProposer(build_proposer(drafter, target, device), clock, world, name)
        limits = (drafter.max_batch, drafter.branches)
        return SimulatedProposer(name, drafter.method, clock, world, self._network.rng.random, *limits)

    def fetch_weights(self, weights: WeightSet) -> dict[str, Any]:
        self.calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S)
        return {}
