"""A Ray cluster of two nodes on this machine; the second one can be lost and replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from specactor_ray.cluster.connection import worker_job_config
from specactor_ray.cluster.names import NAMESPACE


class TwoNodes:
    """A context manager; this process is connected to the first node while inside.

    Args:
        folder: For Ray's files; its path must be short.
        cpus: Of each node, as Ray counts them.
    """

    STORE_MB = 80
    """Object store of each node."""

    def __init__(self, folder: Path, cpus: float) -> None:
        self._folder, self._cpus = folder, cpus
        self._cluster: Any = None
        self._second: Any = None

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def __enter__(self) -> TwoNodes:
        self._cluster = Cluster(shutdown_at_exit=False)
        try:
            self._cluster.add_node(**self._options(), include_dashboard=False, temp_dir=str(self._folder))
            before = signal.getsignal(signal.SIGTERM)
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                logging_level="ERROR",
                log_to_driver=False,
                job_config=worker_job_config(),
            )
            signal.signal(signal.SIGTERM, before)  # Ray's ends the process at once
            self.add_second()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def second_raylet(self) -> int:
        """Process id of the second node's raylet."""
        return int(self._second.all_processes["raylet"][0].process.pid)

    def second_id(self) -> str:
        return str(self._second.node_id)

    def lose_second(self) -> None:
        """Kill its raylet; Ray ends the workers of a node without one."""
        os.kill(self.second_raylet(), signal.SIGKILL)
        self._cluster.remove_node(self._second, allow_graceful=False)

    def add_second(self) -> None:
        self._second = self._cluster.add_node(**self._options())

    def _options(self) -> dict[str, Any]:
        return {"num_cpus": self._cpus, "object_store_memory": self.STORE_MB << 20}
