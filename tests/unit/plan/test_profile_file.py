"""The profile's file, whether it may be used here, and what a plan makes of a configuration. Nothing is measured."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specactor_ray.cli import main as cli
from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.models.identity import method_identity, model_identity
from specactor_ray.plan.costs import CostPoint
from specactor_ray.plan.profile import KIND, SCHEMA, load_profile
from specactor_ray.plan.search import ALL_MODES, geometric
from specactor_ray.rollout import planning
from specactor_ray.rollout.planning import (
    apply_plan,
    as_decoupled,
    make_plan,
    requests_of,
    resolve,
    resolve_by_profile,
)

WINDOWS, CONTEXTS, BATCHES, CORES = (0, 1, 4), (32, 256), (1, 8), (1, 2)


def verify_points() -> list[CostPoint]:
    return [
        CostPoint(g, w, c, b, (0.02 + b * 0.002 + 0.0005 * w + 1e-6 * c) / g**0.6)
        for g in CORES
        for w in WINDOWS
        for c in CONTEXTS
        for b in BATCHES
    ]


def draft_points(seconds: float) -> list[CostPoint]:
    return [CostPoint(g, 0, c, b, seconds * (1 + 0.1 * b)) for g in CORES for c in CONTEXTS for b in BATCHES]


def profile_data(target: Path, drafters: list[DrafterConfig], survival: list[float]) -> dict[str, Any]:
    """A profile as `run_profile` writes it, with costs by formula."""
    verify = verify_points()
    methods = {
        drafter.method: {
            "identity": method_identity(drafter),
            "free": False,
            "points": [asdict(point) for point in draft_points(1e-4)],
            "acceptance": {"survival": survival},
        }
        for drafter in drafters
    }
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "device": "cpu",
        "hardware": {**hardware(), "gpu": None},
        "versions": versions(),
        "model": model_identity(str(target), "float32"),
        "prompt_tokens": 20.0,
        "verify": [asdict(point) for point in verify],
        "methods": methods,
    }


def devices_of(config: Config) -> int:
    """Cores."""
    return planning.devices_of(config).cores


@pytest.fixture
def data(tiny_model_dir: Path) -> dict[str, Any]:
    return profile_data(tiny_model_dir, [DrafterConfig()], [0.9, 0.8, 0.7, 0.6])


@pytest.fixture
def file(tmp_path: Path, data: dict[str, Any]) -> Path:
    write_json(tmp_path / "profile.json", data)
    return tmp_path / "profile.json"


def auto(file: Path, target: Path, *overrides: str) -> Config:
    written = {
        "profile": str(file),
        "cluster": {"num_cpus": 2},
        "target": {"model": str(target), "dtype": "float32", "max_batch": 8},
        "drafters": [{"method": "ngram"}],
    }
    return from_mapping(written, overrides)


def on(file: Path, target: Path) -> list[str]:
    """Overrides: a profile, its target and drafter on two cores, whatever this machine has."""
    items = [f"profile={file}", f"target.model={target}", "target.dtype=float32", "drafters=[{method: ngram}]"]
    return [*items, "cluster.num_cpus=2"]


class TestFile:
    def test_it_is_read_as_it_was_written(self, file: Path, data: dict[str, Any]) -> None:
        profile = load_profile(file)
        assert {name: profile.data[name] for name in data} == data
        for point in verify_points():
            seconds = profile.verify[point.devices].step(point.batch, point.context, point.window)
            assert seconds == pytest.approx(point.seconds)
        assert profile.methods["ngram"].survival.tolist() == [1.0, 0.9, 0.8, 0.7, 0.6]

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"there is no file .*none.json. Fix: specactor profile"):
            load_profile(tmp_path / "none.json")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("[" * 100_000, "is truncated or damaged"),
            (json.dumps({"kind": KIND, "verify": [1.5]})[:-3], "is truncated or damaged"),
            ("", "is truncated or damaged"),
            ("[]", "is no profile of specactor"),
            ('{"results": []}', "is no profile of specactor"),
            (json.dumps({"kind": KIND, "schema": 2}), "has schema 2, and this version reads schema 1"),
            (json.dumps({"kind": KIND, "schema": SCHEMA}), "is not sound: KeyError: 'methods'"),
        ],
    )
    def test_what_is_no_profile(self, file: Path, text: str, problem: str) -> None:
        file.write_text(text)
        with pytest.raises(InputError, match=problem):
            load_profile(file)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("seconds", value) for value in ("slow", float("nan"), -1.0, 0.0, float("inf"))),
            *((name, value) for name in ("methods", "hardware", "prompt_tokens") for value in (None, -1, [3])),
        ],
    )
    def test_entries_of_the_wrong_kind(self, file: Path, data: dict[str, Any], name: str, value: Any) -> None:
        (data["verify"][3] if name == "seconds" else data)[name] = value
        file.write_text(json.dumps(data))
        with pytest.raises(InputError, match="is not sound: "):
            load_profile(file)


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"hardware": {"cpu": "Abacus 3000"}}, [], f"hardware.cpu: Abacus 3000 there, {hardware()['cpu']} here"),
        ({"hardware": {"vector": ["amx_bf16"]}}, [], "hardware.vector: "),
        ({"versions": {"torch": "1.0"}}, [], "versions.torch: 1.0 there"),
        ({"device": "cuda"}, [], "was measured on cuda, and target.gpus is 0"),
        ({"model": {"name": "other", "config_hash": "0"}}, [], "with other (float32), and the target is /"),
        ({}, ["target.backend=vllm", "target.tensor_parallel=2", "target.cores=2"], "target.tensor_parallel is 2"),
    ],
)
def test_a_profile_that_does_not_hold_here(
    file: Path,
    data: dict[str, Any],
    tiny_model_dir: Path,
    changes: dict[str, Any],
    overrides: list[str],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`mode: auto` warns and goes by the devices; `specactor plan` refuses."""
    for section, change in changes.items():
        data[section] = {**data[section], **change} if isinstance(change, dict) else change
    file.write_text(json.dumps(data))
    config = auto(file, tiny_model_dir, *overrides)
    resolved, lines = resolve(config)
    assert resolved.mode is ModeName.coupled and resolved.profile is None and lines[0].startswith("mode: coupled")
    with pytest.raises(ConfigError) as refused:
        planning.usable_profile(as_decoupled(config))
    assert words in str(refused.value)
    assert caplog.messages == [f"{refused.value} Until then mode=auto goes by the devices."]


def test_a_profile_that_does_not_hold_here_makes_no_layout_impossible(file: Path, tiny_model_dir: Path) -> None:
    """On GPUs: the layout as written has a draft model on CPU cores, which `mode: auto` gives a GPU."""
    on_gpus = ["target.gpus=1", "drafters=[{method: draft_model, model: m, dtype: float16}]", "cluster.num_gpus=2"]
    resolved, _ = resolve_by_profile(auto(file, tiny_model_dir, *on_gpus))
    assert resolved.profile is None and resolved.mode is ModeName.auto


def test_other_weights_of_the_same_shape_are_the_same_model(file: Path, tiny_model_dir: Path) -> None:
    other = json.loads((tiny_model_dir / "config.json").read_text())
    copied = file.parent / "policy-step-30"
    copied.mkdir()
    (copied / "config.json").write_text(json.dumps({**other, "transformers_version": "9.9"}))
    assert resolve_by_profile(auto(file, copied))[0].mode is not ModeName.auto


class TestResolve:
    def test_an_explicit_mode_is_kept(self, file: Path, tiny_model_dir: Path) -> None:
        config = auto(file, tiny_model_dir, "mode=plain")
        assert resolve_by_profile(config) == (config, [])

    def test_the_best_candidate_becomes_the_configuration(self, file: Path, tiny_model_dir: Path) -> None:
        config = auto(file, tiny_model_dir, "target.dtype=auto")
        data = json.loads(file.read_text())
        data["model"]["dtype"] = as_decoupled(config).target.dtype
        file.write_text(json.dumps(data))
        before = copy.deepcopy(config)
        resolved, lines = resolve(config)
        assert config == before
        assert resolve(resolved) == (resolved, [])
        assert resolved.mode is not ModeName.plain and resolved.speculation.window == 4
        assert devices_of(resolved) <= 2 and requests_of(resolved) >= 8
        plan, dtype = lines[-2:]
        assert plan.startswith(f"plan: {resolved.mode.value} ngram") and ", plain " in plan
        assert dtype == f"target.dtype: {resolved.target.dtype}"

    def test_drafts_that_are_never_right_give_plain_decoding(
        self, file: Path, data: dict[str, Any], tiny_model_dir: Path
    ) -> None:
        data["methods"]["ngram"]["acceptance"] = {"survival": [0.0, 0.0]}
        file.write_text(json.dumps(data))
        resolved, lines = resolve_by_profile(auto(file, tiny_model_dir))
        assert resolved.mode is ModeName.plain and "plain" in lines[-1]

    def test_only_the_asked_modes(self, file: Path, tiny_model_dir: Path) -> None:
        resolved, _ = resolve_by_profile(auto(file, tiny_model_dir), [ModeName.decoupled])
        assert resolved.mode is ModeName.decoupled
        drafter = resolved.drafters[0]
        assert (resolved.target.cores, drafter.cores, drafter.replicas, drafter.hosted) == (1, 1, 1, False)

    def test_the_trainer_keeps_its_cores(self, file: Path, tiny_model_dir: Path) -> None:
        resolved, _ = resolve_by_profile(auto(file, tiny_model_dir, "trainer.cores=1"))
        assert planning.devices_of(resolved, trains=True).cores == 2

    def test_on_a_foreign_cluster_it_plans_for_what_the_configuration_takes(
        self, file: Path, tiny_model_dir: Path
    ) -> None:
        overrides = ["cluster.address=auto", "cluster.num_cpus=null", "target.replicas=3"]
        config = auto(file, tiny_model_dir, *overrides, "drafters.0.replicas=3", "drafters.0.hosted=false")
        assert devices_of(as_decoupled(config)) == 6
        resolved, _ = resolve_by_profile(config, [ModeName.decoupled])
        assert devices_of(resolved) == 6

    def test_a_method_that_was_not_measured_is_left_out(
        self, file: Path, tiny_model_dir: Path, tiny_draft_model_dir: Path
    ) -> None:
        other = f"drafters=[{{method: draft_model, model: {tiny_draft_model_dir}}}]"
        assert resolve_by_profile(auto(file, tiny_model_dir, other))[0].mode is ModeName.plain
        assert resolve_by_profile(auto(file, tiny_model_dir, "drafters.0.min_match=3"))[0].mode is ModeName.plain
        assert resolve_by_profile(auto(file, tiny_model_dir, "drafters.0.replicas=0"))[0].drafters[0].replicas > 0

    def test_what_it_makes_is_valid_and_fits(self, file: Path) -> None:
        profile = load_profile(file)
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
            method = replace(profile.methods["ngram"], survival=geometric(np.array([p]), 4)[0])
            plan = make_plan(config, replace(profile, methods={"ngram": method}), modes)
            resolved = apply_plan(config, plan)
            validate(resolved)
            assert devices_of(resolved) <= devices
            assert resolved.mode is plan.chosen.mode and resolved.target.max_batch == plan.chosen.batch
            total = resolved.target.kv_cache_gb * resolved.target.replicas
            assert total == pytest.approx(config.target.kv_cache_gb * config.target.replicas)
            if resolved.mode is not ModeName.plain:
                assert resolved.drafters[0].window is None and resolved.speculation.window == plan.chosen.window
                assert resolved.drafters[0].replicas == (plan.chosen.drafters or plan.chosen.verifiers)

        check()


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    def test_json_has_a_prediction_for_every_mode_and_method(
        self, file: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known = ["plan", *on(file, tiny_model_dir)]
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

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["profile=none.json"], "profile: there is no file none.json"),
            (["profile=null"], "profile: is not set"),
            (["drafters=[{method: medusa}]"], "'medusa' is not known"),
            (["target.tensor_parallel=2", "target.backend=vllm", "target.cores=2"], "is of one rank"),
        ],
    )
    def test_mistakes(
        self, file: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
    ) -> None:
        code, _, err = self.run(capsys, "plan", *on(file, tiny_model_dir), *arguments)
        assert code == 2 and err.startswith("error: ") and problem in err

    def test_the_bad_profile_ends_a_rollout_before_it_begins(
        self, file: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file.write_text(file.read_text()[:-40])
        (tmp_path / "p.jsonl").write_text('{"prompt": "Add 1 and 2."}\n')
        known = [*on(file, tiny_model_dir), f"data.path={tmp_path}/p.jsonl"]
        for command in (["rollout"], ["train"], ["bench", "rollout"]):
            code, _, err = self.run(capsys, *command, *known, f"run.dir={tmp_path}/runs")
            assert code == 2 and "is truncated or damaged" in err
        assert not (tmp_path / "runs").exists()
