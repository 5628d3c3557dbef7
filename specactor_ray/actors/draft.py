"""The draft actor: a thin shell around `DraftLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, ActorHost, LoopThread, put_weights
from specactor_ray.cluster.calls import Call
from specactor_ray.cluster.cores import DRAFTER_SPINS
from specactor_ray.cluster.lookup import find_controller
from specactor_ray.controller.state import DraftSpec
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.loops.idle_learning import IdleLearning
from specactor_ray.messages import CommitBatch, TailBatch, WeightSet
from specactor_ray.queues.link import Link


class DraftActor:
    """Hosts one proposer. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: DraftSpec, host: ActorHost | None = None) -> None:
        self._spec, self._host = spec, host or ActorHost()
        self._thread: LoopThread[DraftLoop] | None = None
        self._links: dict[str, Link[TailBatch]] = {}
        self._lock = threading.Lock()
        """Guards the start, and the list of verifiers against older ones that come late."""
        self._peers_version = -1
        self._announced: Call | None = None

    def start(self) -> dict[str, Any]:
        """Bind the cores, make the proposer, start the loop. Returns pid, cores and vocabulary size. Harmless when
        repeated."""
        with self._lock:
            if self._thread is None:
                self._host.configure(self._spec.actor_id, self._spec.cores, self._spec.log_level, DRAFTER_SPINS)
                self._thread = LoopThread(self._make_loop, "draft", self._host.clock)
        return {**self._host.facts(), "vocab_size": self._thread.loop().proposer.vocab_size}

    def _make_loop(self) -> DraftLoop:
        spec, host = self._spec, self._host
        proposer = host.build_proposer(spec.drafter, spec.target, "cuda" if spec.gpus else "cpu")
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
        """Take over a version of the weights it follows: the policy's, or those its method learns."""
        self._do(self._running().load_weights(weights.version, self._host.fetch_weights(weights)))

    def learn(self, newest: WeightSet | None) -> None:
        """From now on, learn in idle time (`drafters.N.online`), and offer every new version to the controller.

        Args:
            newest: Where to begin; None: with the weights that were loaded first.
        """
        weights = self._host.fetch_weights(newest) if newest is not None else None
        version = newest.version if newest is not None else 0
        self._do(self._running().learn(lambda: self._make_learning(version, weights)))

    def _make_learning(self, version: int, weights: Mapping[str, Any] | None) -> IdleLearning:
        from specactor_ray.drafter_training.online import load_learner
        from specactor_ray.drafter_training.recording import RolloutRecorder
        from specactor_ray.drafters.eagle import EagleProposer

        spec, proposer = self._spec, self._running().proposer
        assert isinstance(proposer, EagleProposer)  # validated: no other method learns online
        device = "cuda" if spec.gpus else "cpu"
        learner = load_learner(spec.drafter, spec.target, device, proposer, version, weights)
        controller = find_controller(spec.run)

        def announce(version: int, weights: Mapping[str, Any]) -> None:
            calls = self._host.calls
            arguments = (spec.drafter.method, spec.actor_id, put_weights(version, weights, calls))
            # Nobody waits for the answer: a version that does not arrive is made up for by the next one.
            self._announced = calls.start(controller, "offer_weights", *arguments, deadline_s=COMMAND_TIMEOUT_S)

        return IdleLearning(learner, RolloutRecorder(spec.drafter.online.buffer_tokens), announce)

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
