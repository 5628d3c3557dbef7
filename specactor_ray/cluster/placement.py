"""Placement groups: one per verifier and one per draft actor, with a time limit and a readable refusal.

A group that cannot be satisfied never becomes ready, and Ray reports nothing. Here the wait ends, and the message
compares the demand with the resources of each node.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specactor_ray.core.errors import ClusterError

logger = logging.getLogger(__name__)

_FIX = "Fix: fewer replicas, cores or GPUs (target.*, drafters.*), or a bigger cluster."


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources of one actor, all on one node."""

    owner: str
    """Actor id; also names the group."""
    cpus: float
    gpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        """The resources for Ray; never empty, which Ray would refuse."""
        wanted = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": 0.001}


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement group that is ready, with its node."""

    group: Any
    bundle_index: int
    node_id: str
    node_ip: str


@dataclass(frozen=True, slots=True)
class NodeSupply:
    """Resources of one live node."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def request(name: str, demand: Demand) -> PlacementGroup:
    """Request a group; returns at once, whether or not there is room. It ends with the requesting actor or job."""
    return placement_group([demand.bundle()], strategy="PACK", name=name, lifetime=None)


def resolve(group: PlacementGroup) -> Placement | None:
    """The placement of the group; None while it waits for room or for its node's replacement. Does not block."""
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        return None
    node_id = table["bundles_to_node_id"][0]
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
    return Placement(group, 0, node_id, node["NodeManagerAddress"]) if node else None


def remove(group: PlacementGroup) -> None:
    """Release the group's resources. Idempotent. Ray ends actors that run in it."""
    try:
        remove_placement_group(group)
    except Exception as error:  # noqa: BLE001 - teardown continues in any state of the cluster
        logger.debug("removing a placement group failed: %s", error)


def cluster_supply() -> list[NodeSupply]:
    """The live nodes, each with its total and its free resources."""
    try:
        from ray._private.state import available_resources_per_node  # no public function returns it

        free = available_resources_per_node()
    except (ImportError, RuntimeError):
        free = {}
    return [
        NodeSupply(
            node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], node["Resources"])
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def can_ever_fit(demands: Sequence[Demand], supply: Sequence[NodeSupply]) -> bool:
    """False when the demands exceed the total resources of these nodes, whatever other users hold."""
    for name in ("CPU", "GPU"):
        wanted = [demand.bundle().get(name, 0.0) for demand in demands]
        have = [node.total.get(name, 0.0) for node in supply]
        if sum(wanted) > sum(have) + 1e-6 or max(wanted, default=0.0) > max(have, default=0.0) + 1e-6:
            return False
    return True


def demand_against_supply(demands: Sequence[Demand], supply: Sequence[NodeSupply]) -> str:
    """A readable table: the demand of the actors, the resources of every node, and the fix."""
    lines = ["Demand:"]
    for (_, amounts), equal in itertools.groupby(demands, lambda one: (_kind(one.owner), _amounts(one.bundle()))):
        owners = [demand.owner for demand in equal]
        names = " to ".join(dict.fromkeys((owners[0], owners[-1])))
        lines.append(f"  {names + (f' ({len(owners)})' if len(owners) > 1 else ''):<24} {amounts}")
    total = {name: sum(demand.bundle().get(name, 0.0) for demand in demands) for name in ("CPU", "GPU")}
    lines += [f"  {'in all':<24} {_amounts(total)}", "Supply (total, and free before this request):"]
    lines += [
        f"  {f'{node.ip} ({node.node_id[:8]})':<24} {_amounts(node.total)}, free {_amounts(node.free)}"
        for node in supply
    ] or ["  no live node"]
    return "\n".join([*lines, _FIX])


def _kind(owner: str) -> str:
    """`ngram` of `ngram-0`."""
    return owner.rpartition("-")[0]


def on_node(node_id: str) -> dict[str, Any]:
    """Options of a small task that must run on this node and takes no resources."""
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}


def refuse_shared_gpus(gpus: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Check that no two actors, id → (node id, GPU ids it sees), use the same GPU of one node.

    Raises:
        ClusterError: Two of them do; both are named.
    """
    seen: dict[tuple[str, str], str] = {}
    for actor_id, (node_id, ids) in gpus.items():
        for gpu in ids:
            other = seen.setdefault((node_id, str(gpu)), actor_id)
            if other != actor_id:
                raise ClusterError(
                    f"{actor_id} and {other} both use GPU {gpu} of node {node_id[:8]}; decoupled drafters need GPUs of "
                    "their own. Fix: give both whole GPUs (target.gpus, drafters.*.gpus), or use mode=coupled."
                )


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU, {resources.get('GPU', 0.0):g} GPU"
