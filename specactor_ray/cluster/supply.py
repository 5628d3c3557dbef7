"""Demand of actors and supply of nodes, by kinds of accelerators; refusal of a kind that a cluster does not have."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import ray
from ray.util.accelerators import accelerators

from specactor_ray.config.accelerators import KIND_LABEL, allows, label_selector, sets_of
from specactor_ray.config.methods import acting_drafters
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ConfigError, clipped_text, did_you_mean, first_of

_FIX = "Fix: fewer replicas, cores or GPUs (target.*, drafters.*), or a bigger cluster."

_NODE_GROUP = "ray.io/node-group"
"""Ray's label of nodes that `ray up`, KubeRay or Spark started and may start more of; nodes of `ray start` have none.
Open-source autoscalers report no node groups (`get_cluster_config` of Ray's state)."""
_TYPES = {name for name in vars(accelerators).values() if isinstance(name, str)}
"""Ray's accelerator types: none of them is a mistyped other one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources of one actor, all on one node."""

    owner: str
    """Actor id; also names the group."""
    cpus: float
    gpus: float = 0.0
    guest_cpus: float = 0.0
    """Cores of a rank of the trainer in the same bundle, which shares the GPU; 0: there is none."""
    accelerator: str | None = None
    """Kind of the GPUs, as the key `accelerator`."""

    def bundle(self) -> dict[str, float]:
        """The resources for Ray; never empty, which Ray would refuse."""
        wanted = {"CPU": float(self.cpus + self.guest_cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": 0.001}

    @property
    def own_gpus(self) -> float:
        """GPUs of the actor for Ray: with a guest each of the two has a half, of the same one."""
        return self.gpus / 2 if self.guest_cpus else self.gpus


@dataclass(frozen=True, slots=True)
class NodeSupply:
    """Resources of one live node."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.ip} ({self.node_id[:8]})"


class Place(NamedTuple):
    """The node of a bundle."""

    node_id: str
    ip: str
    kind: str = ""
    """Kind of its GPUs, by its label; empty without one."""


def cluster_supply() -> list[NodeSupply]:
    """The live nodes, each with its total and its free resources."""
    try:
        from ray._private.state import available_resources_per_node  # no public function returns it

        free = available_resources_per_node()
    except (ImportError, RuntimeError):
        free = {}
    return [replace(one, free=free.get(one.node_id, one.total)) for one in live_nodes()]


def live_nodes() -> list[NodeSupply]:
    """The live nodes, as if all their resources were free."""
    alive = [one for one in ray.nodes() if one["Alive"]]
    return [
        NodeSupply(one["NodeID"], one["NodeManagerAddress"], one["Resources"], one["Resources"], one["Labels"])
        for one in alive
    ]


def can_ever_fit(demands: Sequence[Demand], supply: Sequence[NodeSupply]) -> bool:
    """False when the demands exceed the total resources of these nodes, or of those of some kinds, whatever other users
    hold."""
    for (_, wanted, nodes), name in itertools.product(_by_kinds(demands, supply), ("CPU", "GPU")):
        needs, have = ([one.get(name, 0.0) for one in ones] for ones in (wanted, (node.total for node in nodes)))
        if sum(needs) > sum(have) + 1e-6 or max(needs, default=0.0) > max(have, default=0.0) + 1e-6:
            return False
    return True


def _by_kinds(
    demands: Sequence[Demand], supply: Sequence[NodeSupply]
) -> Iterator[tuple[tuple[str, ...], list[dict[str, float]], list[NodeSupply]]]:
    """The bundles and the nodes that they share: all, and those of each set of wanted kinds."""
    for some in ((), *sets_of(one.accelerator for one in demands if one.accelerator)):
        wanted = [one.bundle() for one in demands if not some or one.accelerator in some]
        yield some, wanted, [one for one in supply if not some or any(allows(kind, one.labels) for kind in some)]


# ---- in words ----


def require_kinds(config: Config, supply: Sequence[NodeSupply]) -> None:
    """Refuse a kind of GPUs of which no node has as many as an actor of the start needs, unless nodes are of groups, of
    which an autoscaler may start more for the placement groups. The ConfigError has the kinds and the nodes of the
    cluster."""
    if any(_NODE_GROUP in one.labels for one in supply):
        return
    target, trainer = config.target, config.trainer
    sizes = [("target", target.accelerator, target.gpus)]
    sizes += [(one.key, one.accelerator, one.gpus) for one in acting_drafters(config) if one.replicas]
    for section, kind, gpus in (*sizes, ("trainer", trainer.accelerator, trainer.gpus)):
        if not kind or any(allows(kind, one.labels) and one.total.get("GPU", 0.0) >= gpus for one in supply):
            continue
        number, known = f"{gpus} x " * (gpus > 1), () if kind in _TYPES else gpus_by_kind(supply)
        problem = f"no node has {number}{clipped_text(kind)}; the cluster has {_gpus(supply, label_selector(kind))}."
        fix = f"use one of these, or leave it out{', or mode=coupled' * section.startswith('drafters')}."
        if not any(one.total.get("GPU") for one in supply):
            fix = "run it on CPUs (gpus=0), or on a cluster with GPUs."
        raise ConfigError(f"{section}.accelerator", problem + did_you_mean(kind, known), fix)


def gpus_by_kind(supply: Sequence[NodeSupply], amount: str = "total") -> dict[str, float]:
    """Kind → GPUs of all nodes that have a kind (`amount`: total or free)."""
    kinds = sorted({one.labels.get(KIND_LABEL, "") for one in supply} - {""})
    nodes = {kind: [one for one in supply if one.labels.get(KIND_LABEL) == kind] for kind in kinds}
    return {kind: _sum("GPU", (getattr(one, amount) for one in nodes[kind])) for kind in kinds}


def _gpus(supply: Sequence[NodeSupply], labels: Iterable[str]) -> str:
    """`4 L4 (10.0.0.1), 8 A100 (10.0.0.2, 10.0.0.3)`, with the values of these labels."""
    shared = Counter(one.ip for one in supply)
    kinds: dict[str, list[NodeSupply]] = defaultdict(list)
    for one in (one for one in supply if one.total.get("GPU")):
        others = (f" {label}={one.labels[label]}" for label in labels if label != KIND_LABEL and label in one.labels)
        kinds[one.labels.get(KIND_LABEL, "GPUs of a kind without a label") + "".join(others)].append(one)
    parts = []
    for kind, nodes in sorted(kinds.items()):
        names = first_of([one.ip if shared[one.ip] == 1 else one.node_id[:8] for one in nodes])
        parts.append(f"{sum(one.total['GPU'] for one in nodes):g} {kind} ({names})")
    return ", ".join(parts) or "no GPUs"


def demand_against_supply(
    demands: Sequence[Demand], supply: Sequence[NodeSupply], held: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """A readable table: the demand of the actors, the resources of every node, what is missing, what others hold by
    their placement groups, and the fix."""
    kinds = Counter(
        (demand.owner.rsplit("-", 1)[0], _amounts(demand.bundle(), demand.accelerator)) for demand in demands
    )
    lines = ["Demand:", *(f"  {f'{kind} ({count})':<24} {amounts} each" for (kind, amounts), count in kinds.items())]
    total = {name: _sum(name, (demand.bundle() for demand in demands)) for name in ("CPU", "GPU")}
    lines += [f"  {'in all':<24} {_amounts(total)}", "Supply (total, and free before this request):"]
    lines += [
        f"  {node!s:<24} {_amounts(node.total, node.labels.get(KIND_LABEL))}, free {_amounts(node.free)}"
        for node in supply
    ] or ["  no live node"]
    if missing := list(_missing(demands, supply)):
        lines.append(f"Missing: {'; '.join(missing)}")
    if held:
        lines.append(f"Held by: {'; '.join(f'{user}: {_amounts(held[user])}' for user in sorted(held))}")
    return "\n".join([*lines, _FIX])


def _missing(demands: Sequence[Demand], supply: Sequence[NodeSupply]) -> Iterator[str]:
    """What all nodes together lack, and those of the wanted kinds; of several that share nodes, if each alone has
    enough."""
    named = set[str]()
    for kinds, wanted, nodes in _by_kinds(demands, supply):
        free = [node.free for node in nodes]
        missing = {name: max(0.0, _sum(name, wanted) - _sum(name, free)) for name in ("CPU", "GPU")}
        if any(missing.values()) and not named & {*kinds}:
            named.update(kinds)
            yield _amounts(missing, " and ".join(kinds))


def _sum(name: str, amounts: Iterable[Mapping[str, float]]) -> float:
    return sum(one.get(name, 0.0) for one in amounts)


def _amounts(resources: Mapping[str, float], kind: str | None = None) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU, {resources.get('GPU', 0.0):g} GPU" + f" ({kind})" * bool(kind)
