"""The draft actor: a thin shell around `DraftLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specactor_ray.actors.process import (
    COMMAND_TIMEOUT_S,
    LoopThread,
    configure_process,
    fetch_weights,
    process_facts,
    put_weights,
)
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.cores import DRAFTER_SPINS
from specactor_ray.cluster.lookup import find_controller
from specactor_ray.controller.state import DraftSpec
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.loops.idle_learning import IdleLearning
from specactor_ray.messages import ToDrafter, WeightSet
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.outbox import Outbox


class DraftActor:
    """Hosts one proposer. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: DraftSpec) -> None:
        self._spec = spec
        self._thread: LoopThread[DraftLoop] | None = None
        self._outboxes: dict[str, Outbox[Any]] = {}

    def start(self) -> dict[str, Any]:
        """Bind the cores, make the proposer, start the loop. Returns pid, cores and vocabulary size."""
        configure_process(self._spec.actor_id, self._spec.cores, self._spec.log_level, DRAFTER_SPINS)
        self._thread = LoopThread(self._make_loop, "draft")
        return {**process_facts(), "vocab_size": self._thread.loop().proposer.vocab_size}

    def _make_loop(self) -> DraftLoop:
        from specactor_ray.drafters.registry import build_proposer

        spec = self._spec
        return DraftLoop(spec.actor_id, build_proposer(spec.drafter, spec.target, "cuda" if spec.gpus else "cpu"))

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended: the controller then replaces this actor."""
        loop = self._running()
        if self._thread is None or not self._thread.alive:
            raise RuntimeError("the draft loop has ended")
        return loop.snapshot()

    def deliver(self, messages: Sequence[ToDrafter]) -> None:
        """Opens, commits and closes of verifiers."""
        self._running().deliver(messages)

    def set_verifiers(self, handles: Mapping[str, Any]) -> None:
        """The complete list of verifiers: id → actor handle."""
        self._outboxes = {
            verifier_id: self._outboxes.get(verifier_id) or Outbox(Calls().sender(handle, "deliver"), for_verifier())
            for verifier_id, handle in handles.items()
        }
        self._running().set_verifiers(self._outboxes)

    def load_weights(self, weights: WeightSet) -> None:
        """Take over a version of the weights it follows: the policy's, or those its method learns."""
        self._running().load_weights(weights.version, fetch_weights(weights)).result(COMMAND_TIMEOUT_S)

    def learn(self, newest: WeightSet | None) -> None:
        """From now on, learn in idle time (`drafters.N.online`), and offer every new version to the controller.

        Args:
            newest: Where to begin; None: with the weights that were loaded first.
        """
        weights = fetch_weights(newest) if newest is not None else None
        version = newest.version if newest is not None else 0
        self._running().learn(lambda: self._make_learning(version, weights)).result(COMMAND_TIMEOUT_S)

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
            news = put_weights(version, weights)
            controller.offer_weights.remote(spec.drafter.method, spec.actor_id, news)

        return IdleLearning(learner, RolloutRecorder(spec.drafter.online.buffer_tokens), announce)

    def forget_history(self) -> None:
        """Forget earlier outputs."""
        self._running().forget_history().result(COMMAND_TIMEOUT_S)

    def drain(self) -> None:
        """Before removal: verifiers have been told to use others, so what is still open may be forgotten."""
        self._running().set_verifiers({})

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._thread is not None:
            self._thread.stop(10.0)

    def _running(self) -> DraftLoop:
        if self._thread is None:
            raise RuntimeError("the draft actor was not started")
        return self._thread.loop()
