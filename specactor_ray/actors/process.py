"""What every actor process does first: logging, title, core binding; and how its loop thread is kept."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from specactor_ray.cluster.cores import bind_to_cores

logger = logging.getLogger(__name__)


def configure_process(actor_id: str, cores: Sequence[int], log_level: str) -> None:
    """Log lines carry the actor's id; the process runs on its own cores. Call before torch does any work."""
    logging.basicConfig(
        level=log_level, format=f"%(asctime)s %(levelname)s {actor_id} %(name)s: %(message)s", force=True
    )
    if cores:
        bind_to_cores(cores)


class LoopThread:
    """A daemon thread that runs one loop; `alive` tells whether it still does."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the loop to end; False when it did not within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def process_facts() -> dict[str, object]:
    """Facts about this process for the controller: pid and the cores it may run on."""
    return {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}
