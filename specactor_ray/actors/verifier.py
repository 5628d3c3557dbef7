"""The verifier actor: a thin shell around `VerifyLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specactor_ray.actors.process import COMMAND_TIMEOUT_S, LoopThread, configure_process, fetch_weights, process_facts
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import learns_from_outputs, reads_features
from specactor_ray.controller.state import VERIFIER, DraftEndpoint, InlineSpec, VerifierSpec
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.inline_drafters import InlineDrafter, outbox_to
from specactor_ray.loops.speculator import Speculator
from specactor_ray.loops.verify_loop import VerifyLoop
from specactor_ray.messages import ToDrafter, ToRollout, ToVerifier, WeightSet
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.outbox import Outbox
from specactor_ray.targets.base import TargetRequest


class VerifierActor:
    """Hosts one target engine. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec
        self._thread: LoopThread[VerifyLoop] | None = None

    def start(self) -> dict[str, Any]:
        """Bind the cores, load the target, start the loop. Returns pid, cores and vocabulary size."""
        configure_process(self._spec.actor_id, self._spec.cores, self._spec.log_level)
        self._thread = LoopThread(self._make_loop, "verify")
        return {**process_facts(), "vocab_size": self._thread.loop().vocab_size}

    def _make_loop(self) -> VerifyLoop:
        from specactor_ray.targets.registry import build_engine

        spec = self._spec
        engine = build_engine(spec.target, "cuda" if spec.gpus else "cpu", spec.max_drafts)
        speculator = Speculator(
            spec.actor_id,
            spec.mode,
            spec.speculation,
            engine.vocab_size,
            max_batch=spec.target.max_batch,
            priors=spec.priors,
            trees=engine.supports_trees,
        )
        return VerifyLoop(engine, speculator, [self._inline(hosted) for hosted in spec.inline])

    def _inline(self, hosted: InlineSpec) -> InlineDrafter:
        from specactor_ray.drafters.registry import build_proposer

        drafter, spec = hosted.drafter, self._spec
        drafter_id = spec.actor_id.replace(VERIFIER, drafter.method, 1)  # ngram-0#3f2a in verifier-0#3f2a
        device = "cuda" if spec.gpus and drafter.gpus else "cpu"
        loop = DraftLoop(drafter_id, build_proposer(drafter, spec.target, device))
        link = DrafterLink(
            drafter.method,
            hosted.window,
            outbox_to(loop),
            drafter.max_batch,
            reads_features=reads_features(drafter),
            remembers=learns_from_outputs(drafter),
            on_demand=True,
        )
        return InlineDrafter(loop, link, drafter.follow_policy)

    def ping(self) -> dict[str, Any]:
        """Counters. Raises when the loop has ended by an error: the controller then replaces this actor."""
        loop = self._running()
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return loop.snapshot()

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        self._running().submit(requests)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._running().cancel(request_ids)

    def deliver(self, messages: Sequence[ToVerifier]) -> None:
        """Draft tails and resync requests of drafters."""
        self._running().deliver(messages)

    def poll(self, timeout_s: float, linger_s: float) -> tuple[list[ToRollout], dict[str, Any]]:
        """Events since the last poll and the counters; for the waits see `VerifyLoop.poll`."""
        loop = self._running()
        events = loop.poll(timeout_s, linger_s)
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return events, loop.snapshot()

    def set_drafters(self, endpoints: Sequence[DraftEndpoint]) -> None:
        """The complete list of draft actors."""
        loop = self._running()
        known = loop.drafter_links
        links: Mapping[str, DrafterLink] = {
            endpoint.actor_id: known.get(endpoint.actor_id) or _link(endpoint) for endpoint in endpoints
        }
        loop.set_drafters(links)

    def load_weights(self, weights: WeightSet) -> None:
        """Take over a version of the policy's weights. Raises InputError while requests are running."""
        self._running().load_weights(weights.version, fetch_weights(weights)).result(COMMAND_TIMEOUT_S)

    def sleep(self) -> None:
        """Give up the cache's memory until `wake`."""
        self._running().sleep().result(COMMAND_TIMEOUT_S)

    def wake(self) -> None:
        self._running().wake().result(COMMAND_TIMEOUT_S)

    def forget_history(self) -> None:
        """Let the drafters of this process forget earlier outputs."""
        self._running().forget_history().result(COMMAND_TIMEOUT_S)

    def reset_metrics(self) -> None:
        self._running().reset_metrics()

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._thread is not None:
            self._thread.stop(10.0)

    def _running(self) -> VerifyLoop:
        if self._thread is None:
            raise RuntimeError("the verifier was not started")
        return self._thread.loop()


def _link(endpoint: DraftEndpoint) -> DrafterLink:
    outbox: Outbox[ToDrafter] = Outbox(Calls().sender(endpoint.handle, "deliver"), for_drafter())
    return DrafterLink(
        endpoint.method,
        endpoint.window,
        outbox,
        endpoint.max_batch,
        reads_features=endpoint.reads_features,
        remembers=endpoint.remembers,
    )
