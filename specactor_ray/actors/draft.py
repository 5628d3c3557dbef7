"""The draft actor: a thin shell around `DraftLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specactor_ray.actors.process import ActorHost, LoopActor
from specactor_ray.actors.specs import DraftActorSpec
from specactor_ray.core.metrics import drafter_rows
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, TailBatch


class DraftActor(LoopActor[DraftActorSpec, DraftLoop]):
    """Hosts one proposer."""

    _THREAD = "draft"

    def __init__(self, spec: DraftActorSpec, host: ActorHost | None = None) -> None:
        super().__init__(spec, host)
        self._links: dict[str, Link[TailBatch]] = {}

    def _make_loop(self) -> DraftLoop:
        spec, host = self._spec, self._host
        proposer = host.build_proposer(spec.drafter, spec.target, "cuda" if spec.drafter.gpus else "cpu")
        return DraftLoop(spec.actor_id, proposer, host.clock)

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended: the controller then replaces this actor."""
        loop = self._running()
        if self._thread is None or not self._thread.alive:
            raise RuntimeError("the draft loop has ended")
        counters = loop.snapshot()
        self._host.calls.transport.export(lambda: drafter_rows(self._spec.actor_id, counters))
        return counters

    def deliver(self, message: CommitBatch) -> None:
        """Opens, commits and closes of verifiers."""
        self._running().deliver(message)

    def set_verifiers(self, version: int, handles: Mapping[str, Any]) -> None:
        """The complete list of verifiers, id → actor handle; one that is older than the last is ignored."""
        loop = self._running()
        with self._lock:
            if self._take_version(version):
                self._links = {name: self._links.get(name) or self._link(handles[name]) for name in handles}
                loop.set_verifiers(self._links)

    def _link(self, verifier: Any) -> Link[TailBatch]:
        return Link(self._host.calls.sender(verifier, "deliver"), clock=self._host.clock)

    def drain(self) -> None:
        """Drop all open requests. Called before removal, when verifiers already use other draft actors."""
        self._running().set_verifiers({})
