"""The target engine of the virtual cluster: it knows what every request will say, and takes as long as a cost model
says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specactor_ray.errors import InputError
from specactor_ray.ragged import begins, enlarged, places
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import Network, VirtualActor
from specactor_ray.simulation.world import World
from specactor_ray.target.base import NO_DRAFTS, Drafts, Finish, StepResult, TargetRequest


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
        self._requests: dict[int, TargetRequest] = {}
        self._admitted: dict[int, None] = {}
        self._waiting: dict[int, None] = {}
        self._numbers = np.zeros((5, 0), np.int32)
        """By row: prompt tokens, output tokens so far and in all, positions that are not in the cache yet, and
        max_tokens."""
        self._truth = np.zeros((0, 1), np.int32)
        """By row and output position."""
        self.cached_tokens = 0
        """Of the contexts of admitted requests."""
        self.speculates: Callable[[], bool] = lambda: False
        """Whether the verifier minds drafts in this step."""

    # ---- requests ----

    def add(self, row: int, request: TargetRequest) -> None:
        prompt, most = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt + most > min(self.max_model_len, self._cache_tokens):
            raise InputError("the prompt is too long")
        committed = len(request.committed_token_ids)
        output = self._world.text.output(request.sampling, self.weight_version)
        truth = np.fromiter(output, np.int32, len(output))
        for axis, needed in enumerate((row + 1, len(truth))):
            if self._truth.shape[axis] < needed:
                self._truth = enlarged(self._truth, axis, 2 * needed)
        if self._numbers.shape[1] < len(self._truth):
            self._numbers = enlarged(self._numbers, 1, len(self._truth))
        self._truth[row, : len(truth)] = truth
        self._numbers[:, row] = prompt, committed, len(truth), prompt + committed, most
        self._requests[row] = request
        self._waiting[row] = None

    def remove(self, row: int) -> None:
        if row in self._admitted:
            del self._admitted[row]
            self.cached_tokens -= self._context(row)
        self._waiting.pop(row, None)
        self._requests.pop(row, None)

    def decoding(self) -> np.ndarray:
        self._admit()
        return self._ready()

    def has_work(self) -> bool:
        return bool(self._requests)

    def _ready(self) -> np.ndarray:
        rows = np.fromiter(self._admitted, np.int32, len(self._admitted))
        return rows[self._numbers[3, rows] == 0]

    def _context(self, row: int) -> int:
        return int(self._numbers[0, row] + self._numbers[1, row])

    # ---- steps ----

    def step(self, drafts: Drafts = NO_DRAFTS) -> StepResult:
        world, decoding = self._world, self.decoding()
        self._break_down()
        firsts, offered, drafted = np.zeros((3, self._numbers.shape[1]), np.int32)
        firsts[drafts.rows], offered[drafts.rows] = begins(drafts.lengths)[:-1], drafts.lengths
        drafted[decoding] = offered[decoding]
        positions = len(decoding) + int(drafted.sum())
        prefilled = self._prefill(self._max_step_tokens - positions)
        seconds = world.target.seconds(len(decoding), positions, self.cached_tokens, prefilled)
        world.busy.add(self._actor.name)
        begin = self._clock.now()
        self._clock.work(seconds + world.python.verify_s(self._actor.process, len(decoding), self.speculates()))
        world.busy.discard(self._actor.name)
        world.record.span(self._actor.name, "verify", begin, self._clock.now(), len(decoding), positions + prefilled)
        result = self._verify(drafts, firsts, drafted)
        for row in result.rows[result.finish != Finish.RUNNING].tolist():
            self.remove(row)
        self._preempt()
        result.forward_s, result.num_tokens = seconds * self._actor.process.slowness, positions + prefilled
        result.num_prefill_tokens = prefilled
        world.python.begin(self._actor.process)
        return result

    def _admit(self) -> None:
        while self._waiting and len(self._admitted) < self._max_batch:
            row = next(iter(self._waiting))
            if self._admitted and self.cached_tokens + self._context(row) + 1 > self._cache_tokens:
                return
            del self._waiting[row]
            self._admitted[row] = None
            self.cached_tokens += self._context(row)

    def _prefill(self, budget: int) -> int:
        """Fill the rest of the step with prompts, the oldest first. Returns the positions."""
        rows = np.fromiter(self._admitted, np.int32, len(self._admitted))
        left = self._numbers[3, rows]
        chunks = np.clip(budget - (np.cumsum(left) - left), 0, left)
        self._numbers[3, rows] -= chunks
        return int(chunks.sum())

    def _preempt(self) -> None:
        while self.cached_tokens > self._cache_tokens and len(self._admitted) > 1:
            row, _ = self._admitted.popitem()
            self.cached_tokens -= self._context(row)
            self._numbers[3, row] = self._context(row)
            self._waiting = {row: None, **self._waiting}

    def _verify(self, drafts: Drafts, firsts: np.ndarray, drafted: np.ndarray) -> StepResult:
        """Commit for all rows whose prompts are in: those whose prompt this step finished give their first token."""
        rows = self._ready()
        _, starts, ends, _, most = self._numbers[:, rows]
        reach = np.minimum(drafted[rows], ends - starts)
        column = np.arange(reach.max(initial=0))
        within = column < reach[:, None]
        guesses = drafts.tokens[np.where(within, firsts[rows, None] + column, 0)]
        truth = self._truth[rows[:, None], np.where(within, starts[:, None] + column, 0)]
        accepted = np.logical_and.accumulate(within & (guesses == truth), axis=1).sum(axis=1)
        made = np.minimum(accepted + 1, ends - starts)
        tokens = self._truth[np.repeat(rows, made), places(starts, made)]
        self._numbers[1, rows] += made
        self.cached_tokens += len(tokens)
        ended = np.where(ends == most, Finish.LENGTH, Finish.STOP)
        finish = np.where(starts + made == ends, ended, Finish.RUNNING).astype(np.uint8)
        lengths, right = made.astype(np.int32), accepted.astype(np.int32)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        return StepResult(rows, starts, lengths, tokens, logprobs, None, drafted[rows], right, finish)

    def _break_down(self) -> None:
        """End or block the process where a poison request, or a fault, says so."""
        world = self._world
        if self._actor.name in world.wedged:
            self._clock.sleep(float("inf"))
        for row in self._admitted if world.poison else ():
            kind, position = world.poison.get(self._requests[row].sampling.seed, ("", -1))
            if kind and self._numbers[1, row] >= position:
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
