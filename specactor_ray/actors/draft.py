"""The draft actor: a thin shell around `DraftLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost, LoopThread
from specactor_ray.controller.state import DraftActorSpec
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.messages import CommitBatch, TailBatch, WeightSet
from specactor_ray.queues.link import Link


class DraftActor:
    """Hosts one proposer. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: DraftActorSpec, host: ActorHost | None = None) -> None:
        self._spec, self._host = spec, host or ActorHost()
        self._thread: LoopThread[DraftLoop] | None = None
        self._links: dict[str, Link[TailBatch]] = {}
        self._lock = threading.Lock()
        """Guards the start, and the list of verifiers against older ones that come late."""
        self._peers_version = -1

    def start(self) -> dict[str, Any]:
        """Bind the cores, make the proposer, start the loop. Returns pid, cores and vocabulary size. Harmless when
        repeated."""
        with self._lock:
            if self._thread is None:
                self._host.configure(self._spec.actor_id, self._spec.cores, self._spec.log_level)
                self._thread = LoopThread(self._make_loop, "draft", self._host.clock)
        return {**self._host.facts(), "vocab_size": self._thread.loop().proposer.vocab_size}

    def _make_loop(self) -> DraftLoop:
        spec, host = self._spec, self._host
        proposer = host.build_proposer(spec.drafter, spec.target, "cuda" if spec.drafter.gpus else "cpu")
        return DraftLoop(spec.actor_id, proposer, host.clock)

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended: the controller then replaces this actor."""
        loop = self._running()
        if self._thread is None or not self._thread.alive:
            raise RuntimeError("the draft loop has ended")
        return loop.snapshot()

    def deliver(self, message: CommitBatch) -> None:
        """Opens, commits and closes of verifiers."""
        self._running().deliver(message)

    def set_verifiers(self, version: int, handles: Mapping[str, Any]) -> None:
        """The complete list of verifiers, id → actor handle; one that is older than the last is ignored."""
        loop = self._running()
        with self._lock:
            if version < self._peers_version:
                return
            self._peers_version = version
            self._links = {name: self._links.get(name) or self._link(handles[name]) for name in handles}
            loop.set_verifiers(self._links)

    def _link(self, verifier: Any) -> Link[TailBatch]:
        return Link(self._host.calls.sender(verifier, "deliver"), clock=self._host.clock)

    def load_weights(self, weights: WeightSet) -> None:
        """Take over a version of the weights it follows: the policy's, or those its method is taught."""
        self._do(self._running().load_weights(weights.version, self._host.fetch_weights(weights)))

    def forget_history(self) -> None:
        """Forget earlier outputs."""
        self._do(self._running().forget_history())

    def drain(self) -> None:
        """Before removal: verifiers have been told to use others, so what is still open may be forgotten."""
        self._running().set_verifiers({})

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._thread is not None:
            self._thread.stop(10.0)

    def _do(self, command: Future[None]) -> None:
        self._host.clock.result(command, COMMAND_TIMEOUT_S)

    def _running(self) -> DraftLoop:
        if self._thread is None:
            raise RuntimeError("the draft actor was not started")
        return self._thread.loop()
