"""What every actor process does first: logging, title, core binding; and how its loop thread is kept."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from specactor_ray.cluster.cores import VERIFIER_SPINS, bind_to_cores
from specactor_ray.messages import WeightSet

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def configure_process(actor_id: str, cores: Sequence[int], log_level: str, spins: int = VERIFIER_SPINS) -> None:
    """Log lines carry the actor's id; the process runs on its own cores. Call before torch does any work."""
    logging.basicConfig(
        level=log_level, format=f"%(asctime)s %(levelname)s {actor_id} %(name)s: %(message)s", force=True
    )
    if cores:
        bind_to_cores(cores, spins)


COMMAND_TIMEOUT_S = 300.0
"""Longest wait for the loop to carry out a command between two steps."""


def fetch_weights(weights: WeightSet) -> dict[str, torch.Tensor]:
    """All tensors of a version, as views of the object store's memory."""
    import ray

    from specactor_ray.modeling.weight_buckets import unpack

    return {name: tensor for bucket in ray.get(list(weights.buckets)) for name, tensor in unpack(bucket)}


def put_weights(version: int, weights: Mapping[str, torch.Tensor]) -> WeightSet:
    """A copy of the weights in the object store, in float32."""
    import ray
    import torch

    from specactor_ray.modeling.weight_buckets import pack

    bucket = pack(weights.items(), torch.float32)
    return WeightSet(version, (ray.put(bucket),), bucket.data.nbytes)


class Loop(Protocol):
    """What a loop thread runs."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


L = TypeVar("L", bound=Loop)


class LoopThread(Generic[L]):
    """A daemon thread that makes a loop and runs it.

    The loop, and with it the model, is made *in* the thread: OpenMP keeps a team of workers per thread that ever
    computed. With a second team there are more workers than cores, and both go to sleep between operators instead
    of waiting actively; a decode step on two cores then takes a third longer.

    Args:
        make_loop: Makes the loop (loads the model).
        name: Name of the thread.
    """

    def __init__(self, make_loop: Callable[[], L], name: str) -> None:
        self._made: Future[L] = Future()
        self._thread = threading.Thread(target=self._main, args=(make_loop,), name=name, daemon=True)
        self._thread.start()

    def loop(self) -> L:
        """The loop, once it is made. Raises what making it raised."""
        return self._made.result()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Ask the loop to end and wait; False when it did not within `timeout_s` seconds."""
        if self._made.done() and self._made.exception() is None:
            self._made.result().stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self, make_loop: Callable[[], L]) -> None:
        try:
            loop = make_loop()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the loop gets it
            self._made.set_exception(error)
            return
        self._made.set_result(loop)
        loop.run()


def process_facts() -> dict[str, object]:
    """Facts about this process for the controller: pid and the cores it may run on."""
    return {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}
