"""Verifiers and a controller in a few lines, for tests of the rollout's side: a test says what goes wrong with them."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specactor_ray.actors.specs import ClusterView, Departure
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams, TopTokens
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.queue import RequestQueue
from specactor_ray.simulation.kernel import Kernel
from specactor_ray.simulation.network import Reference, VirtualActor
from specactor_ray.table.requests import TargetRequest
from specactor_ray.transport.link import EventQueue
from specactor_ray.transport.messages import (
    Finished,
    FinishedOutput,
    Progress,
    PromptScores,
    Refused,
    RequestStats,
    ToRollout,
    Verified,
    WeightSet,
)
from tests.fakes.virtual import Bench
from tests.faults.network import FaultyNetwork
from tests.number_text import true_output, true_token

STEP_S = 0.05


def one_token(request_id: str, attempt: int, position: int, token: int, tops: int = 0) -> Progress:
    """A step that committed one token of one request, of 3 drafted ones, 1 of them right; the most probable ones are
    that and those after it."""
    start, length, tokens = (np.array([number], np.int32) for number in (position, 1, token))
    counts = (np.array([number], np.int16) for number in (3, 1))
    verified = Verified(("ngram",), np.zeros(1, np.int8), *counts)
    logprobs = np.full(1, -1.0, np.float32)
    step = Progress(((request_id, attempt),), start, length, tokens, logprobs, verified=verified)
    if not tops:
        return step
    ids = np.arange(token, token + tops, dtype=np.int32)
    return replace(step, tops=TopTokens(np.array([tops], np.int32), ids, (token - 1 - ids).astype(np.float32)))


class FakeVerifier:
    """Makes one token of each request in each step; keeps all its events, so that any part can be asked for again.

    Attributes:
        begun: Every attempt that was begun.
        polls: Number of polls.
    """

    def __init__(self, cluster: FakeCluster, actor: VirtualActor, version: int) -> None:
        self.version, self.actor = version, actor
        self.polls = 0
        self.begun: list[tuple[str, int]] = []
        self.cancelled: set[tuple[str, int]] = set()
        self.running: dict[str, tuple[TargetRequest, int]] = {}
        self.commands: list[str] = []
        self.learned: list[FinishedOutput] = []
        self._cluster, self._clock = cluster, cluster.bench.clock_of(actor)
        self._events: list[ToRollout] = []
        self._queue: EventQueue[ToRollout] = EventQueue(self._clock)
        self._clock.spawn(self._loop, "loop")

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        if any(self._cluster.deadly.get(request.request_id) == -1 for request in requests):
            self._cluster.bench.network.kill(self.actor)
            self._clock.sleep(float("inf"))
        for request in requests:
            attempt = (request.request_id, request.attempt)
            if attempt in self.begun or attempt in self.cancelled:
                continue
            if request.weight_version != self.version:
                self._put(Refused(*attempt, f"has version {self.version}"))
                continue
            self.begun.append(attempt)
            self.running[request.request_id] = (request, len(request.committed_token_ids))
            if request.sampling.prompt_logprobs:
                own = -np.arange(1.0, len(request.prompt_token_ids), dtype=np.float32)
                self._put(PromptScores(*attempt, np.stack((own, own + 9, own / 2), axis=1)))

    def cancel(self, attempts: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        self.cancelled |= set(attempts)
        for request_id, attempt in attempts:
            if request_id in self.running and self.running[request_id][0].attempt == attempt:
                del self.running[request_id]

    def poll(self, after: int, timeout_s: float, linger_s: float) -> tuple[int, list[ToRollout], dict[str, Any]]:
        self.polls += 1
        self._queue.read(after, timeout_s, linger_s)
        first = max(0, after - 2)  # more than was asked for does no harm
        return first, self._events[first:], self.ping()

    def ping(self) -> dict[str, Any]:
        return {"running": len(self.running)}

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        self.learned += outputs

    def load_weights(self, version: int) -> None:
        self.version = version
        self.running.clear()

    def reset_metrics(self) -> None:
        self.commands.append("reset_metrics")

    def sleep(self, keep_weights: bool = True) -> None:
        self.commands.append("sleep")

    def wake(self) -> None:
        raise ValueError("a bug of the verifier")

    def _loop(self) -> None:
        while True:
            self._clock.sleep(STEP_S)
            for request_id in list(self.running):
                self._step(request_id)

    def _step(self, request_id: str) -> None:
        request, position = self.running[request_id]
        if position and (request_id, self.actor.name) in self._cluster.stalls:
            return
        if self._cluster.deadly.get(request_id) == position:
            self._cluster.bench.network.kill(self.actor)
            self._clock.sleep(float("inf"))
        sampling, attempt = request.sampling, request.attempt
        token = true_token(sampling.seed, self.version, sampling.first_position + position)
        self._put(one_token(request_id, attempt, position, token, sampling.logprobs))
        self.running[request_id] = (request, position + 1)
        if position + 1 == sampling.max_tokens:
            del self.running[request_id]
            self._put(Finished(request_id, "length", "", position + 1, attempt))

    def _put(self, event: ToRollout) -> None:
        self._events.append(event)
        self._queue.put([event], urgent=not isinstance(event, Progress))


class LosingNetwork(FaultyNetwork):
    """A network that loses the calls a test names."""

    def __init__(self, kernel: Kernel, rng: random.Random) -> None:
        super().__init__(kernel, rng)
        self.losses: list[list[Any]] = []

    def lose(self, method: str, actor: str = "", times: int = 1, fault: str = "lost_before") -> None:
        """The next calls of this method, to this actor or to any; `fault` is a field of `LinkFaults`."""
        self.losses.append([method, actor, times, fault])

    def send(self, caller: VirtualActor, actor: VirtualActor, method: str, arguments: Sequence[Any]) -> Reference:
        for loss in self.losses:
            if loss[0] == method and loss[1] in ("", actor.name) and loss[2] > 0:
                loss[2] -= 1
                setattr(self.faults, loss[3], 1.0)
                reference = super().send(caller, actor, method, arguments)
                setattr(self.faults, loss[3], 0.0)
                return reference
        return super().send(caller, actor, method, arguments)


class FakeCluster:
    """A controller that replaces verifiers that died, and the verifiers; as an actor it is called as the real one.

    Attributes:
        suspected: Reports of the rollout.
        stalls: (request, verifier) that make no progress after the first token.
        deadly: Request → output position at which it ends the process of its verifier; -1: as it arrives, before the
            verifier has answered.
        hidden: Verifiers that are not in the view.
    """

    def __init__(self, verifiers: int = 2, max_batch: int = 4) -> None:
        self.bench = Bench(network=LosingNetwork)
        self.network: LosingNetwork = self.bench.network
        self.config = make_config(verifiers, max_batch)
        self.suspected: list[str] = []
        self.stalls: set[tuple[str, str]] = set()
        self.deadly: dict[str, int] = {}
        self.handles: dict[str, VirtualActor] = {}
        self.departed: dict[str, Departure] = {}
        self.hidden: set[str] = set()
        self.version = 0
        """Of the weights that verifiers start with."""
        self.load_s = 0.5
        """Seconds until the verifiers have weights that were set; infinite: they never get them."""
        self._numbers = itertools.count()
        self.actor = self.bench.start(self, "controller")
        self.queue = RequestQueue(self.config, self.actor, self.bench.calls)

    def verifier(self, name: str) -> FakeVerifier:
        instance: FakeVerifier = self.handles[name].instance
        return instance

    def begin(self) -> None:
        """Runs as a task of the driver."""
        while len(self.handles) < self.config.target.replicas:
            self.add()
        self.bench.clock.sleep(0.1)

    def add(self) -> str:
        name = f"v{next(self._numbers)}"
        make = lambda actor: FakeVerifier(self, actor, self.version)  # noqa: E731
        self.handles[name] = self.network.start_actor(name, self.bench.node, make, 0.0)
        return name

    def lose(self, name: str, why: Departure) -> None:
        """A verifier ends and is replaced."""
        self.network.kill(self.handles.pop(name))
        self.departed[name] = why
        self.add()

    # ---- what a controller is asked ----

    def view(self, known: int | None = None) -> ClusterView:
        serving = {name: handle for name, handle in self.handles.items() if name not in self.hidden}
        return ClusterView(0, serving, (), dict(self.departed))

    def hold(self, is_held: bool) -> None:
        self.is_held = is_held

    def suspect(self, actor_id: str, reason: str) -> None:
        self.suspected.append(actor_id)
        if actor_id in self.handles and self.handles[actor_id].process.dead:
            self.lose(actor_id, Departure.FAILED)

    def set_weights(self, weights: WeightSet, timeout_s: float) -> None:
        self.version = weights.version
        clock = self.bench.clock_of(self.actor)
        clock.sleep(min(self.load_s, timeout_s))
        if self.load_s > timeout_s:
            raise SpecActorError(f"weights of version {weights.version} were not taken within {timeout_s:g} s")
        for name in self.handles:
            self.verifier(name).load_weights(weights.version)

    # ---- what tests do with it ----

    def run(self, body: Callable[[], Any]) -> Any:
        """Run the body as the driver, with all verifiers there."""

        def whole() -> Any:
            self.begin()
            return body()

        return self.bench.run(whole)

    def stream(self, entries: Sequence[JournalEntry]) -> Generator[JournalEntry, None, None]:
        """Run requests as `Rollout.stream`."""
        with self.queue.opening_stream() as number:
            yield from self.queue.run(entries, number)

    def finish(self, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
        """Stream the entries; all must end once, and with the right tokens if they did not fail."""
        ended = list(self.stream(entries))
        assert sorted(entry.request_id for entry in ended) == sorted(entry.request_id for entry in entries)
        for entry in ended:
            truth = true_output(entry.sampling, entry.weight_version)
            assert entry.finished is not None
            good = entry.finished.finish_reason == "length"
            assert tuple(entry.token_ids) == (truth if good else truth[: len(entry.token_ids)])
            assert len(entry.logprobs) == len(entry.token_ids)
            assert entry.stats == stats_of(len(entry.token_ids)), "of all attempts"
        return ended


def stats_of(tokens: int, discarded: int = 0) -> RequestStats:
    """Counters of a request with this many tokens, in any number of attempts."""
    steps = tokens + discarded
    return RequestStats(steps, 3 * steps, steps, discarded, {"ngram": (3 * steps, steps)} if steps else {})


def driven(**options: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs as the driver of a fake cluster of this kind; it takes `cluster` and, maybe, `queue`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(*own: object, **given: Any) -> None:
            cluster = FakeCluster(**options)
            there = {"cluster": cluster, "queue": cluster.queue}
            given |= {name: one for name, one in there.items() if name in inspect.signature(test).parameters}
            cluster.run(lambda: test(*own, **given))

        parameters = [
            one for name, one in inspect.signature(test).parameters.items() if name not in ("cluster", "queue")
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def make_config(verifiers: int, max_batch: int) -> Config:
    return from_mapping(
        {
            "mode": "decoupled",
            "cluster": {"start_timeout_s": 30.0, "placement_timeout_s": 60.0, "stall_timeout_s": 20.0},
            "target": {"replicas": verifiers, "max_batch": max_batch},
            "drafters": [{"method": "ngram"}],
        }
    )


def entries(number: int, tokens: int = 20, prefix: str = "r") -> list[JournalEntry]:
    """Requests `r0`, `r1`, ... of this many output tokens each."""
    return [
        JournalEntry(f"{prefix}{index}", (1, 2, 3), SamplingParams(max_tokens=tokens, seed=index))
        for index in range(number)
    ]
