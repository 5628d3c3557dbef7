"""Ray's memory monitor ends actors: to callers they are dead, with the reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from specactor_ray.cluster.backend import start_here
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import ActorLostError

pytestmark = pytest.mark.ray
REASON = "machine ran out of memory"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster for which any use of the memory is too much."""
    monitor = {"memory_usage_threshold": 0.0, "memory_monitor_refresh_ms": 100}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": monitor}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_a_call_in_flight_and_later_ones_find_the_actor_lost(cluster: None) -> None:
    class Busy:
        def view(self) -> None:
            threading.Event().wait()

    calls, actor = Calls(), start_here(f"oom-{os.getpid()}", "busy", Busy)
    for _ in range(2):
        with pytest.raises(ActorLostError, match=REASON):
            calls.ask(actor, "view", deadline_s=120.0)
