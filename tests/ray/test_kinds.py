"""A cluster of unlike GPUs, which are logical ones: actors have nodes of their kinds, at the start, after scaling and
after the loss of a node; a kind that no node has is refused with what there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

import tests.fakes.actors as fake_actors
from specactor_ray.cli import main as cli
from specactor_ray.cli.doctor import diagnose
from specactor_ray.cli.report import status_table
from specactor_ray.cluster.connection import list_runs
from specactor_ray.config.accelerators import KIND_LABEL
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.controller.controller import start_controller
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.core.console import make_console
from specactor_ray.trainer import trainer_ranks
from tests.refused import refused
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

DEADLINE_S = 120.0
FAKES = (fake_actors.FakeVerifier, fake_actors.FakeDrafter)
QUICK = ReplacementLimits(health_timeout_s=60.0, start_timeout_s=120.0, backoff_s=0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two H100; nodes with L4 join in the first test."""
    ray.cloudpickle.register_pickle_by_value(fake_actors)
    head = {"num_cpus": 8, "num_gpus": 2, "labels": labels("H100"), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(fake_actors)


def labels(kind: str) -> dict[str, str]:
    return {KIND_LABEL: kind, "market": "spot"}


def settings(cluster: Cluster, target: str = "H100", drafter: str = "L4") -> dict[str, Any]:
    return {
        "mode": "decoupled",
        "cluster": {"address": cluster.address, "pin_cores": False, "health_interval_s": 0.5},
        "target": {"gpus": 1, "cores": 1, "accelerator": target},
        "drafters": [{"method": "draft_model", "model": "m", "gpus": 1, "accelerator": drafter, "replicas": 2}],
    }


def rows(handle: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.get(handle.status.remote(), timeout=DEADLINE_S)
    return found


def wait_for(handle: Any, drafters: int, gone: str = "") -> list[str]:
    """Nodes of the draft actors, once so many are ready and none is on node `gone`; all actors have their kinds."""

    def ready() -> list[str] | None:
        found = [row for row in rows(handle) if row["phase"] == "ready"]
        assert all(row["accelerator"] == ("H100" if row["kind"] == "verifier" else "L4") for row in found)
        nodes = [row["node_id"] for row in found if row["kind"] == "drafter"]
        return nodes if len(nodes) == drafters and gone not in nodes else None

    return wait_until(ready, f"{drafters} draft actors, none on {gone or 'a lost node'}")


def test_actors_stay_on_their_kinds(cluster: Cluster) -> None:
    first = cluster.add_node(num_cpus=8, num_gpus=2, labels=labels("L4"))
    handle, run = start_controller(from_mapping(settings(cluster)), FAKES, QUICK)
    assert set(wait_for(handle, 2)) == {first.node_id}
    console = make_console()
    with console.capture() as shown:
        console.print(status_table(rows(handle)))
    assert " H100 0" in shown.get() and " L4 1" in shown.get()

    ray.get(handle.scale.remote({"draft_model": 3}))
    wait_until(lambda: any("waits for room" in row["note"] for row in rows(handle)), "the third waits")
    second = cluster.add_node(num_cpus=8, num_gpus=3, labels=labels("L4"))
    assert sorted(wait_for(handle, 3)) == sorted([first.node_id, first.node_id, second.node_id])

    cluster.remove_node(first)
    assert set(wait_for(handle, 3, gone=first.node_id)) == {second.node_id}, "one H100 is free all the time"
    (cpus_and_gpus,) = [one for one in diagnose_cluster(cluster) if "nodes" in one]
    assert "1 of 5 GPUs free; 1 of 2 H100; 0 of 3 L4" in cpus_and_gpus
    assert ray.get(handle.shutdown.remote(), timeout=DEADLINE_S)
    ray.kill(handle)
    wait_until(lambda: run not in list_runs(), "its controller is gone")


def diagnose_cluster(cluster: Cluster) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        return [one.found for one in diagnose() if one.area == "cluster"]


def test_the_trainer_has_its_kind(cluster: Cluster) -> None:
    config = from_mapping({**settings(cluster), "trainer": {"gpus": 1, "accelerator": "!H100, market=spot"}})
    with contextlib.ExitStack() as held:
        (place,) = trainer_ranks._place(config, "evening", held)
        (node,) = placement_group_table(place.placement_group)["bundles_to_node_id"].values()
        (found,) = [one["Labels"] for one in ray.nodes() if one["NodeID"] == node]
        assert found[KIND_LABEL] == "L4"


@pytest.mark.parametrize(
    ("target", "drafter", "key", "names"),
    [
        ("T4", "L4", "target.accelerator", ["no node has T4; the cluster has 2 H100 (", "3 L4 ("]),
        ("h100", "L4", "target.accelerator", ["Did you mean H100?"]),
        ("H100", "market=reserved", "drafters.0.accelerator", ["no node has market=reserved", "H100 market=spot"]),
    ],
)
def test_a_kind_that_is_not_there_starts_nothing(
    cluster: Cluster, target: str, drafter: str, key: str, names: list[str]
) -> None:
    config: Config = from_mapping(settings(cluster, target, drafter))
    with refused(key, *names):
        start_controller(config, FAKES, QUICK)
    assert not list_runs() and not ray.util.list_named_actors(all_namespaces=True)


def test_the_command_ends_with_exit_code_2(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, runs = tmp_path / "prompts.txt", tmp_path / "runs"
    prompts.write_text("one\n")
    asked = ["target.gpus=1", "target.accelerator=H10O", f"target.model={tiny_model_dir}", "mode=plain"]
    where = [f"cluster.address={cluster.address}", f"data.path={prompts}", f"run.dir={runs}", "sampling.max_tokens=4"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["rollout", *asked, *where])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "target.accelerator: no node has H10O; the cluster has" in said and "Did you mean H100?" in said
    assert not list(tmp_path.glob("runs/*")), "no folder is left"
