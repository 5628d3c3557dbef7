"""What a plan makes of a configuration by the costs of an earlier run, and which costs it refuses. Nothing runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specactor_ray.cli import main as cli
from specactor_ray.cli.plan import prediction_table
from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import write_json
from specactor_ray.plan.costs import load_costs
from specactor_ray.plan.search import ALL_MODES
from specactor_ray.startup import machine as machines
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.mode import apply_plan, make_plan, plan_config, settle

TARGET = "big"
HERE = Machine(2)
STANDING = {"method": "ngram", "positions": "0-63", "drafted": 100.0, "acceptance": 0.85, "token_s": 0.0, "tgs": 50.0}


@pytest.fixture
def data() -> dict[str, Any]:
    """The summary of a run on one and two cores, with costs by formula."""
    points = {str(g): [[n, (0.02 + 0.0004 * n) / g**0.6] for n in (1, 8, 40)] for g in (1, 2)}
    costs = {
        "target": {"model": TARGET, "dtype": "float32", "backend": "hf", "gpus": 0, "tensor_parallel": 1},
        "verify": points,
        "drafters": {
            "ngram": {"model": None, "seconds": {}},
            "draft_model": {"model": "small", "seconds": {"1": [[1, 0.002], [8, 0.003]]}},
        },
        "supply": 1.0,
        "ladder": [{**STANDING}, {**STANDING, "method": "draft_model", "acceptance": 0.7}],
    }
    return {"run": "evening", "costs": costs}


@pytest.fixture
def file(tmp_path: Path, data: dict[str, Any]) -> Path:
    write_json(tmp_path / "summary.json", data)
    return tmp_path / "summary.json"


def auto(file: Path, *overrides: str) -> Config:
    written = {
        "profile": str(file),
        "cluster": {"num_cpus": 2},
        "target": {"model": TARGET, "dtype": "float32", "max_batch": 8},
        "drafters": [{"method": "ngram"}],
    }
    return from_mapping(written, overrides)


def on(file: Path) -> list[str]:
    """Overrides: a summary, its target and drafter on two cores, whatever this machine has."""
    items = [f"profile={file}", f"target.model={TARGET}", "target.dtype=float32", "drafters=[{method: ngram}]"]
    return [*items, "cluster.num_cpus=2"]


def decoupled(config: Config) -> Config:
    return settle(config, HERE, mode=ModeName.decoupled)[0]


def devices_of(config: Config) -> int:
    """Cores."""
    return machines.devices_of(config).cores


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        (
            None,
            ["target.model=other"],
            "target.model=big, and here it is other. Fix: name the summary",
        ),
        (None, ["target.dtype=bfloat16"], "target.dtype=float32, and here it is bfloat16"),
        (None, ["target.backend=vllm"], "target.backend=hf, and here it is vllm"),
        (
            lambda costs: costs.update(ladder=[]),
            [],
            "no draft ladder.* Fix: name the summary of a longer",
        ),
        (lambda costs: costs.pop("verify"), [], "is not sound: KeyError: 'verify'"),
    ],
)
def test_costs_that_cannot_be_used_end_a_start(
    file: Path, data: dict[str, Any], change: Callable[[Any], Any] | None, overrides: list[str], words: str
) -> None:
    if change is not None:
        change(data["costs"])
        file.write_text(json.dumps(data))
    config = auto(file, *overrides)
    for use in (settle, plan_config):
        with pytest.raises(ConfigError, match=f"profile: .*{words}"):
            use(config, HERE)


class TestResolve:
    def test_the_best_candidate_becomes_the_configuration(self, file: Path) -> None:
        config = auto(file, "target.dtype=auto")
        data = json.loads(file.read_text())
        data["costs"]["target"]["dtype"] = decoupled(config).target.dtype
        file.write_text(json.dumps(data))
        before = copy.deepcopy(config)
        resolved, lines = settle(config, HERE)
        assert config == before
        assert settle(resolved, HERE) == (resolved, [])
        assert resolved.mode is not ModeName.plain and resolved.speculation.window
        assert devices_of(resolved) <= 2 and resolved.target.replicas * resolved.target.max_batch >= 8
        plan, dtype = lines[-2:]
        assert plan.startswith(f"plan: {resolved.mode.value} ngram") and ", plain " in plan
        assert dtype == f"target.dtype: {resolved.target.dtype}"

    def test_drafts_that_are_never_right_give_plain_decoding(self, file: Path, data: dict[str, Any]) -> None:
        data["costs"]["ladder"][0]["acceptance"] = 0.0
        file.write_text(json.dumps(data))
        resolved, lines = settle(auto(file), HERE)
        assert resolved.mode is ModeName.plain and "plain" in lines[-1]

    def test_only_the_asked_modes(self, file: Path) -> None:
        resolved, _ = plan_config(auto(file), HERE, [ModeName.decoupled])
        assert resolved.mode is ModeName.decoupled
        drafter = resolved.drafters[0]
        assert (resolved.target.cores, drafter.cores, drafter.replicas, drafter.hosted) == (1, 1, 1, False)

    def test_on_a_foreign_cluster_it_plans_for_what_the_configuration_takes(
        self, file: Path, tiny_model_dir: Path
    ) -> None:
        overrides = ["cluster.address=auto", "cluster.num_cpus=null", "target.replicas=3"]
        config = auto(file, *overrides, "drafters.0.replicas=3", "drafters.0.hosted=false")
        assert devices_of(decoupled(config)) == 6
        resolved, _ = plan_config(config, HERE, [ModeName.decoupled])
        assert devices_of(resolved) == 6

    @pytest.mark.parametrize(
        ("drafter", "reason"),
        [
            ("{method: suffix}", "suffix is left out: that run did not try it"),
            ("{method: draft_model, model: other}", "draft_model is left out: that run tried it with model small"),
            ("{method: eagle, model: head}", "eagle is left out: that run has no time of its drafts"),
        ],
    )
    def test_a_method_that_was_not_measured_is_left_out(
        self, file: Path, data: dict[str, Any], drafter: str, reason: str
    ) -> None:
        data["costs"]["drafters"]["eagle"] = {"model": "head", "seconds": {}}
        data["costs"]["ladder"].append({**STANDING, "method": "eagle"})
        file.write_text(json.dumps(data))
        resolved, plan = plan_config(auto(file, f"drafters=[{drafter}]"), HERE)
        assert resolved.mode is ModeName.plain and plan.notes[0] == reason

    def test_lookups_find_no_more_than_in_that_run(self, file: Path, data: dict[str, Any]) -> None:
        often = make_plan(decoupled(auto(file)), load_costs(file), HERE, [ModeName.coupled]).chosen
        data["costs"]["supply"] = 0.1
        file.write_text(json.dumps(data))
        rarely = make_plan(decoupled(auto(file)), load_costs(file), HERE, [ModeName.coupled]).chosen
        assert rarely.tokens_per_s < 0.6 * often.tokens_per_s

    def test_what_it_makes_is_valid_and_fits(self, file: Path) -> None:
        costs = load_costs(file)
        base = from_mapping(
            {"mode": "decoupled", "target": {"kv_cache_gb": 1}, "drafters": [{"method": "ngram", "window": 3}]}
        )

        @settings(max_examples=40)
        @given(st.integers(1, 6), st.integers(1, 40), st.floats(0.0, 1.0), st.sampled_from([None, *ALL_MODES]))
        def check(devices: int, batch: int, p: float, mode: ModeName | None) -> None:
            config = copy.deepcopy(base)
            config.target.max_batch, config.cluster.num_cpus = batch, devices
            modes = ALL_MODES if mode is None else [mode]
            assume(mode is not ModeName.decoupled or devices > 1)
            plan = make_plan(config, replace(costs, acceptance={"ngram": p}), HERE, modes)
            resolved = copy.deepcopy(config)
            apply_plan(resolved, plan)
            validate(resolved)
            assert devices_of(resolved) <= devices
            assert resolved.mode is plan.chosen.mode and resolved.target.max_batch == plan.chosen.batch
            total = resolved.target.kv_cache_gb * resolved.target.replicas
            assert total == pytest.approx(config.target.kv_cache_gb * config.target.replicas)
            if resolved.mode is not ModeName.plain:
                assert resolved.drafters[0].window is None and resolved.speculation.window == plan.chosen.window
                assert resolved.drafters[0].replicas == (plan.chosen.drafters or plan.chosen.verifiers)

        check()


class TestKinds:
    """Verifiers of one GPU each were measured on H100, draft actors on L4, in a cluster that runs already."""

    @pytest.fixture
    def file(self, tmp_path: Path, data: dict[str, Any]) -> Path:
        costs = data["costs"]
        costs["target"].update(gpus=1, dtype="bfloat16")
        costs["verify"] = {"1 H100": costs["verify"]["1"]}
        costs["drafters"]["draft_model"]["seconds"] = {"1 L4": [[1, 0.002], [8, 0.003]]}
        write_json(tmp_path / "summary.json", data)
        return tmp_path / "summary.json"

    def on(self, file: Path, *overrides: str, replicas: int = 2) -> Config:
        drafter = {"method": "draft_model", "model": "small", "gpus": 1, "replicas": replicas}
        target = {"model": TARGET, "gpus": 1, "dtype": "bfloat16", "max_batch": 8, "replicas": 4}
        written = {"profile": str(file), "cluster": {"address": "auto"}, "target": target, "drafters": [drafter]}
        return from_mapping(written, overrides)

    def test_the_plan_holds_for_the_kinds_that_were_measured(self, file: Path) -> None:
        config, plan = plan_config(self.on(file), HERE)
        assert (config.target.accelerator, config.drafters[0].accelerator) == ("H100", "L4")
        assert "target.accelerator=H100, drafters.0.accelerator=L4" in plan.notes[0]
        title = prediction_table(plan).title
        assert title == "32 requests on 4 device(s); costs: target on H100, draft_model on L4"
        config, _ = plan_config(self.on(file, "target.accelerator='in(H100, H200), market=spot'"), HERE)
        assert config.target.accelerator == "H100, market=spot"
        config, plan = plan_config(self.on(file, "target.accelerator='in(H100)'"), HERE)
        assert config.target.accelerator == "in(H100)" and "target.accelerator" not in plan.notes[0]

    def test_draft_actors_of_another_kind_take_no_gpu_of_a_verifier(self, file: Path) -> None:
        for replicas in (1, 2, 4):
            config, plan = plan_config(self.on(file, replicas=replicas), HERE, [ModeName.decoupled])
            assert plan.devices == config.target.replicas == 4, "all H100 verify"
            assert 1 <= config.drafters[0].replicas <= replicas
        assert not {row.mode for row in plan.predictions} - {ModeName.decoupled}
        with pytest.raises(InputError, match="decoupled as measured does not fit"):
            plan_config(self.on(file, replicas=0), HERE, [ModeName.decoupled])

    def test_the_trainer_has_gpus_of_its_kind(self, file: Path) -> None:
        own = plan_config(self.on(file, "trainer.gpus=1", "trainer.accelerator=A100"), HERE)[1]
        shared = plan_config(self.on(file, "trainer.gpus=1", "trainer.accelerator=H100"), HERE)[1]
        assert own.devices == shared.devices == 4, "its GPU is beside those of the layout as written"
        machine = Machine(64, 5, kind="H100")
        local = ["cluster.address=local", "drafters=[{method: ngram}]"]
        assert plan_config(self.on(file, *local), machine)[1].devices == 5
        assert plan_config(self.on(file, *local, "trainer.gpus=1"), machine)[1].devices == 4

    @pytest.mark.parametrize(
        ("overrides", "kind", "words"),
        [
            (["target.accelerator=A100"], "", "a target on H100, and here it is on A100"),
            (["cluster.address=local"], "A100", "a target on H100, and here it is on A100"),
            (
                ["cluster.address=local", "target.accelerator=zone=a"],
                "A100",
                "a target on H100, and here it is on A100",
            ),
        ],
    )
    def test_costs_of_another_kind_are_refused(self, file: Path, overrides: list[str], kind: str, words: str) -> None:
        with pytest.raises(ConfigError, match=f"profile: .*{words}"):
            plan_config(self.on(file, *overrides), Machine(64, 8, kind=kind))

    def test_drafts_of_another_kind_are_left_out(self, file: Path) -> None:
        _, plan = plan_config(self.on(file, "drafters.0.accelerator=A10G"), HERE)
        reason = "draft_model is left out: that run tried it on L4, and its accelerator is A10G"
        assert plan.notes[0] == reason and plan.chosen.mode is ModeName.plain


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    def test_json_has_a_prediction_for_every_mode_and_method(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known = ["plan", *on(file)]
        code, out, _ = self.run(capsys, *known, "--json", "target.max_batch=8")
        assert code == 0
        plan = json.loads(out)
        assert plan["batch"] == 8
        found = {(row["mode"], row["method"]) for row in plan["predictions"]}
        assert found == {("plain", None), ("coupled", "ngram"), ("decoupled", "ngram")}
        assert plan["chosen"]["tokens_per_s"] == max(row["tokens_per_s"] for row in plan["predictions"])
        code, out, _ = self.run(capsys, *known)
        assert code == 0 and "\ncoupled ngram, " in out
        assert "rejected: decoupled ngram, 1 x 2 + 1 x 1: needs 3 devices, and there are 2" in out
