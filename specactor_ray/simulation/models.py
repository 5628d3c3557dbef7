"""What stands in for models in the virtual cluster: a target whose tokens are a function of request, position and
weights, and drafters that are right with a set probability."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.controller.state import VerifierSpec
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.errors import InputError
from specactor_ray.messages import SamplingParams, WeightSet
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import Network, VirtualActor, VirtualTransport
from specactor_ray.speculation.tree import DraftTree
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest

VOCAB_SIZE = 1000
_MAX_MODEL_LEN = 100_000


def true_token(seed: int, version: int, position: int) -> int:
    """What the target samples; keyed like the real sampler."""
    return zlib.crc32(b"%d %d %d" % (seed, version, position)) % VOCAB_SIZE


def true_output(sampling: SamplingParams, version: int) -> tuple[int, ...]:
    """The whole output of a request under these weights."""
    return tuple(true_token(sampling.seed, version, position) for position in range(sampling.max_tokens))


@dataclass
class World:
    """What the models know and their users do not."""

    poison: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Seed of a request → how it breaks its engine (`crash` or `wedge`) and at which output position."""
    skill: dict[str, float] = field(default_factory=dict)
    """Draft method → probability that a draft token is right."""
    wedged: set[str] = field(default_factory=set)
    """Verifiers whose engine does not come back from its next step."""
    busy: set[str] = field(default_factory=set)
    """Verifiers that are in a step."""
    corrupt: set[str] = field(default_factory=set)
    """Draft actors that draft nonsense."""
    step_s: float = 0.02
    position_s: float = 0.0002
    """Seconds of a step: for its own sake, and for each position."""
    draft_s: float = 0.004
    load_s: float = 0.5
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of the weights it runs with."""


@dataclass(eq=False, slots=True)
class _Row:
    request: TargetRequest
    committed: int
    prefilled: bool = False


class SimulatedEngine:
    """A `TargetEngine` that takes time and makes keyed tokens.

    Args:
        actor: Its process, for poison that ends it.
        clock: Time of that process.
        network: Ends processes.
        world: Tokens' exceptions and durations.
        max_batch: Most rows of a step.
    """

    vocab_size = VOCAB_SIZE
    max_model_len = _MAX_MODEL_LEN
    supports_trees = False

    def __init__(
        self, actor: VirtualActor, clock: VirtualClock, network: Network, world: World, max_batch: int
    ) -> None:
        self.weight_version = 0
        self.closed = False
        self._actor, self._clock, self._network, self._world = actor, clock, network, world
        self._max_batch = max_batch
        self._rows: dict[str, _Row] = {}
        self._asleep = False

    def add(self, request: TargetRequest) -> None:
        if len(request.prompt_token_ids) + request.sampling.max_tokens > _MAX_MODEL_LEN:
            raise InputError("the prompt is too long")
        self._rows[request.request_id] = _Row(request, len(request.committed_token_ids))

    def remove(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def committed_len(self, request_id: str) -> int:
        return self._rows[request_id].committed

    def decoding(self) -> list[str]:
        return [name for name, row in self._admitted().items() if row.prefilled]

    def has_work(self) -> bool:
        return bool(self._rows)

    def step(self, tails: Mapping[str, Tail]) -> StepResult:
        rows = self._admitted()
        self._break_down(rows.values())
        result, positions, prefill = StepResult(), 0, 0
        for name, row in rows.items():
            if not row.prefilled:
                prefill += len(row.request.prompt_token_ids) + row.committed
                row.prefilled = True
                continue
            tail = tails.get(name, ())
            assert not isinstance(tail, DraftTree)  # it does not support them
            positions += len(tail) + 1
            result.outputs.append(self._verify(row, tail))
        seconds = self._world.step_s + self._world.position_s * (positions + prefill)
        self._world.busy.add(self._actor.name)
        self._clock.work(seconds)
        self._world.busy.discard(self._actor.name)
        result.forward_s, result.num_tokens = seconds, positions + prefill
        result.num_prefill_tokens, result.num_rows = prefill, len(rows)
        for output in result.outputs:
            if output.finish_reason is not None:
                self._rows.pop(output.request_id, None)
        return result

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if self._rows:
            raise InputError("requests are running")
        self._clock.work(self._world.load_s)
        self.weight_version = version

    def sleep(self) -> None:
        if self._rows:
            raise InputError("requests are running")
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self.closed = True

    def _admitted(self) -> dict[str, _Row]:
        return dict(list(self._rows.items())[: self._max_batch])

    def _verify(self, row: _Row, tail: Sequence[int]) -> RowOutput:
        request, start = row.request, row.committed
        room = request.sampling.max_tokens - start
        tokens: list[int] = []
        accepted = 0
        for guess in [*tail, None]:
            token = true_token(request.sampling.seed, self.weight_version, start + len(tokens))
            tokens.append(token)
            if guess != token or len(tokens) == room:
                accepted += guess == token
                break
            accepted += 1
        row.committed += len(tokens)
        finished = "length" if row.committed == request.sampling.max_tokens else None
        logprobs = [-1.0] * len(tokens)
        return RowOutput(request.request_id, start, tokens, logprobs, len(tail), accepted, finish_reason=finished)

    def _break_down(self, rows: Any) -> None:
        """End or block the process where a poison request, or a fault, says so."""
        if self._actor.name in self._world.wedged:
            self._clock.sleep(float("inf"))
        for row in rows:
            kind, position = self._world.poison.get(row.request.sampling.seed, ("", -1))
            if kind and row.committed >= position:
                if kind == "crash":
                    self._network.kill(self._actor)
                self._clock.sleep(float("inf"))


class SimulatedProposer:
    """A `Proposer` that knows the true tokens, and says them with a set probability.

    Args:
        name: Its process.
        method: The draft method it stands for.
        clock: Time of its process.
        world: Its skill.
        random: A number in [0, 1).
    """

    vocab_size: int | None = VOCAB_SIZE

    def __init__(self, name: str, method: str, clock: VirtualClock, world: World, random: Callable[[], float]) -> None:
        self.method, self.weight_version = method, 0
        self._name = name
        self._clock, self._world, self._random = clock, world, random
        self._mirrors: dict[str, RequestMirror] = {}
        self._changed: dict[str, None] = {}

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self._mirrors[request_id] = RequestMirror(prompt_token_ids, committed_token_ids, sampling, window)
        self._changed[request_id] = None

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], window: int) -> bool:
        mirror = self._mirrors.get(request_id)
        if mirror is None or not mirror.commit(start, token_ids, window).ok:
            return False
        self._changed[request_id] = None
        return True

    def extend(self) -> list[str]:
        growing = [name for name, mirror in self._mirrors.items() if mirror.room]
        if growing:
            self._clock.work(self._world.draft_s)
        for name in growing:
            mirror = self._mirrors[name]
            seed, position = mirror.sampling.seed, mirror.base_len + len(mirror.tail)
            token = true_token(seed, self._world.version_of.get(seed, 0), position)
            right = self._random() < self._world.skill.get(self.method, 0.5)
            if self._name in self._world.corrupt:
                token, right = int(self._random() * 2e9) - 10**9, True
            mirror.tail.append(token if right else (token + 1) % VOCAB_SIZE)
        changed, self._changed = self._changed, {}
        return list(dict.fromkeys([*changed, *growing]))

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self._mirrors[request_id]
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        mirror = self._mirrors.get(request_id)
        return mirror is not None and mirror.room > 0

    def close(self, request_id: str, finished: bool = True) -> None:
        self._mirrors.pop(request_id, None)
        self._changed.pop(request_id, None)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.load_s)
        self.weight_version = version


class SimulatedHost(ActorHost):
    """The `ActorHost` of one simulated process."""

    def __init__(self, network: Network, actor: VirtualActor, world: World) -> None:
        self._network, self._actor, self._world = network, actor, world
        self._clock = VirtualClock(network.kernel, actor.process)
        self.calls = Calls(VirtualTransport(network, actor), self._clock)
        self.proposers: list[SimulatedProposer] = []
        self.engine: SimulatedEngine | None = None

    def configure(self, actor_id: str, cores: Sequence[int], log_level: str, spins: int = 0) -> None:
        pass

    def facts(self) -> dict[str, object]:
        return {"pid": 0, "cores": []}

    def build_engine(self, spec: VerifierSpec) -> SimulatedEngine:
        self._clock.work(self._world.load_s)
        self.engine = SimulatedEngine(self._actor, self._clock, self._network, self._world, spec.target.max_batch)
        return self.engine

    def build_proposer(self, drafter: DrafterConfig, target: TargetConfig, device: str) -> SimulatedProposer:
        self._clock.work(self._world.load_s)
        proposer = SimulatedProposer(
            self._actor.name, drafter.method, self._clock, self._world, self._network.rng.random
        )
        self.proposers.append(proposer)
        return proposer

    def fetch_weights(self, weights: WeightSet) -> dict[str, Any]:
        self.calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S)
        return {}
