"""The controller with real Ray actors: what dies is replaced, what is surplus is removed, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

import tests.fakes.actors as fake_actors
from specactor_ray.cluster.backend import remove_left, start_here
from specactor_ray.cluster.connection import find_controller, list_runs
from specactor_ray.cluster.names import CONTROLLER
from specactor_ray.config.schema import ClusterConfig, Config, DrafterConfig, ModeName, TargetConfig
from specactor_ray.controller.controller import Controller, start_controller
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.core.errors import ClusterError, ModelLoadError, SpecActorError
from specactor_ray.core.leftovers import start_ticks
from tests.fakes.actors import FakeDrafter, FakeVerifier
from tests.refused import refused
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

DEADLINE_S = 120.0
FAKES = (FakeVerifier, FakeDrafter)
QUICK = ReplacementLimits(health_timeout_s=60.0, start_timeout_s=120.0, backoff_s=0.2, max_start_failures=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray.cloudpickle.register_pickle_by_value(fake_actors)  # actors of a test file cannot be imported elsewhere
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(fake_actors)


@pytest.fixture
def run(cluster: Cluster) -> Iterator[Callable[..., Any]]:
    """Starts controllers; at the end each is shut down and must leave nothing."""
    handles: list[Any] = []

    def start(config: Config, policy: ReplacementLimits = QUICK) -> Any:
        handle, _ = start_controller(config, FAKES, policy)
        handles.append(handle)
        return handle

    yield start
    for handle in handles:
        pids = [row["pid"] for row in ray.get(handle.status.remote()) if row["pid"]]
        assert ray.get(handle.shutdown.remote(), timeout=DEADLINE_S)
        ray.kill(handle)
        assert not [pid for pid in pids if start_ticks(pid) is not None]
    wait_until(lambda: not groups_left(), "all placement groups removed")


def make_config(verifiers: int = 1, ngram: int = 1, **cluster: Any) -> Config:
    quick = ClusterConfig(
        address="auto", pin_cores=False, placement_timeout_s=60.0, start_timeout_s=120.0, health_interval_s=0.5
    )
    for name, value in cluster.items():
        setattr(quick, name, value)
    ngrams = DrafterConfig(method="ngram", replicas=ngram, hosted=False)
    drafters = [ngrams, DrafterConfig(method="draft_model", model="small", replicas=0)]
    return Config(mode=ModeName.decoupled, cluster=quick, target=TargetConfig(replicas=verifiers), drafters=drafters)


def groups_left() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def rows(handle: Any, kind: str = "", phase: str = "") -> list[dict[str, Any]]:
    status = ray.get(handle.status.remote(), timeout=DEADLINE_S)
    return [row for row in status if row["kind"].startswith(kind) and row["phase"].startswith(phase)]


def wait_for_drafters(handle: Any, number: int, gone: str = "") -> list[str]:
    """Ids of the ready draft actors, once there are `number` and no other, and `gone` is not one of them."""

    def settled() -> list[str] | None:
        drafters = rows(handle, "drafter")
        ids = [row["id"] for row in drafters if row["phase"] == "ready" and row["id"] != gone]
        return ids if len(ids) == len(drafters) == number else None

    return wait_until(settled, f"{number} ready drafters, {gone or 'nobody'} gone")


def drafters_told(handle: Any) -> dict[str, list[str]]:
    """Verifier id → the draft actors it was told last."""
    verifiers = ray.get(handle.view.remote()).verifiers
    return {name: ray.get(actor.told.remote(), timeout=DEADLINE_S) for name, actor in verifiers.items()}


def test_actors_are_scaled_and_replaced_and_the_run_is_found_by_name(run: Callable[..., Any]) -> None:
    config = make_config(verifiers=2, ngram=1)
    config.run.name = "evening"
    handle = run(config)
    view = ray.get(handle.view.remote())
    first = wait_for_drafters(handle, 1)
    wait_until(lambda: all(told == first for told in drafters_told(handle).values()), "verifiers have the drafter")
    told = view.drafters[0].handle.told
    wait_until(lambda: sorted(ray.get(told.remote())) == sorted(view.verifiers), "the drafter has the verifiers")
    in_group = {
        ray.get(one.__ray_call__.remote(group_here)) for one in (*view.verifiers.values(), view.drafters[0].handle)
    }
    assert len(in_group) == 1 and groups_left() == ["specactor::evening::gang-0"], "one placement group for all three"

    ray.get(handle.scale.remote({"ngram": 2, "draft_model": 1}))
    three = wait_for_drafters(handle, 3)
    assert first[0] in three
    wait_until(lambda: all(sorted(told) == sorted(three) for told in drafters_told(handle).values()), "three drafters")
    ray.get(handle.scale.remote({"ngram": 1, "draft_model": 0}))
    assert wait_for_drafters(handle, 1) == first, "the newest go first"
    wait_until(lambda: groups_left() == ["specactor::evening::gang-0"], "their placement groups are removed")
    for bad, key in (({"ngram": -1}, "drafters.ngram"), ({"eagle": 1}, "drafters")):
        with refused(key):
            ray.get(handle.scale.remote(bad))

    groups = sorted(groups_left())
    os.kill(rows(handle, "drafter")[0]["pid"], signal.SIGKILL)
    second = wait_for_drafters(handle, 1, gone=first[0])
    assert second[0].partition("#")[0] == first[0].partition("#")[0] and sorted(groups_left()) == groups, "in its seat"
    wait_until(lambda: all(told == second for told in drafters_told(handle).values()), "verifiers have the new one")

    assert list_runs() == ["evening"] and rows(find_controller("evening"), "verifier", "ready")
    with pytest.raises(ClusterError, match="evening"):
        find_controller("morning")
    with refused("run.name", "evening"):
        start_controller(config, FAKES, QUICK)


def group_here(_actor: Any) -> str:
    return str(ray.util.get_current_placement_group().id.hex())


def test_a_run_that_does_not_fit_holds_nothing_and_starts_when_another_ends(run: Callable[..., Any]) -> None:
    """Its draft actor alone would have room."""
    config = make_config()
    config.target.cores = 4
    first = run(config)
    free = ray.available_resources()["CPU"]
    config.run.name = "second"
    second = start_here("second", CONTROLLER, Controller, config, "second", FAKES, QUICK)
    started = second.start.remote()
    waiting = wait_until(lambda: rows(second, phase="pending"), "the second waits")
    wait_until(lambda: all("waits for room" in row["note"] for row in rows(second)), "it says so")
    assert len(waiting) == 2 and ray.available_resources()["CPU"] == free >= 1.0
    assert ray.get(first.shutdown.remote(), timeout=DEADLINE_S)
    assert len(ray.get(started, timeout=DEADLINE_S).verifiers) == 1
    assert ray.get(second.shutdown.remote(), timeout=DEADLINE_S)
    ray.kill(second)


def test_actors_end_with_a_killed_controller(cluster: Cluster) -> None:
    """The raylets and the driver live."""
    handle, _ = start_controller(make_config(verifiers=1, ngram=1), FAKES, QUICK)
    wait_for_drafters(handle, 1)
    actors = [row["pid"] for row in rows(handle, "verifier") + rows(handle, "drafter")]
    os.kill(ray.get(handle.__ray_call__.remote(lambda _self: os.getpid())), signal.SIGKILL)
    wait_until(lambda: not any(start_ticks(pid) for pid in actors), "no actor is left")

    def are_removed() -> bool:
        remove_left()  # as the next start does; Ray may learn of the controller's end after that of its actors
        return not groups_left()

    wait_until(are_removed, "placement groups removed")


@pytest.mark.parametrize(
    ("target", "cluster_keys", "kind", "words"),
    [
        ({"model": "broken"}, {}, ModelLoadError, "no such weights"),
        ({"model": "crash"}, {}, SpecActorError, "process ended"),
        ({"cores": 4, "replicas": 2}, {"placement_timeout_s": 1.0}, ClusterError, "verifier-1.*9 CPU.*6 CPU.*Fix:"),
        ({}, {"pin_cores": True}, ClusterError, "ngram-0 .*verifier-0 .*pin_cores"),  # Ray counts six CPUs here
    ],
)
def test_a_failed_start_reaches_the_caller_and_leaves_nothing(
    cluster: Cluster, target: dict[str, Any], cluster_keys: dict[str, Any], kind: type[Exception], words: str
) -> None:
    config = make_config(**cluster_keys)
    config.target = TargetConfig(**target)
    if config.cluster.pin_cores:
        config.drafters[0].cores = len(os.sched_getaffinity(0))
        if config.drafters[0].cores > 5:
            pytest.skip("the cluster of this test has six CPUs")
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        start_controller(config, FAKES, QUICK)
    assert type(caught.value) is kind, "a process that ends is no mistake of the user"
    wait_until(lambda: not groups_left(), "placement groups removed")
    wait_until(lambda: not list_runs(), "no controller")
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True), "no actor")


def test_node_loss_is_made_good_elsewhere(cluster: Cluster, run: Callable[..., Any]) -> None:
    """Actors of a lost node come back on another; draft actors on a GPU node get GPUs of their own."""
    node = cluster.add_node(num_cpus=4, num_gpus=2)
    config = make_config(verifiers=1, ngram=0)
    config.target.gpus = config.drafters[1].gpus = config.drafters[1].replicas = 1
    handle = run(config)
    before = rows(handle)
    assert {row["node_id"] for row in before} == {node.node_id}
    assert sorted(gpu for row in before for gpu in row["gpus"]) == ["0", "1"]
    cluster.remove_node(node)
    spare = cluster.add_node(num_cpus=4, num_gpus=2)

    def moved() -> bool:
        ready = rows(handle, phase="ready")
        return len(ready) == 2 and {row["node_id"] for row in ready} == {spare.node_id}

    wait_until(moved, "both actors on the other node")
    assert not {row["id"] for row in before} & {row["id"] for row in rows(handle)}


DRIVER = """
import sys, time
import tests.fakes.actors as fake_actors
from specactor_ray.cluster.connection import connect
from specactor_ray.controller.controller import start_controller
from specactor_ray.config.schema import ClusterConfig, Config, DrafterConfig, ModeName
import ray
config = Config(ModeName.decoupled, cluster=ClusterConfig(address=sys.argv[1], pin_cores=False))
config.drafters = [DrafterConfig(hosted=False)]
with connect(config.cluster):
    handle, run = start_controller(config, (fake_actors.FakeVerifier, fake_actors.FakeDrafter))
    rows = ray.get(handle.status.remote())
    print("PIDS", *[row["pid"] for row in rows], flush=True)
    time.sleep(600)
"""


def test_a_killed_driver_takes_everything_with_it(cluster: Cluster) -> None:
    command = [sys.executable, "-c", DRIVER, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stderr is not None
        line = next((line for line in driver.stdout if line.startswith("PIDS")), "")
        driver.kill()
        assert line, driver.stderr.read()
    pids = [int(word) for word in line.split()[1:]]
    assert len(pids) == 2
    wait_until(lambda: not groups_left(), "no placement group left")
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), "the actors ended as well")


@pytest.mark.parametrize("stage", ["start_here", "Calls.ask", "its close"])
def test_an_interrupted_start_leaves_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Twice, with the exceptions kept: a notebook keeps the last one."""
    from specactor_ray.cluster.calls import Calls
    from specactor_ray.controller import controller
    from specactor_ray.rollout import rollout

    def then_interrupted(first: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **options: Any) -> Any:
            first(*arguments, **options)
            raise KeyboardInterrupt

        return both

    free = ray.available_resources().get("CPU", 0.0)  # tests before this one may have removed nodes
    start, kept = start_controller, list[BaseException]()
    monkeypatch.setattr(rollout, "_resolved", lambda config: SimpleNamespace(config=config, context=64))
    monkeypatch.setattr(rollout, "_tokenizer_of", lambda target: None)
    monkeypatch.setattr(rollout, "start_controller", lambda config, held: start(config, FAKES, QUICK, held))
    if stage == "start_here":
        monkeypatch.setattr(controller, "start_here", then_interrupted(controller.start_here))
    elif stage == "Calls.ask":
        ask = Calls.ask

        def asked(calls: Calls, actor: Any, method: str, *arguments: Any, deadline_s: float) -> Any:
            if method == "start":
                wait_until(groups_left, "a placement group")
                raise KeyboardInterrupt
            return ask(calls, actor, method, *arguments, deadline_s=deadline_s)

        monkeypatch.setattr(Calls, "ask", asked)
        monkeypatch.setattr(controller, "start_here", begun(controller.start_here))
    else:
        monkeypatch.setattr(rollout.RequestQueue, "__init__", then_interrupted(rollout.RequestQueue.__init__))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) as caught:
            rollout.Rollout(make_config())
        kept.append(caught.value)
        wait_until(lambda: not groups_left() and not list_runs(), "nothing of it left")
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) >= free, "its cores free")
    assert ray.is_initialized() and len(kept) == 2


def begun(start_here: Callable[..., Any]) -> Callable[..., Any]:
    """Also begins the run's start, as an interrupted call has."""

    def both(*arguments: Any) -> Any:
        handle = start_here(*arguments)
        handle.start.remote()
        return handle

    return both
