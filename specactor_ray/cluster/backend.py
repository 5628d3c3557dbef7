"""Placement, start and verified end of actors: the interface of the controller to its cluster, and its form for Ray.

A placement group that cannot be satisfied never becomes ready, and Ray reports nothing: the caller ends the wait, with
a message that compares the demand with the resources of each node. `ray.kill` is a request, which has no effect on a
process that is stopped (SIGSTOP): the process of every removed actor is watched on its own node until it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.cores import usable_cores
from specactor_ray.cluster.names import CONTROLLER, NAMESPACE, actor_name, random_suffix, run_and_actor
from specactor_ray.cluster.supply import Demand, NodeSupply, Place, cluster_supply, live_nodes
from specactor_ray.config.accelerators import KIND_LABEL, label_selector
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import start_ticks

logger = logging.getLogger(__name__)

_RAYLET_CHECK_S = 5.0
_KILL_GRACE_S, _KILL_TIMEOUT_S = 1.0, 10.0
"""Seconds from `ray.kill` to SIGKILL, in which a process may end by itself, and to the end of the watch."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A placement group, as of one query."""

    nodes: tuple[Place | None, ...]
    """The node of each bundle; None while the bundle waits for room."""
    resources: Mapping[str, float]
    """The sum of its bundles."""

    @property
    def is_placed(self) -> bool:
        """Whether all its bundles have nodes."""
        return None not in self.nodes


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Identity of an actor's process."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot: distinguishes a process from a later one with the same pid."""
    node_id: str
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that Ray assigned to it."""


class Backend(Protocol):
    """Makes, places and ends actors. Nothing here blocks for long."""

    calls: Calls

    def suffix(self) -> str:
        """A random suffix of a name."""

    def supply(self) -> Sequence[NodeSupply]:
        """The live nodes, each with its total and its free resources."""

    def request(self, name: str, demands: Sequence[Demand]) -> Any:
        """Request a placement group with a bundle for each demand, all placed or none, and near each other if there is
        room. Returns at once, whether or not there is. It ends with this actor or job."""

    def groups(self) -> Mapping[str, GroupFacts]:
        """Name → facts of all placement groups of the cluster, those of other runs included; one query."""

    def remove(self, group: Any) -> None:
        """Release the group's resources. Idempotent. Ray ends actors that run in it."""

    def cores(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        """`(machine, core ids)` that processes on a node may use; None until the answer has arrived."""

    def launch(self, cls: Any, spec: Any, name: str, group: Any, bundle: int, demand: Demand) -> Any:
        """Make the actor `cls(spec)` in this bundle; returns its handle at once. A crashed actor is never
        restarted: it would come back without its state under the same name."""

    def end(self, handle: Any, facts: ProcessFacts | None) -> None:
        """End this actor for good. Without facts (it never answered) the end of its process is not verified."""

    def poll_ends(self) -> int:
        """Check the processes of ended actors. Returns how many may still exist."""


class RayBackend:
    """The cluster that this process is connected to."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.suffix, self.supply = random_suffix, cluster_supply
        self._here = ray.get_runtime_context().get_node_id()
        self._cores: dict[str, Future[tuple[str, tuple[int, ...]]]] = {}
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="end of actor")
        self._ending: dict[Future[bool], ProcessFacts] = {}

    def request(self, name: str, demands: Sequence[Demand]) -> PlacementGroup:
        return request_group(name, demands)

    def groups(self) -> Mapping[str, GroupFacts]:
        nodes = {one.node_id: Place(one.node_id, one.ip, one.labels.get(KIND_LABEL, "")) for one in live_nodes()}
        found = {}
        for group_id, facts in placement_group_table().items():
            if facts["state"] == "REMOVED":
                continue
            # While a lost node is replaced (RESCHEDULING), bundles elsewhere stay usable.
            there = nodes if facts["state"] in ("CREATED", "RESCHEDULING") else {}
            of_bundle = facts["bundles_to_node_id"]
            resources = sum((Counter(bundle) for bundle in facts["bundles"].values()), Counter[str]())
            at = tuple(there.get(of_bundle[bundle]) for bundle in sorted(of_bundle))
            found[facts["name"] or group_id] = GroupFacts(at, resources)
        return found

    def remove(self, group: PlacementGroup) -> None:
        try:
            remove_placement_group(group)
        except Exception as error:  # noqa: BLE001 - teardown continues in any state of the cluster
            logger.debug("removing a placement group failed: %s", error)

    def cores(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        if node_id == self._here:
            return usable_cores()
        if node_id not in self._cores:
            self._cores[node_id] = ray.remote(usable_cores).options(**on_node(node_id)).remote().future()
        answer = self._cores[node_id]
        if answer.done() and answer.exception() is not None:
            logger.warning("node %s did not report its cores, asking again: %s", node_id[:8], answer.exception())
            del self._cores[node_id]
            return None
        return answer.result() if answer.done() else None

    def launch(self, cls: Any, spec: Any, name: str, group: Any, bundle: int, demand: Demand) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        return make_actor(cls, name, strategy, spec, num_cpus=demand.cpus, num_gpus=demand.own_gpus)

    def end(self, handle: Any, facts: ProcessFacts | None) -> None:
        processes = family(facts) if facts is not None and facts.node_id == self._here else []
        try:
            ray.kill(handle, no_restart=True)
        except (RayError, ValueError) as error:
            logger.debug("ray.kill: %s", error)
        if facts is None:
            return
        if facts.node_id == self._here:
            self._ending[self._threads.submit(end_family, processes)] = facts
        else:
            self._ending[ray.remote(_end_there).options(**on_node(facts.node_id)).remote(facts).future()] = facts

    def poll_ends(self) -> int:
        for ended in [future for future in self._ending if future.done()]:
            facts = self._ending.pop(ended)
            if (error := ended.exception()) is not None:  # the node is gone, and the process with it
                logger.debug("node %s: %s", facts.node_id[:8], error)
            elif not ended.result():
                logger.error("process %d on node %s does not end", facts.pid, facts.node_id[:8])
        return len(self._ending)


def make_actor(
    cls: type, name: str, strategy: Any, *arguments: Any, groups: Mapping[str, int] | None = None, **options: Any
) -> Any:
    """Make the named actor `cls(*arguments)` where Ray's scheduling strategy puts it; returns its handle at once.
    `groups`: concurrency groups; without them eight methods run at a time."""
    remote: Any = ray.remote
    if groups is None:  # a long poll or a load must not hold up health checks and deliveries
        made, options = remote(cls), {"max_concurrency": 8, **options}
    else:
        made = remote(concurrency_groups=dict(groups))(cls)
    always = {"namespace": NAMESPACE, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy}
    return made.options(name=name, **always, **options).remote(*arguments)


def request_group(name: str, demands: Sequence[Demand]) -> PlacementGroup:
    """Request a placement group with a bundle for each demand, on nodes of its kind."""
    bundles, kinds = [one.bundle() for one in demands], [label_selector(one.accelerator) for one in demands]
    # STRICT_PACK would refuse a group that is larger than a node.
    return placement_group(bundles, "PACK", name, bundle_label_selector=kinds if any(kinds) else None)


def find_group(name: str) -> PlacementGroup:
    """The placement group of this name. ClusterError: there is none."""
    for group_id, facts in placement_group_table().items():
        if facts["name"] == name and facts["state"] != "REMOVED":
            return PlacementGroup(PlacementGroupID.from_hex(group_id))
    raise ClusterError(f"there is no placement group {name} on the cluster any more")


def start_here(run: str, actor_id: str, cls: type, *arguments: Any) -> Any:
    """Make a named actor of a run, on this node and with this process's lifetime. Returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return make_actor(cls, actor_name(run, actor_id), here, *arguments, num_cpus=0)


def remove_left(ended: str = "") -> None:
    """Kill the actors of a run that has ended, and remove the placement groups of all runs without a controller: Ray
    keeps a group until its whole job ends, even if the actor that made it is gone."""
    groups = [
        (group_id, run_and_actor(facts["name"])[0])
        for group_id, facts in placement_group_table().items()
        if facts["state"] != "REMOVED"
    ]
    alive = set[str]()
    for actor in ray.util.list_named_actors(all_namespaces=True):  # after the groups: those were made by living ones
        run, actor_id = run_and_actor(actor["name"])
        if actor["namespace"] == NAMESPACE and run == ended:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
        elif actor["namespace"] == NAMESPACE and actor_id == CONTROLLER:
            alive.add(run)
    for group_id, run in groups:
        if run and run not in alive:
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))


def on_node(node_id: str) -> dict[str, Any]:
    """Options of a small task that must run on this node and takes no resources."""
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}


# ---- processes ----


def end_with_raylet() -> None:
    """End this process of Ray when its node's raylet has. Ray's own check takes a raylet that is not reaped, as in a
    container whose first process reaps none, for alive."""
    raylet = int(os.environ.get("RAY_RAYLET_PID") or 0)

    def watch() -> None:
        while start_ticks(raylet) is not None:
            SYSTEM.sleep(_RAYLET_CHECK_S)
        os._exit(1)

    if raylet and start_ticks(raylet) is not None:
        threading.Thread(target=watch, name="raylet", daemon=True).start()


def process_facts(_actor: Any) -> ProcessFacts:
    """Identity of the actor's process; runs in the actor (`__ray_call__`), also while it still loads."""
    context = ray.get_runtime_context()
    gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
    return ProcessFacts(os.getpid(), start_ticks(os.getpid()) or 0, context.get_node_id(), gpus)


def family(facts: ProcessFacts) -> list[psutil.Process]:
    """This process of this machine and its descendants, such as the ranks of a split model, parents first; empty when
    it is gone. Call it while the process lives: afterwards nothing relates the descendants to it."""
    with contextlib.suppress(psutil.Error):
        if start_ticks(facts.pid) == facts.start_ticks:
            process = psutil.Process(facts.pid)
            return [process, *process.children(recursive=True)]
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process still exists and is not a zombie."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end_family(processes: Sequence[psutil.Process]) -> bool:
    """Wait for the end of a process of this machine and its descendants, with SIGKILL once the first is gone or a
    second has passed. False if any of them still runs after ten seconds."""
    begin = SYSTEM.now()
    while left := [process for process in processes if is_alive(process)]:
        waited_s = SYSTEM.now() - begin
        if waited_s >= _KILL_TIMEOUT_S:
            return False
        if waited_s >= _KILL_GRACE_S or left[0] is not processes[0]:
            for process in left:
                _kill(process)
        SYSTEM.sleep(0.05)
    return True


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        logger.error("process %d belongs to another user and cannot be killed", process.pid)


def _end_there(facts: ProcessFacts) -> bool:
    return end_family(family(facts))
