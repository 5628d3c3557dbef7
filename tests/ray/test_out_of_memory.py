"""Ray's memory monitor ends actors: to callers they are dead, with the reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from specactor_ray.cluster.backend import start_here
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import ActorLostError
from specactor_ray.rollout.verifiers import Verifiers
from specactor_ray.transport.link import Link

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


@pytest.fixture
def actor(cluster: None, request: pytest.FixtureRequest) -> Any:
    """An actor that never answers by itself."""

    class Busy:
        def view(self, _known: int | None) -> None:
            threading.Event().wait()

        def deliver(self, _message: str) -> None:
            threading.Event().wait()

    return start_here(f"oom-{os.getpid()}", request.node.name, Busy)


def test_a_call_in_flight_and_later_ones_find_the_actor_lost(actor: Any) -> None:
    calls = Calls()
    for _ in range(2):
        with pytest.raises(ActorLostError, match=REASON):
            calls.ask(actor, "view", None, deadline_s=120.0)


def test_a_rollout_gives_up_its_controller_at_once_with_the_reason(actor: Any) -> None:
    verifiers = Verifiers(actor, Calls(), timeout_s=3600.0)

    def follow() -> None:
        while True:
            verifiers.refresh(unfinished=7)
            verifiers.wait()

    with pytest.raises(ActorLostError, match=rf"the controller of the run is gone .*{REASON}.*; 7 requests"):
        follow()


def test_a_link_ends_for_good(actor: Any) -> None:
    free = threading.Event()
    link = Link[str](Calls().sender(actor, "deliver"), free.set)
    while link.failed is None:
        free.clear()
        link.offer(lambda: "a message")
        assert free.wait(120.0)
    assert isinstance(link.failed, ActorLostError) and REASON in str(link.failed)
