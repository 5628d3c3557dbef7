"""A whole run on a virtual cluster of unlike GPUs: actors stay on their kinds, whatever is lost and scaled, and tokens
are those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from specactor_ray.config.accelerators import KIND_LABEL
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.simulation.cluster import VirtualRun
from specactor_ray.simulation.network import Node
from specactor_ray.simulation.world import World
from tests.faults.network import FaultyNetwork
from tests.number_text import HashedText, true_output

KINDS = {"head": "", "first": "H100", "second": "L4", "third": "L4", "fourth": "H100"}
TOKENS = 300


def make_run() -> VirtualRun:
    """A verifier on H100 and two draft models on L4, two GPUs a node."""
    drafter = {"method": "draft_model", "model": "m", "gpus": 1, "accelerator": "L4", "replicas": 2}
    target = {"gpus": 1, "cores": 1, "accelerator": "H100", "max_batch": 8}
    cluster = {"address": "auto", "health_interval_s": 1.0, "health_timeout_s": 6.0, "start_timeout_s": 60.0}
    config = from_mapping({"mode": "decoupled", "target": target, "drafters": [drafter], "cluster": cluster})
    nodes = [
        Node(name, cpus=8.0, gpus=2.0 * bool(kind), labels={KIND_LABEL: kind} if kind else {})
        for name, kind in KINDS.items()
    ]
    return VirtualRun(config, World(HashedText({"draft_model": 0.8})), nodes, 3, FaultyNetwork)


def places(run: VirtualRun) -> dict[str, list[str]]:
    """Key → nodes of the ready actors; each actor says the kind of its node."""
    found: dict[str, list[str]] = {"verifier": [], "drafter": []}
    for row in run.ask("status"):
        if row["phase"] == "ready":
            assert row["accelerator"] == KINDS[row["node"]] == ("H100" if row["kind"] == "verifier" else "L4")
            found[row["kind"]].append(row["node"])
    return found


def settled(run: VirtualRun, drafters: int, gone: str = "") -> dict[str, list[str]]:
    """Places of so many draft actors and a verifier, once none of them is on the node `gone`."""
    for _ in range(100):
        found = places(run)
        if len(found["drafter"]) == drafters and found["verifier"] and gone not in found["drafter"] + found["verifier"]:
            return found
        run.clock.sleep(1.0)
    raise AssertionError(f"{drafters} draft actors and a verifier: {run.ask('status')}")


def lose(run: VirtualRun, name: str) -> None:
    network: Any = run.network
    network.lose_node(next(node for node in run.machines.nodes if node.name == name))


@pytest.mark.parametrize("lost", ["drafters", "verifier"])
def test_what_a_lost_node_had_comes_back_on_its_kind(lost: str) -> None:
    run, checked = make_run(), list[bool]()

    def drive() -> None:
        run.start_run()
        entries = [JournalEntry(f"r{n}", (1, 2), SamplingParams(seed=n, max_tokens=TOKENS)) for n in range(6)]
        stream, before = run.stream(entries), settled(run, 2)
        assert len(set(before["drafter"])) == 1
        ended = [next(stream)]
        gone = before["verifier" if lost == "verifier" else "drafter"][0]
        lose(run, gone)
        settled(run, 2, gone)
        run.ask("scale", {"draft_model": 3})
        run.clock.sleep(20.0)
        alive = 2 if lost == "drafters" else 3
        assert len(settled(run, alive)["drafter"]) == alive, "no GPU of another kind is taken"
        ended += list(stream)
        assert sorted(one.request_id for one in ended) == sorted(one.request_id for one in entries)
        assert all(tuple(one.token_ids) == true_output(one.sampling, 0) for one in ended)
        run.shut_down()
        checked.append(True)

    run.kernel.spawn(drive, "drive", run.driver.process)
    run.kernel.run(until=5000.0, done=lambda: bool(checked or run.kernel.crashes))
    crashes = list(run.kernel.crashes)
    run.kernel.close()
    for _, error in crashes:
        raise error
    assert checked
