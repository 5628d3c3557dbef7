"""Demand and supply of resources."""

from __future__ import annotations

import pytest

from specactor_ray.cluster.backend import Demand, NodeSupply, can_ever_fit


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
