"""The comparison of modes: equal cores for all, exact comparison of tokens, ratios to the best plain variant."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specactor_ray.bench.rollout_modes import (
    Bench,
    Place,
    Workload,
    all_identical,
    best_length,
    differences,
    figures_of,
    merged,
    plan_workloads,
    run_bench,
    with_ratios,
)
from specactor_ray.bench.variants import MODES, Variant, auto_of, plan_variants, side_by_side
from specactor_ray.cli.report import (
    alarm_lines,
    difference_lines,
    draft_table,
    ladder_table,
    speed_table,
    status_table,
    time_table,
)
from specactor_ray.config.load import from_mapping, load_config
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.core.errors import InputError, UserError
from specactor_ray.core.metrics import drafter_health
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.startup.machine import Machine, devices_of
from specactor_ray.transport.messages import RequestStats
from tests.fakes.trajectories import trajectory
from tests.refused import refused

HEALTH = {
    "method": "eagle",
    "version": 5,
    "checksum": "00c0ffee",
    "tried": 400,
    "right": 0,
    "missed": 0,
    "alarm": False,
}
ALL = ["plain", "coupled", "decoupled"]


def config(replicas: int = 1, cores: int = 1, drafters: int = 1, **target: Any) -> Config:
    return from_mapping(
        {
            "mode": "decoupled",
            "target": {"replicas": replicas, "cores": cores, **target},
            "drafters": [{"method": "ngram", "replicas": drafters, "hosted": False}],
        }
    )


class TestVariants:
    def test_two_cores_batch_by_batch(self) -> None:
        """A batch of one is not shared out among verifiers."""
        labels = ["plain 1x2", "plain 2x1", "plain 1x1", "coupled 1x2", "decoupled 1x1 + 1"]
        one, four = (plan_variants(config(), [*reversed(ALL)], [batch])[0] for batch in (1, 4))
        assert [variant.label for variant in four] == labels and [variant.label for variant in one] == [
            label for label in labels if label != "plain 2x1"
        ]

    @settings(max_examples=25)
    @given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(1, 16))
    def test_every_mode_has_the_same_cores_and_room_for_as_many_requests(
        self, replicas: int, cores: int, drafters: int, batch: int
    ) -> None:
        base = config(replicas, cores, drafters)
        base.run.name = "mine"
        if drafters % replicas:
            with refused("drafters"):
                plan_variants(base, ALL, [batch])
            return
        variants, _ = plan_variants(base, ALL, [batch])
        total = replicas * cores + drafters
        assert variants[-1].total_cores == total and variants[0].total_cores == total
        assert all(variant.total_cores <= total for variant in variants)
        assert {variant.total_cores for variant in variants if variant.config.mode is not ModeName.plain} == {total}
        rooms = [variant.config.target.replicas * variant.config.target.max_batch for variant in variants]
        assert set(rooms) == {batch * replicas}
        assert all(one.config.target.record_margins and one.config.run.name is None for one in variants)
        assert base.run.name == "mine" and not base.target.record_margins, "the configuration was changed"

    def test_each_method_alone_and_all_of_them_together(self) -> None:
        base = config()
        methods = [("ngram", 0.5, False), ("suffix", 0.25, False), ("tests.fakes.own_proposers:Lookup", 1.0, True)]
        base.drafters = [DrafterConfig(method, cores=cores, hosted=hosted) for method, cores, hosted in methods]
        variants, _ = plan_variants(base, [mode for mode in MODES if mode != "auto"], [2])
        names = [one[0] for one in methods]  # shares of a core count as the core that they take
        labels = [*(f"coupled {name} 1x2" for name in names), *(f"decoupled {name} 1x1 + 1" for name in names[:2])]
        assert [variant.label for variant in variants][3:] == [*labels, "fon 1x1 + 1", "fon coupled 1x2"]
        of = [[one.method for one in variant.config.drafters] for variant in variants[3:]]
        assert of == [*([name] for name in (*names, *names[:2])), names, names]
        assert all([(d.cores, d.replicas) for d in v.config.drafters] == [(1.0, 1)] for v in variants[6:8])
        assert {variant.total_cores for variant in variants[3:]} == {2}

    @pytest.mark.parametrize(
        ("target", "drafter", "more"),
        [("H100", "L4", 0), ("H100", "in(H100, L4)", 0), (None, "L4", 1), ("H100", "in(H100)", 1), ("H100", None, 1)],
    )
    def test_more_verifiers_are_on_gpus_that_the_target_may_use(
        self, target: str | None, drafter: str | None, more: int
    ) -> None:
        base = config(cores=2, gpus=1, accelerator=target)
        base.drafters = [DrafterConfig("draft_model", model="m", gpus=1, accelerator=drafter)]
        variants, left_out = plan_variants(base, ALL, [4])
        assert sum(one.config.target.replicas > 1 for one in variants) == 2 * more
        assert ["plain with 1 more GPU(s)" in "".join(left_out)] == [not more]

    @pytest.mark.parametrize(
        ("modes", "batches", "problem"),
        [
            (["decoupled"], [4], "--modes must contain plain"),
            ([*ALL, "fon"], [4], "fewer than two"),
            (ALL, [64], r"target\.max_step_tokens"),
        ],
    )
    def test_refusals(self, modes: list[str], batches: list[int], problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            plan_variants(config(max_step_tokens=32), modes, batches)
        base = config()
        base.drafters[0].gpus = 1
        with refused("drafters.0.gpus"):
            plan_variants(base, ALL, [4])


def output(*tokens: int, reason: str = "length", error: str = "") -> Trajectory:
    margins = tuple(token / 10 for token in tokens)
    return Trajectory("r", 0, 0, (), tokens, (), "", reason, SamplingParams(), error=error, margins=margins)


class TestAuto:
    def test_all_cores_of_a_rollout_and_nothing_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
        given = load_config(None, ["target.cores=2"])
        variants, notes = plan_variants(side_by_side(given)[0], MODES[:-1], [16], auto_of(given))
        assert [one.label for one in variants] == ["plain 1x3", "plain 1x1", "auto 1x3"]
        assert variants[-1].config.mode is ModeName.coupled and devices_of(auto_of(given)).cores == 3
        assert notes == [
            "coupled 1x3, batch 16: left out, it is the same as auto 1x3",
            "decoupled: left out, verifiers host suffix, so it is coupled",
        ]

    def test_auto_may_have_draft_actors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        variants, notes = plan_variants(side_by_side(config())[0], MODES[:-1], [3], auto_of(config()))
        assert [one.label for one in variants] == ["plain 1x2", "plain 1x1", "auto 1x1 + 1", "coupled 1x2"]
        assert [note.split(":")[0] for note in notes] == ["plain 2x1, batch 3", "decoupled 1x1 + 1, batch 3"]
        assert "2 verifiers cannot share 3 requests evenly" in notes[0] and "same as auto" in notes[1]


class TestOnGpus:
    """The same command with one GPU and with two."""

    TWO_RANKS = ("target.backend=vllm", "target.tensor_parallel=2", "target.gpus=2")
    MODEL = "drafters=[{method: draft_model, model: m}]"

    def planned(self, gpus: int, monkeypatch: pytest.MonkeyPatch, batch: int = 4, *more: str) -> tuple[Any, list[str]]:
        machine = Machine(16, gpus, (80 << 30,) * gpus, bfloat16=False)
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
        settled, notes = side_by_side(load_config(None, ["target.gpus=1", self.MODEL, *more]))
        variants, left_out = plan_variants(settled, ALL, [batch])
        return variants, [*notes, *left_out]

    def test_one_gpu_is_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variants, notes = self.planned(1, monkeypatch)
        assert [one.label for one in variants] == ["plain 1x6 on 1 GPU(s)", "coupled 1x6 on 1 GPU(s)"]
        assert [devices_of(one.config).gpus for one in variants] == [1, 1]
        (note,) = notes
        assert note.startswith("decoupled: left out, there is no GPU for draft_model")

    def test_of_two_gpus_the_drafter_gets_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variants, notes = self.planned(2, monkeypatch)
        labels = ["plain 1x6 on 1", "plain 2x5 on 2", "coupled 1x6 on 1", "coupled 2x5 on 2", "decoupled 1x5 + 1 on 2"]
        assert [one.label for one in variants] == [f"{label} GPU(s)" for label in labels]
        assert [one.config.target.max_batch for one in variants] == [4, 2, 4, 2, 4]
        drafter = variants[-1].config.drafters[0]
        assert (drafter.gpus, drafter.dtype) == (1, "bfloat16") and notes[0].startswith("drafters.0.gpus=1")
        _, notes = self.planned(2, monkeypatch, 1)
        assert [note.partition(" 2x")[0] for note in notes[1:]] == ["plain", "coupled"]

    def test_a_layout_that_is_written_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variants, _ = self.planned(2, monkeypatch, 4, "mode=decoupled", "drafters.0.hosted=false")
        assert variants[-1].config.mode is ModeName.decoupled and variants[-1].config.drafters[0].gpus == 0
        variants, _ = self.planned(4, monkeypatch, 4, *self.TWO_RANKS, "drafters.0.gpus=1", "mode=decoupled")
        assert [devices_of(one.config).gpus for one in variants] == [2, 2, 3]


class TestComparison:
    def test_the_first_differing_position_with_both_margins(self) -> None:
        same = {(2, 0): output(1, 2), (0, 0): output(reason="error", error="the prompt is longer than the context")}
        (found,) = differences({(3, 1): output(5, 6, 7, 8), **same}, {(3, 1): output(5, 6, 9, 1), **same})
        place = {"prompt_index": 3, "sample_index": 1, "position": 2, "note": ""}
        assert found == place | {"token": 9, "reference_token": 7, "margin": 0.7, "own_margin": 0.9}

    @pytest.mark.parametrize(
        ("other", "note"),
        [
            ({(0, 0): output(5, 6)}, "2 tokens (length) in place of 3"),
            ({(0, 0): output(5, 6, 7, reason="stop")}, "3 tokens (stop) in place of 3 tokens (length)"),
            ({(0, 0): output(reason="error", error="too long")}, "0 tokens (error) in place of 3 tokens (length) too"),
            ({}, "this variant has no such request"),
        ],
        ids=["shorter", "ended otherwise", "failed", "missing"],
    )
    def test_other_differences_have_a_note(self, other: dict[Place, Trajectory], note: str) -> None:
        (found,) = differences({(0, 0): output(5, 6, 7)}, other)
        assert found["position"] is None and found["note"].startswith(note)
        if not other:
            (found,) = differences({}, {(0, 0): output(5, 6, 7)})
            assert found["note"] == "the reference has no such request"


def measured(
    label: str, batch: int, tokens_per_s: float, differing: int = 0, workload: str = "chat T=1"
) -> dict[str, Any]:
    found = [
        {**differences({(n, 0): output(1, 2)}, {(n, 0): output(1, 3)})[0], "prompt_index": n} for n in range(differing)
    ]
    metrics = RolloutMetrics(steps=10, row_steps=40, committed_tokens=60, drafted_tokens=50, accepted_tokens=20)
    metrics.count_positions([30, 20], [20, 5])
    variant = Variant(label, batch, config())
    return {
        **variant.facts(),
        "mode": label.partition(" ")[0],
        "workload": workload,
        **figures_of(16, 32, 1.0, metrics),
        "tokens_per_s": tokens_per_s,
        "rounds": [tokens_per_s] * 3,
        "round_lengths": None,
        "work": 0,
        "best_length": None,
        "failures": {},
        "differences": found,
    }


class TestReport:
    def test_the_fastest_plain_variant_of_the_batch_is_the_baseline(self) -> None:
        results = with_ratios(
            [
                measured("plain 1x2", 1, 20.0),
                measured("plain 1x1", 1, 10.0),
                measured("decoupled", 1, 30.0),
                measured("plain 1x2", 4, 40.0),
                measured("plain 2x1", 4, 50.0),
                measured("decoupled", 4, 45.0),
                measured("plain 1x2", 4, 10.0, workload="chat T=0"),
                measured("decoupled", 4, 20.0, workload="chat T=0"),
            ]
        )
        assert [result["ratio"] for result in results] == [1.0, 0.5, 1.5, 0.8, 1.0, 0.9, 1.0, 1.5], (
            "the last one is limited to the acceptance length"
        )
        assert [result["baseline"] for result in results] == [True, False, False, False, True, False, True, False]

    def test_rounds_add_up_and_give_a_verdict_with_an_interval(self) -> None:
        turns = [
            {**measured(label, 4, speed), "tokens": 32, "seconds": 32 / speed, "differences": wrong, "rounds": None}
            for plain, drafted in ((40.0, 52.0), (20.0, 25.0), (60.0, 76.0))
            for label, speed, wrong in (("plain 1x2", plain, []), ("auto 1x2", drafted, [{"prompt_index": 1}]))
        ]
        plain, auto = with_ratios(merged(turns))
        assert (plain["tokens"], plain["requests"], plain["identical"]) == (96, 48, 48)
        assert plain["tokens_per_s"] == pytest.approx(96 / sum(32 / speed for speed in (40, 20, 60)), rel=1e-3)
        assert plain["metrics"]["steps"] == 30 and plain["rounds"] == [40.0, 20.0, 60.0]
        assert auto["identical"] == 45, "a difference in each round"
        low, high = auto["interval"]
        assert low < auto["ratio"] < high and plain["interval"] is None
        assert "drafts pay: 1.27 times as fast as plain decoding (95%: " in auto["verdict"] and plain["verdict"] == ""

    def test_rounds_of_different_prompts_are_compared_by_their_acceptance_lengths(self) -> None:
        turns = []
        for work, tokens in enumerate((60, 120)):
            metrics = RolloutMetrics(steps=40, row_steps=40, committed_tokens=tokens)
            for label, speed in (("plain", 10.0), ("auto", 10.0 * tokens / 40)):
                figures = figures_of(1, tokens, tokens / speed, metrics)
                turns.append({**measured(label, 1, speed), **figures, "work": work})
        _, auto = with_ratios(merged(turns))
        assert auto["round_lengths"] == [1.5, 3.0] and auto["interval"] == [auto["ratio"], auto["ratio"]] == [2.25] * 2
        _, auto = with_ratios(merged([{**one, "work": 0} for one in turns]))
        assert auto["round_lengths"] is None and auto["interval"][0] < 1.0

    def test_the_best_request_limits_the_ratio_of_a_batch(self) -> None:
        outputs = [
            trajectory(range(12), stats=RequestStats(steps=3)),
            trajectory(range(10), stats=RequestStats(steps=10)),
            trajectory(()),
        ]
        assert best_length(outputs, Variant("auto", 4, config())) == 4.0, "it may be the one that runs longest"
        assert best_length([], Variant("auto", 4, config())) == 1.0
        assert best_length(outputs, Variant("auto", 1, config())) is None
        turns = [{**measured("plain", 4, 20.0), "best_length": 1.0}]
        turns += [{**measured("auto", 4, 90.0), "best_length": best} for best in (4.0, 3.5)]
        (_, auto), (_, alone) = (
            with_ratios(merged([{**one, "best_length": best(one)} for one in turns]))
            for best in (lambda one: one["best_length"], lambda one: None)
        )
        assert (auto["ratio"], alone["ratio"]) == (4.0, 1.5), "one at a time it is the acceptance length"

    def test_the_tables_say_it_all(self) -> None:
        results = with_ratios([measured("plain 1x2", 4, 40.0), measured("decoupled 1x1 + 1", 4, 60.0, differing=2)])
        assert all_identical({"results": results[:1]}) and not all_identical({"results": results})
        text = rendered(speed_table(results)) + rendered(draft_table(results)) + rendered(time_table(results))
        for expected in ("plain 1x2", "1.00*", "1.50", "14/16", "16/16", "40.0%", "67% 25%", "protocol"):
            assert expected in text
        plain = measured("plain 1x2", 4, 1.0)
        plain["metrics"] = RolloutMetrics(steps=1).to_dict()
        assert draft_table(with_ratios([plain])) is None
        lines = difference_lines(results)
        assert lines[1].strip() == (
            "decoupled 1x1 + 1, batch 4, chat T=1: prompt 1, sample 0, position 1: token 3 in place of 2, "
            "margin of the reference 0.2"
        )
        lines = difference_lines(with_ratios([measured("plain 1x2", 4, 1.0, differing=14)]))
        assert len(lines) == 11 and "4 more" in lines[-1]


class FakeRollout:
    """Answers each prompt with its length; with drafts one output of round 3 is another."""

    rounds, committed_tokens = 0, 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def __enter__(self) -> FakeRollout:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, *_: Any, **__: Any) -> None:
        pass

    forget_history = reset_metrics = generate

    def metrics(self) -> RolloutMetrics:
        return RolloutMetrics()

    def status(self) -> list[dict[str, Any]]:
        return []

    def stream(self, prompts: Sequence[str], *_: Any) -> Iterator[Trajectory]:
        self.rounds += 1
        for place, prompt in enumerate(prompts):
            wrong = self.rounds == 3 and place == 0 and self.config.mode is not ModeName.plain
            yield replace(output(len(prompt) + wrong), prompt_index=place)


def test_variants_take_turns_in_rounds_that_are_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specactor_ray.rollout.rollout.Rollout", FakeRollout)
    variants = plan_variants(config(), ["plain", "coupled"], [1])[0][::2]
    plain, coupled = (one.label for one in variants)
    bench = Bench(Console(file=io.StringIO()))
    one, other = (Workload("edits T=0", prompts, SamplingParams(), n=1) for prompts in (("a", "bc"), ("def",)))

    def rounds() -> Iterator[Workload]:
        for number, workload in enumerate((one, other, one, other)):
            assert len(bench.measured) == 2 * number, "the round before is over"
            yield workload
            assert {len(found) for found in bench.outputs.values()} == {len(workload.prompts)}

    bench.measure(variants, rounds(), "")
    assert [row["variant"] for row in bench.measured] == [plain, coupled, coupled, plain] * 2
    results = bench.results()
    assert [(row["requests"], row["identical"], len(row["rounds"])) for row in results] == [(6, 6, 4), (6, 5, 4)]


def rendered(table: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


INSIDE = "eagle-0#1a2b in verifier-0#1a2b"
STATUS: list[dict[str, Any]] = [
    {
        "id": "verifier-0#1a2b",
        "kind": "verifier",
        "phase": "ready",
        "cores": (0, 1),
        "gpus": ("2", "3"),
        "accelerator": "H100",
        "counters": {
            "running": 3,
            "row_steps": 40,
            "committed_tokens": 60,
            "hosted": {INSIDE: {"health": {**HEALTH, "missed": 240, "alarm": True}}},
        },
    },
    {"id": "ngram-0#3c4d", "kind": "drafter", "phase": "pending", "note": "[no room]", "counters": {}},
    {
        "id": "eagle-0#7a8b",
        "kind": "drafter",
        "phase": "ready",
        "gpus": ("7",),
        "accelerator": "",
        "counters": {"open_requests": 2, "tails": 9, "health": {**HEALTH, "right": 300}},
    },
]


def test_status_has_a_row_for_each_actor() -> None:
    text = rendered(status_table(STATUS), 250)
    for expected in (
        "verifier-0#1a2b",
        "cores 0,1 H100 2,3",
        "GPU 7",
        "3 requests run or wait, 60 tokens, acceptance length 1.50",
        "[no room]",
        "0 open",
        "2 open, 9 tails",
        "eagle 75.0% of 400, weights 5 (00c0ffee)",
        "eagle NONE RIGHT, last 240, weights 5 (00c0ffee)",
    ):
        assert expected in text


def test_of_many_actors_without_room_a_few_are_shown() -> None:
    text = rendered(status_table([{"id": f"eagle-{number}", "phase": "pending"} for number in range(500)]), 250)
    assert "eagle-2" in text and "eagle-3" not in text and "497 more are pending" in text


def test_alarms_of_drafters_in_actors_of_their_own_and_inside_verifiers() -> None:
    inside, own = drafter_health(STATUS)
    assert (inside["id"], own["id"], own["right"]) == (INSIDE, "eagle-0#7a8b", 300)
    (line,) = alarm_lines([inside, own])
    assert "verifier-0#1a2b: eagle NONE RIGHT" in line
    sick = {"counters": {"malformed": {own["id"]: 3}}}
    failed = {"id": own["id"], "counters": {**STATUS[2]["counters"], "failures": 1200}}
    lines = alarm_lines(drafter_health([sick, failed]))
    assert ["1,200 drafts failed" in lines[0], "3 malformed messages" in lines[1]] == [True, True]


def test_the_ladder_of_the_verifier_that_has_seen_most() -> None:
    def row(drafted: float, acceptance: float) -> dict[str, Any]:
        figures = {"drafted": drafted, "acceptance": acceptance, "token_s": 0.002, "tgs": 31.5}
        return {"counters": {"ladder": [{"method": "eagle", "positions": "0-63", **figures}]}}

    text = rendered(ladder_table([row(10.0, 0.25), row(400.0, 0.625), {"counters": None}]))
    assert all(expected in text for expected in ("eagle", "0-63", "62.5%", "2.00", "31.5")) and "25.0%" not in text
    assert ladder_table(STATUS) is None


@pytest.mark.parametrize(
    ("drafters", "problem"),
    [
        (2, "^drafters.0.cores: "),
        (1, r"bench\.json"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    drafters: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    report = tmp_path / "bench.json"
    if "bench" in problem:
        report.write_text("{}")
    before = list(tmp_path.iterdir())
    with pytest.raises(UserError, match=problem):
        run_bench(config(drafters=drafters), ALL, [4], [], report, Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == before


def test_every_file_at_every_temperature_is_a_workload(tmp_path: Path) -> None:
    for name in ("chat", "code"):
        (tmp_path / f"{name}.txt").write_text("one\ntwo\n")
    paths = [tmp_path / "chat.txt", tmp_path / "code.txt"]
    four = config()
    four.data.n = 4
    workloads = plan_workloads(four, paths, [0.0, 1.0])
    assert [w.name for w in workloads] == ["chat T=0", "chat T=1", "code T=0", "code T=1"]
    assert [(w.sampling.temperature, w.n) for w in workloads] == [(0.0, 1), (1.0, 4)] * 2
    assert all(w.prompts == ("one", "two") for w in workloads)
    with pytest.raises(InputError, match="same name"):
        plan_workloads(config(), [paths[0], paths[0]], [])
    with refused("data.path"):
        plan_workloads(config(), [], [])
