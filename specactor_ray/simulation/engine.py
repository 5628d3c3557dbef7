"""The target engine of the virtual cluster: it knows what every request will say, and takes as long as a cost model
says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specactor_ray.drafters.mirror import common_prefix
from specactor_ray.errors import InputError
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import Network, VirtualActor
from specactor_ray.simulation.world import World
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest


@dataclass(eq=False, slots=True)
class _Row:
    request: TargetRequest
    truth: list[int]
    committed: int
    to_prefill: int
    """Positions of prompt and earlier output that are not in the cache yet."""

    @property
    def context(self) -> int:
        return len(self.request.prompt_token_ids) + self.committed


class SimulatedEngine:
    """Makes the tokens of the world's text.

    Requests are admitted first come first served while there are rows and cache; prompts are prefilled in chunks of
    what `max_step_tokens` leaves. When the cache is full the request admitted last gives up its share, waits as the
    first of those that wait, and is prefilled again, as in vLLM (recompute preemption).

    Args:
        actor: Its process, for poison that ends it.
        clock: Time of that process.
        network: Ends processes.
        world: Text, durations, exceptions.
        max_batch: Most rows of a step.
        max_step_tokens: Most positions of a step.
        cache_tokens: Most tokens of all contexts together.
    """

    def __init__(
        self,
        actor: VirtualActor,
        clock: VirtualClock,
        network: Network,
        world: World,
        max_batch: int,
        max_step_tokens: int,
        cache_tokens: float,
    ) -> None:
        self.vocab_size, self.max_model_len = world.text.vocab_size, world.max_model_len
        self.weight_version = 0
        self.closed = False
        self._actor, self._clock, self._network, self._world = actor, clock, network, world
        self._max_batch, self._max_step_tokens, self._cache_tokens = max_batch, max_step_tokens, cache_tokens
        self._admitted: dict[str, _Row] = {}
        self._waiting: dict[str, _Row] = {}
        self.cached_tokens = 0
        """Of the contexts of admitted requests."""
        self.speculates: Callable[[], bool] = lambda: False
        """Whether the verifier minds drafts in this step."""

    # ---- requests ----

    def add(self, request: TargetRequest) -> None:
        prompt, most = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt + most > min(self.max_model_len, self._cache_tokens):
            raise InputError("the prompt is too long")
        committed = len(request.committed_token_ids)
        truth = list(self._world.text.output(request.sampling, self.weight_version))
        self._waiting[request.request_id] = _Row(request, truth, committed, prompt + committed)

    def remove(self, request_id: str) -> None:
        row = self._admitted.pop(request_id, None)
        if row is not None:
            self.cached_tokens -= row.context
        self._waiting.pop(request_id, None)

    def decoding(self) -> list[str]:
        self._admit()
        return [name for name, row in self._admitted.items() if not row.to_prefill]

    def has_work(self) -> bool:
        return bool(self._admitted or self._waiting)

    # ---- steps ----

    def step(self, tails: Mapping[str, Tail]) -> StepResult:
        self._admit()
        world, result = self._world, StepResult()
        self._break_down(self._admitted.values())
        decoding = {name: tails.get(name, ()) for name, row in self._admitted.items() if not row.to_prefill}
        positions = len(decoding) + sum(map(len, decoding.values()))
        prefilled = self._prefill(self._max_step_tokens - positions)
        seconds = world.target.seconds(len(decoding), positions, self.cached_tokens, prefilled)
        world.busy.add(self._actor.name)
        begin = self._clock.now()
        self._clock.work(seconds + world.python.verify_s(self._actor.process, len(decoding), self.speculates()))
        world.busy.discard(self._actor.name)
        world.record.span(self._actor.name, "verify", begin, self._clock.now(), len(decoding), positions + prefilled)
        for name, row in list(self._admitted.items()):
            if not row.to_prefill:  # also those whose prompt was finished in this step: it gives their first token
                result.outputs.append(self._verify(row, decoding.get(name, ())))
                if result.outputs[-1].finish_reason is not None:
                    self.remove(name)
        self._preempt()
        result.forward_s, result.num_tokens = seconds * self._actor.process.slowness, positions + prefilled
        result.num_prefill_tokens = prefilled
        world.python.begin(self._actor.process)
        return result

    def _admit(self) -> None:
        while self._waiting and len(self._admitted) < self._max_batch:
            name, row = next(iter(self._waiting.items()))
            if self._admitted and self.cached_tokens + row.context + 1 > self._cache_tokens:
                return
            del self._waiting[name]
            self._admitted[name] = row
            self.cached_tokens += row.context

    def _prefill(self, budget: int) -> int:
        """Fill the rest of the step with prompts, the oldest first. Returns the positions."""
        done = 0
        for row in self._admitted.values():
            if row.to_prefill and done < budget:
                chunk = min(row.to_prefill, budget - done)
                row.to_prefill -= chunk
                done += chunk
        return done

    def _preempt(self) -> None:
        while self.cached_tokens > self._cache_tokens and len(self._admitted) > 1:
            name, row = self._admitted.popitem()
            self.cached_tokens -= row.context
            row.to_prefill = row.context
            self._waiting = {name: row, **self._waiting}

    def _verify(self, row: _Row, tail: Tail) -> RowOutput:
        truth, start = row.truth, row.committed
        expected = truth[start : start + len(tail)]
        accepted = len(tail) if tail == expected else common_prefix(tail, expected)
        tokens = truth[start : start + accepted + 1]
        row.committed += len(tokens)
        self.cached_tokens += len(tokens)
        finished = None
        if row.committed == len(truth):
            finished = "length" if len(truth) == row.request.sampling.max_tokens else "stop"
        logprobs = [-1.0] * len(tokens)
        name = row.request.request_id
        return RowOutput(name, start, tokens, logprobs, len(tail), min(accepted, len(tokens)), finish_reason=finished)

    def _break_down(self, rows: Iterable[_Row]) -> None:
        """End or block the process where a poison request, or a fault, says so."""
        world = self._world
        if self._actor.name in world.wedged:
            self._clock.sleep(float("inf"))
        for row in rows if world.poison else ():
            kind, position = world.poison.get(row.request.sampling.seed, ("", -1))
            if kind and row.committed >= position:
                if kind == "crash":
                    self._network.kill(self._actor)
                self._clock.sleep(float("inf"))

    # ---- weights and memory ----

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        if self.has_work():
            raise InputError("requests are running")
        self._clock.work(self._world.times.sync_s)
        self.weight_version = version

    def sleep(self) -> None:
        if self.has_work():
            raise InputError("requests are running")
        self._clock.work(self._world.times.sleep_s)

    def wake(self) -> None:
        self._clock.work(self._world.times.sleep_s)

    def close(self) -> None:
        self.closed = True
