"""Parts of every actor process: logging, core binding, calls, models, and a thread for its loop."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from specactor_ray.actors.specs import ActorSpec, VerifierSpec
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.cores import bind_to_cores, limit_spins
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import ModeName, TargetConfig
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.draft.proposer import Proposer
from specactor_ray.target.base import TargetEngine
from specactor_ray.transport.messages import WeightSet

if TYPE_CHECKING:
    from specactor_ray.models.weight_buckets import WeightBucket
    from specactor_ray.verify.drafting import Drafting

COMMAND_TIMEOUT_S = 300.0
"""Longest wait for the loop to carry out a command between two steps, and for weights to arrive."""


def configure_process(actor_id: str, cores: Sequence[int], log_level: str) -> None:
    """Put the actor's id on log lines and bind the process to its cores. Call before torch does any work."""
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

    def __init__(self) -> None:
        self.calls = Calls()

    @property
    def clock(self) -> Clock:
        return self.calls.clock

    def configure(self, actor_id: str, cores: Sequence[int], log_level: str) -> None:
        """Prepare the process; before anything is loaded."""
        configure_process(actor_id, cores, log_level)

    @collected_once()
    def build_engine(self, spec: VerifierSpec) -> TargetEngine:
        """The target engine of a verifier; loads the model."""
        from specactor_ray.draft.proposer import footprint
        from specactor_ray.models.cache_size import device_bytes
        from specactor_ray.target.base import build_engine

        target, hosted = spec.target, 0.0
        if target.gpus and target.kv_cache_gb is None:
            hosted = sum(footprint(one, target, device_bytes()) for one in spec.inline)
        return build_engine(target, "cuda" if target.gpus else "cpu", spec.largest_window, hosted)

    def build_drafting(self, spec: VerifierSpec, engine: TargetEngine, *figures: Any) -> Drafting:
        """The drafts' side of a verifier. `figures`: acceptance and step cost, where they are not to be learned."""
        from specactor_ray.verify.drafting import Drafting
        from specactor_ray.verify.table import Acceptance

        return Drafting(
            spec.actor_id,
            spec.mode is ModeName.coupled,
            spec.speculation,
            engine.vocab_size,
            spec.target.max_batch,
            spec.largest_window,
            spec.max_branches,
            *(figures or (Acceptance(spec.priors),)),
        )

    @collected_once()
    def build_proposer(self, drafter: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
        """The proposer of a draft method; loads its model if it has one."""
        from specactor_ray.draft.proposer import build_proposer

        return build_proposer(drafter, target, device)

    def fetch_weights(self, weights: WeightSet) -> dict[str, Any]:
        """All tensors of a version, as views of the object store's memory.

        Raises:
            CallError: The tensors cannot be fetched.
        """
        from specactor_ray.models.weight_buckets import unpack

        buckets = self.calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S)
        return {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}


def put_weights(version: int, buckets: Iterable[WeightBucket | None], calls: Calls) -> WeightSet:
    """Put weights into the object store, bucket by bucket; they live as long as the result is held."""
    references, num_bytes = [], 0
    for bucket in buckets:
        if bucket is not None:  # None: the rank takes part in gathering and exports nothing
            references.append(calls.transport.put(bucket))
            num_bytes += bucket.data.nbytes
    return WeightSet(version, tuple(references), num_bytes)


class ModelLoop(Protocol):
    """The loop of a `LoopActor`."""

    def run(self) -> None: ...

    def stop(self) -> None: ...

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]: ...

    def forget_history(self) -> Future[None]: ...


L = TypeVar("L", bound=ModelLoop)
S = TypeVar("S", bound=ActorSpec)


class LoopThread(Generic[L]):
    """A daemon thread that makes a loop and runs it.

    The loop, and with it the model, is made *in* the thread: OpenMP keeps a team of workers per thread that ever
    computed. With a second team there are more workers than cores, and both go to sleep between operators instead
    of waiting actively; a decode step on two cores then takes a third longer.
    """

    def __init__(self, make_loop: Callable[[], L], name: str, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._made: Future[L] = Future()
        self._loop: L | None = None
        self._thread = clock.spawn(lambda: self._main(make_loop), name)

    def loop(self) -> L:
        """Wait for the loop (the controller limits the wait) and return it. Raises the error of its construction."""
        if self._loop is None:
            self._loop = self._clock.result(self._made, float("inf"))
        return self._loop

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Request the end of the loop and wait for it; False if it still runs after `timeout_s` seconds."""
        if self._made.done() and self._made.exception() is None:
            self._made.result().stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self, make_loop: Callable[[], L]) -> None:
        try:
            loop = make_loop()
        except BaseException as error:  # noqa: BLE001 - raised again in `loop`
            self._made.set_exception(error)
            return
        self._made.set_result(loop)
        loop.run()


class LoopActor(Generic[S, L]):
    """An actor with a loop in a thread of its own; its methods only touch queues."""

    _THREAD: ClassVar[str]
    """Name of the thread."""

    def __init__(self, spec: S, host: ActorHost | None = None) -> None:
        self._spec: S = spec
        self._host = host or ActorHost()
        self._thread: LoopThread[L] | None = None
        self._lock = threading.Lock()
        """Guards the start, and the list of peers against older ones that come late."""
        self._peers_version = -1

    def start(self) -> None:
        """Bind the cores, load the model, start the loop. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._host.configure(self._spec.actor_id, self._spec.cores, self._spec.log_level)
                self._thread = LoopThread(self._make_loop, self._THREAD, self._host.clock)
        self._thread.loop()

    def load_weights(self, weights: WeightSet) -> None:
        """Load a version of the weights that the actor follows: the policy's, or those taught to its method. Requests
        of older versions end. Idempotent."""
        self._do(self._running().load_weights(weights.version, self._host.fetch_weights(weights)))

    def forget_history(self) -> None:
        """Clear the histories of earlier outputs of this process's drafters."""
        self._do(self._running().forget_history())

    def stop(self) -> None:
        """End the loop in order; returns when it has ended, or after ten seconds."""
        if self._thread is not None:
            self._thread.stop(10.0)

    def _make_loop(self) -> L:
        """Build the loop, in its thread."""
        raise NotImplementedError

    def _take_version(self, version: int) -> bool:
        """Whether a list of peers is no older than the last one; the lock is held."""
        if version < self._peers_version:
            return False
        self._peers_version = version
        return True

    def _do(self, command: Future[None]) -> None:
        self._host.clock.result(command, COMMAND_TIMEOUT_S)

    def _running(self) -> L:
        if self._thread is None:
            raise RuntimeError(f"{self._spec.actor_id} was not started")
        return self._thread.loop()
