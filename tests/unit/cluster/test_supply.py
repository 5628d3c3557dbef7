"""Demand and supply of resources, by kinds of GPUs."""

from __future__ import annotations

import pytest

from specactor_ray.cluster.supply import (
    Demand,
    NodeSupply,
    can_ever_fit,
    demand_against_supply,
    gpus_by_kind,
    require_kinds,
)
from specactor_ray.config.accelerators import KIND_LABEL
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from tests.refused import refused


def node(cpus: float, gpus: float = 0.0, kind: str = "", ip: str = "10.0.0.1", **labels: str) -> NodeSupply:
    total = {"CPU": cpus, "GPU": gpus}
    return NodeSupply(f"{ip[-1] * 8}ff", ip, total, total, {**({KIND_LABEL: kind} if kind else {}), **labels})


@pytest.mark.parametrize(
    ("demands", "nodes", "fits"),
    [
        ([Demand("a", 2), Demand("b", 2)], [node(4)], True),
        ([Demand("a", 2), Demand("b", 3)], [node(4)], False),
        ([Demand("a", 4)], [node(2), node(2)], False),
        ([Demand("a", 1, 1), Demand("b", 1, 1)], [node(8, 1)], False),
        ([Demand("a", 1, 1, accelerator="L4"), Demand("b", 1, 1)], [node(8, 1, "L4"), node(8, 1, "H100")], True),
        ([Demand(name, 1, 1, accelerator="L4") for name in "ab"], [node(8, 1, "L4"), node(8, 1, "H100")], False),
        ([Demand(kind, 1, 2, accelerator=kind) for kind in ("L4", "in(L4)")], [node(8, 3, "L4"), node(8, 4)], False),
        ([Demand(kind, 1, 2, accelerator=kind) for kind in ("L4", "!T4", "in(L4, T4)")], [node(8, 5, "L4")], False),
        ([Demand(kind, 1, 2, accelerator=kind) for kind in ("L4", "!T4")], [node(8, 2, "L4"), node(8, 2)], True),
        ([Demand("a", 4, 1, accelerator="L4")], [node(2, 1, "L4"), node(8, 1, "H100")], False),
        ([], [node(1)], True),
    ],
)
def test_what_can_never_fit(demands: list[Demand], nodes: list[NodeSupply], fits: bool) -> None:
    assert can_ever_fit(demands, nodes) is fits


CLUSTER = [
    node(8),
    node(8, 4, "L4", "10.0.0.2", market="spot"),
    node(8, 4, "A100", "10.0.0.3"),
    node(8, 4, "A100", "10.0.0.4"),
]
THERE = "the cluster has 8 A100 (10.0.0.3, 10.0.0.4), 4 L4 (10.0.0.2)"


def config(target: str = "A100", drafter: str = "L4", trainer: str | None = None, **options: int) -> Config:
    return from_mapping(
        {
            "mode": "decoupled",
            "target": {"gpus": 1, "cores": 1, "accelerator": target},
            "drafters": [{"method": "draft_model", "model": "m", "gpus": 1, "accelerator": drafter, **options}],
            "trainer": {"gpus": 1 if trainer else 0, "accelerator": trainer},
        }
    )


@pytest.mark.parametrize(
    ("asked", "key", "names"),
    [
        (config("H100"), "target", [f"no node has H100; {THERE}. Fix: "]),
        (config("A10O"), "target", [f"{THERE}. Did you mean A100?"]),
        (config("a100"), "target", ["Did you mean A100?"]),
        (config(drafter="in(A10G, T4)"), "drafters.0", [f"no node has in(A10G, T4); {THERE}.", "mode=coupled"]),
        (config(drafter="market=reserved"), "drafters.0", ["no node has market=reserved", "4 L4 market=spot"]),
        (config(trainer="H100"), "trainer", ["no node has H100"]),
    ],
)
def test_a_kind_that_no_node_has_is_refused_with_what_there_is(asked: Config, key: str, names: list[str]) -> None:
    with refused(f"{key}.accelerator", *names):
        require_kinds(asked, CLUSTER)


def test_kinds_that_are_there_and_those_not_needed_yet_pass() -> None:
    require_kinds(config("in(A100,H100)", "!A100", "market=!spot"), CLUSTER)
    require_kinds(config(drafter="H100", replicas=0), CLUSTER)  # a node may join before `specactor scale`
    require_kinds(config("H100"), [*CLUSTER, node(4, **{"ray.io/node-group": "head"})])  # an autoscaler may start one


def test_a_node_needs_as_many_gpus_as_an_actor() -> None:
    asked = config()
    asked.target.gpus = 8
    with refused("target.accelerator", "no node has 8 x A100"):
        require_kinds(asked, CLUSTER)
    with refused("target.accelerator", "the cluster has no GPUs. Fix: run it on CPUs (gpus=0)"):
        require_kinds(asked, CLUSTER[:1])
    same_machine = [node(8, 4), node(8, 2)]
    with refused("target.accelerator", "6 GPUs of a kind without a label (11111111, 11111111)"):
        require_kinds(asked, same_machine)


def test_what_is_missing_is_told_by_kind() -> None:
    wanted = [Demand(f"draft_model-{index}", 1, 1, accelerator="L4") for index in range(6)]
    table = demand_against_supply([Demand("verifier-0", 4, 2, accelerator="A100"), *wanted], CLUSTER)
    assert "Missing: 0 CPU, 2 GPU (L4)\n" in table
    assert "draft_model (6)          1 CPU, 1 GPU (L4) each" in table
    assert "10.0.0.3 (33333333)      8 CPU, 4 GPU (A100), free 8 CPU, 4 GPU" in table
    shared = [Demand("verifier-0", 1, 3, accelerator="in(L4)"), *wanted[:2]]
    assert "Missing: 0 CPU, 1 GPU (in(L4) and L4)\n" in demand_against_supply(shared, CLUSTER)
    assert gpus_by_kind(CLUSTER) == {"A100": 8.0, "L4": 4.0}
