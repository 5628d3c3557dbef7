"""Verifiers and draft actors: thin shells around their loops. `ray.remote` is applied where an actor is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost
from specactor_ray.actors.specs import VERIFIER, ActorSpec, DraftEndpoint
from specactor_ray.config.schema import Config
from specactor_ray.core.clock import Thread
from specactor_ray.core.metrics import drafter_rows, verifier_rows
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.table.requests import TargetRequest
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, FinishedOutput, TailBatch, ToRollout, WeightSet
from specactor_ray.verify.drafting import DrafterLink, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop

L = TypeVar("L", VerifyLoop, DraftLoop)

_COUNTED_S = 1.0
"""Seconds between two answers to polls with counters while requests run."""


class LoopActor(Generic[L]):
    """An actor with a loop in a thread of its own; its methods only touch queues."""

    def __init__(self, spec: ActorSpec, host: ActorHost | None = None) -> None:
        self._spec = spec
        self._host = host or _make_host(spec.config)
        self._made: Future[L] = Future()
        self._thread: Thread | None = None
        self._lock = threading.Lock()
        """Guards the start, and the list of peers against older ones that come late."""
        self._peers_version, self._links = -1, dict[str, Any]()

    def start(self) -> None:
        """Bind the cores, load the model, start the loop. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._host.configure(self._spec.actor_id, self._spec.cores, self._spec.config.run.log_level)
                self._thread = self._host.clock.spawn(self._run, "loop")
        self._running()

    def load_weights(self, weights: WeightSet) -> None:
        """Load a version of the target's weights, with which requests of older versions end, or of a drafter's here.
        Idempotent."""
        done = self._running().load_weights(weights, self._host.fetch_weights(weights))
        self._do(done, COMMAND_TIMEOUT_S + weights.transfer_s)

    def forget_history(self) -> None:
        """Clear the histories of earlier outputs of this process's drafters."""
        self._do(self._running().forget_history())

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._made.done() and self._made.exception() is None:
            self._made.result().stop()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        """Make and run the loop, in one thread: OpenMP keeps a team of workers per thread that ever computed. With two
        teams there are more workers than cores, and a decode step on two cores takes a third longer."""
        try:
            loop = self._make_loop()
        except BaseException as error:  # noqa: BLE001 - raised again in `_running`
            self._made.set_exception(error)
            return
        self._made.set_result(loop)
        loop.run()

    def _make_loop(self) -> L:
        raise NotImplementedError

    def _link(self, peer: Any) -> Any:
        """The link to a peer, by what the controller sends of it."""
        raise NotImplementedError

    def _set_peers(self, version: int, peers: Mapping[str, Any], use: Callable[[Mapping[str, Any]], None]) -> None:
        """Use links to these peers alone; a list that is older than the last is ignored."""
        with self._lock:
            if version >= self._peers_version:
                self._peers_version = version
                self._links = {name: self._links.get(name) or self._link(peer) for name, peer in peers.items()}
                use(self._links)

    def _do(self, command: Future[None], limit_s: float = COMMAND_TIMEOUT_S) -> None:
        self._host.clock.result(command, limit_s)

    def _running(self) -> L:
        """Wait for the loop (the controller limits the wait) and return it. Raises the error of its construction."""
        if self._thread is None:
            raise RuntimeError(f"{self._spec.actor_id} was not started")
        return self._host.clock.result(self._made, float("inf"))


def _make_host(config: Config) -> ActorHost:
    if config.paced.device is None:
        return ActorHost()
    from specactor_ray.actors.paced import PacedHost

    return PacedHost(config.paced)


class VerifierActor(LoopActor[VerifyLoop]):
    """Hosts one target engine."""

    _counted_at = float("-inf")
    """Time of the last answer to a poll with counters."""

    def _make_loop(self) -> VerifyLoop:
        spec, clock = self._spec, self._host.clock
        engine = self._host.build_engine(spec)
        drafting = self._host.build_drafting(spec, engine)
        return VerifyLoop(engine, drafting, [self._host_drafter(method) for method in spec.hosted], clock)

    def _host_drafter(self, method: str) -> HostedDrafter:
        drafter, target, clock = self._spec.drafters[method], self._spec.config.target, self._host.clock
        drafter_id = self._spec.actor_id.replace(VERIFIER, method, 1)  # ngram-0#3f2a in verifier-0#3f2a
        proposer = self._host.build_proposer(drafter, target, "cuda" if target.gpus else "cpu")
        return HostedDrafter(drafter, DraftRunner(drafter_id, proposer, clock))

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended by an error: the controller then replaces this actor."""
        counters = self._sound().snapshot()
        self._host.calls.transport.export(lambda: verifier_rows(self._spec.actor_id, counters))
        return counters

    def _sound(self) -> VerifyLoop:
        """The loop, unless it has failed."""
        loop = self._running()
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return loop

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        self._running().submit(requests)

    def cancel(self, attempts: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        """Drop these attempts, (request, attempt), now or when they arrive; see `VerifyLoop.cancel`."""
        self._running().cancel(attempts, has_ended)

    def deliver(self, message: TailBatch) -> None:
        """Draft tails and resync requests of drafters."""
        self._running().deliver(message)

    def poll(self, after: int, timeout_s: float, linger_s: float) -> tuple[int, list[ToRollout], dict[str, Any] | None]:
        """Number of the first event, events, and counters: always if no request runs any more, else once a second
        (a snapshot is large, and takes up to 0.3 ms). Events below `after` are acknowledged; for the waits see
        `VerifyLoop.poll`."""
        first, events = self._running().poll(after, timeout_s, linger_s)
        loop, now = self._sound(), self._host.clock.now()
        if loop.running and now < self._counted_at + _COUNTED_S:
            return first, events, None
        self._counted_at = now
        return first, events, loop.snapshot()

    def set_drafters(self, version: int, endpoints: Sequence[DraftEndpoint]) -> None:
        """The complete list of draft actors."""
        self._set_peers(version, {one.actor_id: one for one in endpoints}, self._running().set_drafters)

    def _link(self, peer: DraftEndpoint) -> DrafterLink:
        send = self._host.calls.sender(peer.handle, "deliver")
        return DrafterLink(peer.drafter, Link(send, clock=self._host.clock))

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        """Add outputs of other verifiers to the histories of this process's lookups."""
        self._running().learn(outputs)

    def sleep(self, keep_weights: bool = True) -> None:
        """Give up memory until `wake`; see `VerifyLoop.sleep`."""
        self._do(self._running().sleep(keep_weights))

    def wake(self) -> None:
        self._do(self._running().wake())

    def reset_metrics(self) -> None:
        self._running().reset_metrics()


class DraftActor(LoopActor[DraftLoop]):
    """Hosts one proposer."""

    def _make_loop(self) -> DraftLoop:
        spec, host = self._spec, self._host
        drafter = spec.drafters[spec.key]
        proposer = host.build_proposer(drafter, spec.config.target, "cuda" if drafter.gpus else "cpu")
        return DraftLoop(spec.actor_id, proposer, host.clock)

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended: the controller then replaces this actor."""
        loop = self._running()
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the draft loop has ended")
        counters = loop.snapshot()
        self._host.calls.transport.export(lambda: drafter_rows(self._spec.actor_id, counters))
        return counters

    def deliver(self, message: CommitBatch) -> None:
        """Opens, commits and closes of verifiers."""
        self._running().deliver(message)

    def set_verifiers(self, version: int, handles: Mapping[str, Any]) -> None:
        """The complete list of verifiers, id → actor handle."""
        self._set_peers(version, handles, self._running().set_verifiers)

    def _link(self, peer: Any) -> Link[TailBatch]:
        return Link(self._host.calls.sender(peer, "deliver"), clock=self._host.clock)
