"""The verifier actor: a thin shell around `VerifyLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.actors.process import LoopActor
from specactor_ray.actors.specs import VERIFIER, DraftEndpoint, VerifierSpec
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.core.metrics import verifier_rows
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.target.base import TargetRequest
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import FinishedOutput, TailBatch, ToRollout, WeightSet
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.seat import DrafterLink, HostedDrafter


class VerifierActor(LoopActor[VerifierSpec, VerifyLoop]):
    """Hosts one target engine."""

    _THREAD = "verify"

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
        counters = self._counters(self._running())
        self._host.calls.transport.export(lambda: verifier_rows(self._spec.actor_id, counters))
        return counters

    def _counters(self, loop: VerifyLoop) -> dict[str, Any]:
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return loop.snapshot()

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        self._running().submit(requests)

    def cancel(self, attempts: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        """Drop these attempts, (request, attempt), now or when they arrive; see `VerifyLoop.cancel`."""
        self._running().cancel(attempts, has_ended)

    def deliver(self, message: TailBatch) -> None:
        """Draft tails and resync requests of drafters."""
        self._running().deliver(message)

    def poll(self, after: int, timeout_s: float, linger_s: float) -> tuple[int, list[ToRollout], dict[str, Any]]:
        """Number of the first event, events, counters. Those below `after` are acknowledged; for the waits see
        `VerifyLoop.poll`."""
        loop = self._running()
        return *loop.poll(after, timeout_s, linger_s), self._counters(loop)

    def set_drafters(self, version: int, endpoints: Sequence[DraftEndpoint]) -> None:
        """The complete list of draft actors; one that is older than the last is ignored."""
        loop = self._running()
        with self._lock:
            if self._take_version(version):
                known = loop.drafter_links
                loop.set_drafters({one.actor_id: known.get(one.actor_id) or self._link(one) for one in endpoints})

    def _link(self, endpoint: DraftEndpoint) -> DrafterLink:
        send = self._host.calls.sender(endpoint.handle, "deliver")
        return DrafterLink(endpoint.drafter, Link(send, clock=self._host.clock))

    def teach(self, method: str, weights: WeightSet) -> None:
        """Load weights that were taught to a drafter of this process. Idempotent."""
        self._do(self._running().teach(method, weights.version, self._host.fetch_weights(weights)))

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        """Add outputs of other verifiers to the histories of this process's lookups."""
        self._running().learn(outputs)

    def sleep(self) -> None:
        """Give up the cache's memory until `wake`."""
        self._do(self._running().sleep())

    def wake(self) -> None:
        self._do(self._running().wake())

    def reset_metrics(self) -> None:
        self._running().reset_metrics()
