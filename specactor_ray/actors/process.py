"""Parts of every actor process: logging, core binding, calls and models."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specactor_ray.actors.specs import ActorSpec
from specactor_ray.cluster.backend import end_with_raylet
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.cores import bind_to_cores, limit_spins
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import ModeName, TargetConfig
from specactor_ray.core.clock import Clock
from specactor_ray.core.errors import CallError, FetchError
from specactor_ray.draft.proposer import Proposer
from specactor_ray.target.base import TargetEngine
from specactor_ray.transport.messages import WeightSet, transfer_s

if TYPE_CHECKING:
    from specactor_ray.models.weight_buckets import WeightBucket, WeightLayout
    from specactor_ray.verify.drafting import Drafting

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 300.0
"""Longest wait for the loop to carry out a command between two steps, and for weights to arrive, beside the time for
their size."""


def configure_process(actor_id: str, cores: Sequence[int], log_level: str) -> None:
    """Put the actor's id on log lines and bind the process to its cores. Call before torch does any work."""
    end_with_raylet()
    line = f"%(asctime)s %(levelname)s {actor_id} %(name)s: %(message)s"
    logging.basicConfig(level=log_level, format=line, force=True)
    if cores:
        bind_to_cores(cores)
    else:
        os.environ.update(limit_spins())


@contextmanager
def collected_once() -> Iterator[None]:
    """Load modules and a model with one garbage collection, at the end; later ones leave out what was loaded.

    Importing torch and transformers makes half a million objects: collections are a seventh of the CPU time of a load,
    and a full one between two steps takes 0.3 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class ActorHost:
    """Services of an actor's process: calls, time, models. The simulator has its own implementation."""

    def __init__(self, calls: Calls | None = None) -> None:
        self.calls = calls or Calls()
        self._broadcast, self._lock = 0, threading.Lock()
        """Version of the last broadcast that this process took part in."""

    @property
    def clock(self) -> Clock:
        return self.calls.clock

    def configure(self, actor_id: str, cores: Sequence[int], log_level: str) -> None:
        """Prepare the process; before anything is loaded."""
        configure_process(actor_id, cores, log_level)

    @collected_once()
    def build_engine(self, spec: ActorSpec) -> TargetEngine:
        """The target engine of a verifier; loads the model."""
        from specactor_ray.startup.memory import kept_by_trainer, target_on_node
        from specactor_ray.target.build import build_engine

        hosted = [spec.drafters[method] for method in spec.hosted]
        target = target_on_node(spec.config.target, hosted, kept_by_trainer(spec.config))
        return build_engine(target, "cuda" if target.gpus else "cpu", spec.window)

    def build_drafting(self, spec: ActorSpec, engine: TargetEngine) -> Drafting:
        """The drafts' side of a verifier."""
        from specactor_ray.verify.drafting import Drafting

        return Drafting(
            spec.actor_id,
            spec.config.mode is ModeName.coupled,
            spec.config.speculation,
            engine.table,
            spec.config.target.max_batch,
            spec.window,
            spec.branches,
            engine.states,
        )

    @collected_once()
    def build_proposer(self, drafter: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
        """The proposer of a draft method; loads its model if it has one."""
        from specactor_ray.draft.proposer import build_proposer
        from specactor_ray.startup.memory import drafter_on_node

        return build_proposer(drafter_on_node(drafter, target, device), target, device)

    def fetch_weights(self, weights: WeightSet) -> dict[str, Any]:
        """All tensors of a version: by its broadcast, or if that fails as views of the object store's memory.
        FetchError if they do not arrive."""
        if weights.broadcast is not None and (received := self._receive(weights)):
            return self.unpack(received)
        try:
            buckets = self.calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S + weights.transfer_s)
        except CallError as error:
            raise FetchError(f"weights of version {weights.version}: {error}") from None
        return self.unpack(buckets)

    def _receive(self, weights: WeightSet) -> Sequence[WeightBucket]:
        """The buckets by their broadcast; none if it fails, or if this process takes or took part in it already."""
        with self._lock:
            if weights.version <= self._broadcast:  # the answer to the first call was lost
                return ()
            self._broadcast = weights.version
        try:
            return self.join_broadcast(weights)
        except FetchError as error:
            logger.warning("the broadcast of weights of version %d failed: %s", weights.version, error)
            return ()

    def join_broadcast(self, weights: WeightSet) -> Sequence[WeightBucket]:
        """The buckets of a planned version, by the group of its members. FetchError: it failed."""
        from specactor_ray.actors.broadcast import receive

        return receive(weights)

    def unpack(self, buckets: Sequence[WeightBucket]) -> dict[str, Any]:
        """The tensors of these buckets by name."""
        from specactor_ray.models.weight_buckets import unpack

        return {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}


def put_weights(
    version: int,
    buckets: Iterable[WeightBucket | None],
    calls: Calls,
    method: str = "",
    layout: WeightLayout | None = None,
) -> WeightSet:
    """Put weights of the target, or of a draft method, into the object store, bucket by bucket; they live as long as
    the result is held. With the target's `layout` they get a probe, so that every engine proves that it has them."""
    references, num_bytes = [], 0
    for bucket in buckets:
        if bucket is not None:  # None: the rank takes part in gathering and exports nothing
            references.append(calls.transport.put(bucket))
            num_bytes += bucket.data.nbytes
    probe = None
    if layout is not None and references:  # of what was really sent, where the object store has it
        probe = layout.probe(calls.transport.fetch(tuple(references), COMMAND_TIMEOUT_S + transfer_s(num_bytes)))
    return WeightSet(version, tuple(references), num_bytes, method, probe)
