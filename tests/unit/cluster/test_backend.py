"""Demand and supply, and GPUs that two actors share."""

from __future__ import annotations

import re

import pytest

from specactor_ray.cluster.backend import (
    Demand,
    NodeSupply,
    ProcessFacts,
    can_ever_fit,
    demand_against_supply,
    refuse_shared_gpus,
)
from specactor_ray.core.errors import ClusterError


def node(cpus: float, gpus: float = 0.0) -> NodeSupply:
    total = {"CPU": cpus, "GPU": gpus}
    return NodeSupply("n" * 8, "10.0.0.1", total, total)


@pytest.mark.parametrize(
    ("demands", "nodes", "fits"),
    [
        ([Demand("a", 2), Demand("b", 2)], [node(4)], True),
        ([Demand("a", 2), Demand("b", 3)], [node(4)], False),
        ([Demand("a", 4)], [node(2), node(2)], False),
        ([Demand("a", 1, 1), Demand("b", 1, 1)], [node(8, 1)], False),
        ([], [node(1)], True),
    ],
)
def test_what_can_never_fit(demands: list[Demand], nodes: list[NodeSupply], fits: bool) -> None:
    assert can_ever_fit(demands, nodes) is fits


def test_demand_and_supply_are_shown_with_the_fix() -> None:
    demands = [Demand("verifier-0", 3), Demand("verifier-1", 3), Demand("ngram-0", 1, 1)]
    table = demand_against_supply(demands, [node(4), node(2, 2)])
    for line in (
        r"verifier-0 to verifier-1 \(2\) +3 CPU, 0 GPU",
        "ngram-0 .*1 CPU, 1 GPU",
        "in all .*7 CPU, 1 GPU",
        "4 CPU, 0 GPU, free 4 CPU",
        "2 CPU, 2 GPU, free",
    ):
        assert re.search(line, table)
    assert "Fix: fewer replicas" in table


def test_shared_gpus_are_refused() -> None:
    places = {"verifier-0": ("n1", "0"), "draft-0": ("n1", "1"), "draft-1": ("n2", "0"), "draft-2": ("n1", "0")}
    facts = {name: ProcessFacts(number, 0, *place) for number, (name, place) in enumerate(places.items())}
    for alone in ("draft-0", "draft-1"):
        refuse_shared_gpus(alone, facts)
    with pytest.raises(ClusterError, match="draft-2 and verifier-0 both use GPU 0"):
        refuse_shared_gpus("draft-2", facts)
