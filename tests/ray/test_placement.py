"""Reaching a cluster and finding room on it: refusals come in time, are readable, and nothing is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from specactor_ray.cluster.backend import Demand, RayBackend
from specactor_ray.cluster.connection import connect
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

# ---- reaching a cluster; Ray is not initialised in this process meanwhile ----


def test_a_cluster_that_is_not_there_is_named_with_both_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match="does not answer as a Ray cluster"):
            connect(ClusterConfig(address=f"127.0.0.1:{port}"))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "auto"):
        with pytest.raises(ClusterError, match=f"127.0.0.1:{port}") as caught:
            connect(ClusterConfig(address=address))
        assert "ray start --head" in str(caught.value) and "leave the address out" in str(caught.value)
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["somewhere", "host:port", "ray://host:10001", "http://127.0.0.1:8265", "h:99999"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ClusterError, match="must be host:port"):
        connect(ClusterConfig(address=address))


DRIVER = """
import sys, time
import tests.fakes.actors as fake_actors
from specactor_ray.cluster.connection import connect
from specactor_ray.controller.members import ActorClasses
from specactor_ray.controller.controller import start_controller
from specactor_ray.config.schema import ClusterConfig, Config, DrafterConfig, ModeName
import ray
config = Config(ModeName.decoupled, cluster=ClusterConfig(address=sys.argv[1], pin_cores=False))
config.drafters = [DrafterConfig(hosted=False)]
connect(config.cluster)
handle, run = start_controller(config, ActorClasses(fake_actors.FakeVerifier, fake_actors.FakeDrafter))
rows = ray.get(handle.status.remote())
print("PIDS", *[row["pid"] for row in rows], flush=True)
time.sleep(600)
"""

# ---- room on a cluster ----


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def groups_left() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_groups_stand_on_nodes_and_are_given_back(cluster: Cluster) -> None:
    backend = RayBackend()
    supply = backend.supply()
    assert sorted(node.total["CPU"] for node in supply) == [2.0, 4.0]
    demands = [Demand("verifier-0", 3), Demand("ngram-0", 1, 2)]
    groups = {demand.owner: backend.request(demand.owner, demand) for demand in demands}
    placed = {owner: wait_until(lambda g=group: backend.resolve(g), owner) for owner, group in groups.items()}
    nodes = {node.total["CPU"]: node.node_id for node in supply}
    assert {owner: where.node_id for owner, where in placed.items()} == {
        "verifier-0": nodes[4.0],
        "ngram-0": nodes[2.0],
    }
    for where in placed.values():
        backend.remove(where.group)
    backend.remove(placed["ngram-0"].group)  # twice is harmless
    wait_until(lambda: not groups_left(), "no placement group left")


def test_a_killed_driver_takes_everything_with_it(cluster: Cluster) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stderr is not None
        line = next((line for line in driver.stdout if line.startswith("PIDS")), "")
        assert line, driver.stderr.read()
    finally:
        driver.kill()
        driver.communicate(timeout=240)
    pids = [int(word) for word in line.split()[1:]]
    assert len(pids) == 2
    wait_until(lambda: not groups_left(), "no placement group left")
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), "the actors ended as well")
