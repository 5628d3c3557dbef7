"""Machines of several kinds: their step times, prices and links, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specactor_ray.cli.simulate import speed_table, sweep_table, write_plot
from specactor_ray.plan.hardware import find_model, load_hardware
from specactor_ray.simulation.comparison import Result, compare, make_nodes
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Kind, Node, num_bytes
from specactor_ray.simulation.scenario import ScenarioConfig, load_scenario
from specactor_ray.simulation.training import training_seconds
from specactor_ray.simulation.world import build_worlds
from specactor_ray.transport.messages import CommitBatch, DraftOpen, States
from tests.fakes.virtual import Bench
from tests.refused import refused
from tests.unit.simulation.scenarios import SMALL, results_of, write_scenario

VERIFIERS = "{nodes: 1, gpus: 2, cpus: 16, accelerator: h100, price: 3}"
DRAFTER = "{nodes: 1, gpus: 1, cpus: 16, accelerator: l4, price: 0.5}"
APART = ["config.target.accelerator=H100"]
PAIR = ["config.target.backend=vllm", "config.target.gpus=2", "config.target.tensor_parallel=2"]
HEAD = "config.drafters=[{method: eagle, model: qwen3-8b-eagle3, gpus: 1}]"
HEADS = [*APART, "config.target.model=qwen3-8b", "skills=[{method: eagle, mean: 0.8}]", HEAD]


def scenario_of(folder: Path, *machines: str) -> Path:
    old = "machines: [{nodes: 1, gpus: 4, cpus: 32}]"
    assert old in SMALL
    return write_scenario(folder, SMALL.replace(old, f"machines: [{', '.join(machines)}]"))


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Two verifiers on H100, and the drafter on an L4."""
    return scenario_of(tmp_path, VERIFIERS, DRAFTER)


def one(path: Path, items: Sequence[str], name: str = "decoupled") -> Result:
    (result,) = results_of(path, items, [name])
    return result


def text_of(table: Any) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


# ---- step times ----


def test_each_kind_has_its_own_step_times_for_the_actors_that_fit(apart: Path) -> None:
    scenario = load_scenario(apart, APART)
    h100, l4 = build_worlds(scenario)
    models = ("qwen2.5-7b", "qwen2.5-0.5b")
    step, row = (4, 8, 400, 0), (4, 4, 400, 0)
    expected = [load_hardware(name).cost(model) for name in ("h100", "l4") for model in models]
    assert h100.target(*step) == expected[0].seconds(*step)  # type: ignore[union-attr]
    assert l4.draft_time("draft_model").forward(*row) == expected[3].seconds(*row)  # type: ignore[union-attr]
    assert h100.text is l4.text
    with pytest.raises(SimulationError, match="without room"):
        l4.target(*step)
    hosting = build_worlds(load_scenario(apart, ["config.mode=coupled", "config.target.accelerator=H100"]))
    assert hosting[0].draft_time("draft_model").forward(*row) < l4.draft_time("draft_model").forward(*row)


def test_a_cheaper_drafter_drafts_later_and_verifiers_of_two_kinds_are_between_either(tmp_path: Path) -> None:
    slow = one(scenario_of(tmp_path, VERIFIERS, DRAFTER), APART)
    fast = one(scenario_of(tmp_path, VERIFIERS, DRAFTER.replace("l4", "h100")), APART)
    assert fast.rollout_s < slow.rollout_s and fast.tokens == slow.tokens
    one_each = [VERIFIERS.replace("gpus: 2", "gpus: 1").replace("h100", name) for name in ("h100", "a100")]
    layouts = ([VERIFIERS], one_each, [VERIFIERS.replace("h100", "a100")])
    plain = ["config.target.replicas=2"]
    h100, both, a100 = (one(scenario_of(tmp_path, *machines), plain, "plain").rollout_s for machines in layouts)
    assert h100 < both < a100


# ---- prices ----


def test_dollars_are_those_of_the_gpus_in_use_by_kind(apart: Path, tmp_path: Path) -> None:
    report = compare(apart, APART, ["coupled", "decoupled"], processes=1)
    (point,) = report["points"]
    coupled, decoupled = point["results"]
    assert (coupled["dollars_per_hour"], decoupled["dollars_per_hour"]) == (6.0, 6.5)
    assert decoupled["tokens_per_dollar"] == pytest.approx(decoupled["tokens_per_s"] * 3600 / 6.5)
    ratio = decoupled["tokens_per_dollar"] / coupled["tokens_per_dollar"]
    assert point["dollar_ratios"] == {"coupled": 1.0, "decoupled": pytest.approx(ratio)}
    lines = {line.split()[0]: line.split() for line in text_of(speed_table(point)).splitlines() if line.split()}
    assert lines["decoupled"][7] == "6.50" and lines["decoupled"][9] == f"{ratio:.2f}"
    swept = compare(apart, APART, ["coupled", "decoupled"], ("machines.1.price", ["0.5", "2"]), processes=1)
    dear = swept["points"][1]["dollar_ratios"]["decoupled"]
    assert dear == pytest.approx(ratio * 6.5 / 8)
    table = text_of(sweep_table(swept, per_dollar=True))
    assert "million tokens/$ over machines.1.price" in table and f"{dear:.2f}" in table
    assert write_plot(tmp_path, swept, per_dollar=True) == f"plot: {tmp_path / 'sweep.png'}"


def test_prices_are_the_hardware_files_where_the_scenario_has_none(tmp_path: Path) -> None:
    """And the nodes without GPUs cost by the core."""
    listed = scenario_of(tmp_path, *(machine.partition(", price")[0] + "}" for machine in (VERIFIERS, DRAFTER)))
    assert one(listed, APART).dollars_per_hour == pytest.approx(2 * 4.5 + 0.8)
    unknown = scenario_of(tmp_path, VERIFIERS, "{nodes: 1, gpus: 1, accelerator: h20}")
    result = one(unknown, APART)
    assert result.dollars_per_hour is None and result.tokens_per_dollar is None
    (point,) = compare(unknown, APART, ["decoupled"], processes=1)["points"]
    assert point["dollar_ratios"] == {"decoupled": None} and "$" not in text_of(speed_table(point))
    cores = scenario_of(tmp_path, VERIFIERS, "{nodes: 1, gpus: 0, cpus: 8, price: 0.05}")
    lookup = "config.drafters=[{method: ngram, hosted: false, cores: 2}]"
    items = ["config.target.cores=8", "skills=[{method: ngram}]", lookup]
    assert one(cores, [*APART, *items]).dollars_per_hour == pytest.approx(6.0 + 2 * 0.05)


# ---- links ----


def test_a_message_between_kinds_takes_the_latency_of_both_and_its_size_by_the_slower() -> None:
    network = Bench().network
    near, far = Node("a", 8.0), Node("b", 8.0, kind=Kind(1, 0.002, 1e6))
    further, message = Node("c", 8.0, kind=Kind(2, 0.003, 4e6)), (np.zeros(500, np.int32),)
    assert network.link_s(near, Node("d", 8.0), message) == network.link_s(far, far, message) == 0.0
    assert network.link_s(near, far, message) == pytest.approx(0.002 + 0.002)
    assert network.link_s(near, far, message) == pytest.approx(0.002 + 0.004), "behind the first"
    assert network.link_s(far, near, message) == pytest.approx(0.002 + 0.002), "the other way is free"
    assert network.link_s(far, further, message) == pytest.approx(0.005 + 0.004)
    assert network.link_s(Node("e", 8.0, kind=Kind(3)), Node("f", 8.0, kind=Kind(4)), message) == 0.0


def test_calls_and_objects_cross_links_both_ways() -> None:
    class Echo:
        def take(self, value: Any) -> Any:
            return value

    def seconds(kind: Kind) -> tuple[float, float]:
        bench = Bench()
        bench.network.latency_s = (0.0, 0.0)
        bench.node.kind = kind
        actor = bench.start(Echo())

        def body() -> tuple[float, float]:
            begin = bench.clock.now()
            bench.calls.ask(actor, "take", b"x" * 1000, deadline_s=60.0)
            asked, weights = bench.clock.now(), bench.network.put(actor, b"x" * 5000)
            bench.calls.transport.fetch([weights, weights], 60.0)
            return asked - begin, bench.clock.now() - asked

        return bench.run(body)

    assert seconds(Kind()) == (0.0, 0.0)
    assert seconds(Kind(1, 0.01, 1e6)) == pytest.approx((0.01 + 0.001 + 0.01 + 0.001, 0.01 + 0.010))


def test_the_bytes_of_messages_are_those_of_their_arrays_and_numbers() -> None:
    rows, tokens = np.zeros(3, np.int32), np.zeros(7, np.int32)
    states = States(rows, rows, rows, np.zeros((5, 100), np.int16))
    batch = CommitBatch("verifier-0", rows, rows, rows, rows, tokens, states=states)
    assert num_bytes(batch) == 10 + 4 * 12 + 28 + (3 * 12 + 1000) + 8
    opened = DraftOpen(1, 2, "ab", (1,) * 50, (), None, 8)  # type: ignore[arg-type]
    assert num_bytes([opened]) == 8 + 8 + 2 + 50 * 8 + 8 + 8
    bench = Bench()
    actor = bench.start(object())
    assert num_bytes({"verifier": actor}) == 8 + 8, "a handle is a number"
    bench.kernel.close()


def test_a_links_delay_is_that_of_the_drafts_alone(apart: Path) -> None:
    """Verifiers are beside the driver: their requests take as long as before."""
    far = ["machines.1.link.latency_ms=20"]
    assert one(apart, [*APART, *far], "coupled").digest == one(apart, APART, "coupled").digest
    near, late = one(apart, APART), one(apart, [*APART, *far])
    assert late.metrics.acceptance_length < near.metrics.acceptance_length and late.rollout_s > near.rollout_s
    assert one(apart, [*APART, *far]).to_json() == late.to_json()


def test_states_of_the_target_travel_to_heads_on_other_machines(apart: Path, tmp_path: Path) -> None:
    """24 KB a position: 16 requests of 32 + 40 tokens are 28 MB."""
    assert [world.state_size for world in build_worlds(load_scenario(apart, HEADS))] == [3 * 4096] * 2
    assert build_worlds(load_scenario(scenario_of(tmp_path, "{gpus: 3}"), HEADS))[0].state_size == 0
    path = scenario_of(tmp_path, VERIFIERS, DRAFTER)
    free, fast, slow = (one(path, [*HEADS, f"machines.1.link.gbit_s={rate}"]) for rate in ("null", "1000", "1"))
    assert fast.rollout_s < 1.1 * free.rollout_s < slow.rollout_s
    models = one(path, [*APART, "machines.1.link.gbit_s=1"])
    assert models.rollout_s < 1.1 * one(path, APART).rollout_s, "tokens alone are few bytes"


def test_weights_and_updates_count_every_kind(apart: Path) -> None:
    items = [*APART, "training.utilisation=0.5", "training.sync_gb_s=10"]
    scenario = load_scenario(apart, items)
    h100, both = (training_seconds(scenario, 10_000, gpus) for gpus in ({0: 2.0}, {0: 2.0, 1: 1.0}))
    assert both[0] == pytest.approx(h100[0] * (2 * 989.4) / (2 * 989.4 + 121)) and both[1] == h100[1]
    scenario = load_scenario(apart, [*items, "config.target.accelerator=null", "machines.1.link.gbit_s=8"])
    model = find_model("qwen2.5-7b")
    seconds = [training_seconds(scenario, 1, {0: 1.0, 1: 1.0}, kinds)[1] for kinds in ({0}, {1}, {0, 1})]
    assert seconds == pytest.approx([model.parameters * 2 / rate for rate in (10e9, 1e9, 1e9)]), "where verifiers are"
    far = [*items, "config.target.accelerator=null", "machines.1.link.gbit_s=8", "training.fixed_s=1"]
    assert one(apart, far).sync_s == pytest.approx(seconds[0]), "a drafter is there, and no verifier"


def test_nodes_without_gpus_take_no_part_in_updates(tmp_path: Path) -> None:
    """Wherever they are in the list; measured nodes with GPUs have no known peak."""
    cores = "{nodes: 1, gpus: 0, cpus: 8, accelerator: smollm2_two_cores}"
    drafter = "config.drafters=[{method: ngram, hosted: false, cores: 8}]"
    items = ["training.utilisation=0.5", "config.target.cores=8", "skills=[{method: ngram}]", drafter]
    before, after = (one(scenario_of(tmp_path, *nodes), items) for nodes in ([cores, VERIFIERS], [VERIFIERS, cores]))
    assert before.update_s == after.update_s > 0 and before.draft_devices == 0
    measured = scenario_of(tmp_path, VERIFIERS, DRAFTER.replace("l4", "smollm2_two_cores"))
    with refused("training.utilisation", "smollm2_two_cores has no peak"):
        one(measured, [*APART, "training.utilisation=0.5", "skills.0.forward_ms=1"])


# ---- scenarios ----


def test_nodes_have_the_labels_and_links_of_their_kind(apart: Path) -> None:
    items = [*APART, "machines.0.nodes=2", "machines.1.link={latency_ms: 3, gbit_s: 10}", "hardware=h200"]
    nodes = make_nodes(load_scenario(apart, [*items, "machines.0.accelerator=null", "config.target.accelerator=H200"]))
    assert [(node.name, node.gpus, *node.labels.values()) for node in nodes] == [
        ("node-0", 2.0, "H200"),
        ("node-1", 2.0, "H200"),
        ("node-2", 1.0, "L4"),
    ]
    assert [node.kind for node in nodes] == [Kind(0), Kind(0), Kind(1, 0.003, 1.25e9)]
    assert ScenarioConfig().machines[0].link.gbit_s is None and nodes[0].kind.bytes_per_s == math.inf


def test_the_former_mapping_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, SMALL.replace("[{nodes: 1, gpus: 4, cpus: 32}]", "{nodes: 1, gpus: 4, cpus: 32}"))
    with refused("machines", "machines: [{nodes: ...}]"):
        load_scenario(path)
    with refused("machines.gpus", "write machines.0.gpus"):
        load_scenario(write_scenario(tmp_path), ["machines.gpus=2"])


@pytest.mark.parametrize(
    ("items", "key", "words"),
    [
        (["machines=[]"], "machines", ("there are none", "machines=[{nodes: 1}]")),
        (["machines.1.accelerator=xyz"], "machines.1.accelerator", ("hardware xyz", "use one of a100")),
        (["hardware=h10", "machines.0.accelerator=null"], "hardware", ("hardware h10", "Did you mean h100?")),
        (
            [*APART, "config.drafters.0.accelerator=H100"],
            "config.target.accelerator",
            ("3 GPU(s) of H100 in all, and there are 2",),
        ),
        (
            [*APART, "config.drafters.0.accelerator='!L4'"],
            "config.target.accelerator",
            ("3 GPU(s) of H100 and !L4 in all, and there are 2",),
        ),
        (["machines.0.gpus=1"], "machines", ("1 x 1 and 1 x 1 gpus are there", "needs 3")),
        (
            [*APART, "config.target.replicas=3", "machines.1.gpus=2"],
            "config.target",
            ("3 actors", "1 GPUs (H100)"),
        ),
        (["config.target.accelerator=A100"], "config.target", ("1 GPUs (A100)", "H100, L4")),
        (["config.drafters.0.accelerator=L40S"], "config.drafters.0", ("1 GPUs (L40S)", "H100, L4")),
        ([*PAIR, "machines.0.gpus=1", "machines.0.nodes=6"], "config.target", ("2 GPUs",)),
        (["machines.1.link.gbit_s=0"], "machines.1.link.gbit_s", ()),
        (["machines.1.price=-1"], "machines.1.price", ()),
    ],
)
def test_what_does_not_fit_is_refused(apart: Path, items: list[str], key: str, words: tuple[str, ...]) -> None:
    with refused(key, *words):
        load_scenario(apart, ["config.mode=decoupled", *items])


def test_a_kind_without_room_for_the_longest_request_is_refused(apart: Path) -> None:
    """Unless no verifier can be there."""
    long = ["config.mode=plain", "workload.max_tokens=40000", "config.target.model=qwen3-8b", "config.target.gpus=1"]
    with refused("workload.max_tokens", "40,032 tokens"):
        build_worlds(load_scenario(apart, long))
    build_worlds(load_scenario(apart, [*long, "config.target.accelerator=H100"]))
