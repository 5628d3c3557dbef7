"""The verifier actor: a thin shell around `VerifyLoop`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specactor_ray.actors.process import LoopThread, configure_process, process_facts
from specactor_ray.controller.state import DraftEndpoint, VerifierSpec
from specactor_ray.loops.speculator import DrafterLink, Speculator
from specactor_ray.loops.verify_loop import VerifyLoop
from specactor_ray.messages import ToRollout, ToVerifier
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.outbox import Outbox, ray_sender
from specactor_ray.targets.base import TargetRequest


class VerifierActor:
    """Hosts one target engine. Its methods only touch queues; one thread of its own does the work."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec
        self._loop: VerifyLoop | None = None
        self._thread: LoopThread | None = None

    def start(self) -> dict[str, Any]:
        """Bind the cores, load the target, start the loop. Returns pid, cores and vocabulary size."""
        spec = self._spec
        configure_process(spec.actor_id, spec.cores, spec.log_level)
        from specactor_ray.targets.registry import build_engine

        engine = build_engine(spec.target, "cuda" if spec.gpus else "cpu")
        speculator = Speculator(spec.actor_id, spec.mode, spec.speculation, engine.vocab_size)
        self._loop = VerifyLoop(engine, speculator)
        self._thread = LoopThread(self._loop.run, "verify")
        return {**process_facts(), "vocab_size": engine.vocab_size}

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

    def poll(self, timeout_s: float) -> tuple[list[ToRollout], dict[str, Any]]:
        """Events since the last poll (waits up to `timeout_s` seconds for one) and the counters."""
        loop = self._running()
        events = loop.poll(timeout_s)
        if loop.error is not None:
            raise RuntimeError(f"the verifier's loop failed: {loop.error!r}")
        return events, loop.snapshot()

    def set_drafters(self, endpoints: Sequence[DraftEndpoint]) -> None:
        """The complete list of draft actors."""
        loop = self._running()
        known = loop.drafter_links
        links: Mapping[str, DrafterLink] = {
            endpoint.actor_id: known.get(endpoint.actor_id)
            or DrafterLink(endpoint.method, endpoint.window, Outbox(ray_sender(endpoint.handle.deliver), for_drafter()))
            for endpoint in endpoints
        }
        loop.set_drafters(links)

    def reset_metrics(self) -> None:
        self._running().reset_metrics()

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._loop is not None and self._thread is not None:
            self._loop.stop()
            self._thread.join(10.0)

    def _running(self) -> VerifyLoop:
        if self._loop is None:
            raise RuntimeError("the verifier was not started")
        return self._loop
