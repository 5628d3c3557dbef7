"""The verifier actor: a thin shell around `VerifyLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost, LoopThread
from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.controller.state import VERIFIER, DraftEndpoint, VerifierSpec
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.messages import TailBatch, ToRollout, WeightSet
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.target.base import TargetRequest
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.seat import DrafterLink, HostedDrafter


class VerifierActor:
    """Hosts one target engine. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: VerifierSpec, host: ActorHost | None = None) -> None:
        self._spec, self._host = spec, host or ActorHost()
        self._thread: LoopThread[VerifyLoop] | None = None
        self._lock = threading.Lock()
        """Guards the start, and the list of drafters against older ones that come late."""
        self._peers_version = -1

    def start(self) -> dict[str, Any]:
        """Bind the cores, load the target, start the loop. Returns pid, cores and vocabulary size. Harmless when
        repeated."""
        with self._lock:
            if self._thread is None:
                self._host.configure(self._spec.actor_id, self._spec.cores, self._spec.log_level)
                self._thread = LoopThread(self._make_loop, "verify", self._host.clock)
        return {**self._host.facts(), "vocab_size": self._thread.loop().vocab_size}

    def _make_loop(self) -> VerifyLoop:
        spec, clock = self._spec, self._host.clock
        engine = self._host.build_engine(spec)
        drafting = self._host.build_drafting(spec, engine)
        return VerifyLoop(engine, drafting, [self._host_drafter(hosted) for hosted in spec.inline], clock)

    def _host_drafter(self, drafter: DrafterSpec) -> HostedDrafter:
        spec, clock = self._spec, self._host.clock
        drafter_id = spec.actor_id.replace(VERIFIER, drafter.method, 1)  # ngram-0#3f2a in verifier-0#3f2a
        proposer = self._host.build_proposer(drafter, spec.target, "cuda" if spec.target.gpus else "cpu")
        loop = DraftLoop(drafter_id, proposer, clock)
        return HostedDrafter(drafter, Link(direct_sender(loop.deliver), clock=clock), loop)

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended by an error: the controller then replaces this actor."""
        loop = self._running()
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return loop.snapshot()

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        self._running().submit(requests)

    def cancel(self, attempts: Sequence[tuple[str, int]]) -> None:
        """Drop these attempts, (request, attempt), now or when they arrive."""
        self._running().cancel(attempts)

    def deliver(self, message: TailBatch) -> None:
        """Draft tails and resync requests of drafters."""
        self._running().deliver(message)

    def poll(self, after: int, timeout_s: float, linger_s: float) -> tuple[int, list[ToRollout], dict[str, Any]]:
        """Number of the first event, events, counters. Those below `after` are acknowledged; for the waits see
        `VerifyLoop.poll`."""
        loop = self._running()
        first, events = loop.poll(after, timeout_s, linger_s)
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return first, events, loop.snapshot()

    def set_drafters(self, version: int, endpoints: Sequence[DraftEndpoint]) -> None:
        """The complete list of draft actors; one that is older than the last is ignored."""
        loop = self._running()
        with self._lock:
            if version < self._peers_version:
                return
            self._peers_version = version
            known = loop.drafter_links
            links: Mapping[str, DrafterLink] = {
                endpoint.actor_id: known.get(endpoint.actor_id) or self._link(endpoint) for endpoint in endpoints
            }
            loop.set_drafters(links)

    def _link(self, endpoint: DraftEndpoint) -> DrafterLink:
        send = self._host.calls.sender(endpoint.handle, "deliver")
        return DrafterLink(endpoint.drafter, Link(send, clock=self._host.clock))

    def load_weights(self, weights: WeightSet) -> None:
        """Take over a version of the policy's weights; requests of older versions end. Harmless when repeated."""
        self._do(self._running().load_weights(weights.version, self._host.fetch_weights(weights)))

    def teach(self, method: str, weights: WeightSet) -> None:
        """Take over weights that a drafter of this process was taught. Harmless when repeated."""
        self._do(self._running().teach(method, weights.version, self._host.fetch_weights(weights)))

    def sleep(self) -> None:
        """Give up the cache's memory until `wake`."""
        self._do(self._running().sleep())

    def wake(self) -> None:
        self._do(self._running().wake())

    def forget_history(self) -> None:
        """Let the drafters of this process forget earlier outputs."""
        self._do(self._running().forget_history())

    def reset_metrics(self) -> None:
        self._running().reset_metrics()

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._thread is not None:
            self._thread.stop(10.0)

    def _do(self, command: Future[None]) -> None:
        self._host.clock.result(command, COMMAND_TIMEOUT_S)

    def _running(self) -> VerifyLoop:
        if self._thread is None:
            raise RuntimeError("the verifier was not started")
        return self._thread.loop()
