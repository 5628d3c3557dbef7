"""What `scripts/gpu-check` rests on: a forward that is right, a budget that holds, figures that mean what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specactor_ray.benchmarks.gpu_check.flips import compare, measure_flips
from specactor_ray.benchmarks.gpu_check.forwards import whole_model_s
from specactor_ray.benchmarks.gpu_check.models import random_model
from specactor_ray.benchmarks.gpu_check.oracle import OracleProposer
from specactor_ray.benchmarks.gpu_check.report import Report, hardware_yaml, slug
from specactor_ray.benchmarks.gpu_check.settings import DRY_RUN, ON_GPU, QWEN_7B, TINY, TINY_SAMPLED
from specactor_ray.benchmarks.gpu_check.spreading import BULK_STD, ENTROPY_NATS, mean_entropy, spread_head
from specactor_ray.benchmarks.gpu_check.stages import OutOfTime, Stage, run_stages
from specactor_ray.benchmarks.gpu_check.static_model import KVCache, LayerWeights, StaticModel
from specactor_ray.errors import InputError
from specactor_ray.messages import SamplingParams
from tests.by_name import ByName
from tests.clocks import HandClock

CPU = torch.device("cpu")
HEAD = {"dry_run": True, "started": "2026-01-02T03:04:05+00:00", "torch": "2.11.0", "device": "NVIDIA H200"}
REPOSITORY = Path(__file__).parents[2]


def static_of(model: Any) -> StaticModel:
    """The weights of a `Qwen2ForCausalLM` of shape TINY as a static model."""

    def layer(block: Any) -> LayerWeights:
        attention, ffn = block.self_attn, block.mlp
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        return LayerWeights(
            input_norm=block.input_layernorm.weight,
            qkv=torch.cat([linear.weight for linear in three]),
            qkv_bias=torch.cat([linear.bias for linear in three]),
            out=attention.o_proj.weight,
            ffn_norm=block.post_attention_layernorm.weight,
            gate_up=torch.cat([ffn.gate_proj.weight, ffn.up_proj.weight]),
            down=ffn.down_proj.weight,
        )

    layers = [layer(block) for block in model.model.layers]
    head = model.lm_head.weight
    return StaticModel(TINY, layers, model.model.embed_tokens.weight, model.model.norm.weight, head, 64)


@pytest.mark.parametrize("parts", [(12,), (8, 1, 3), (1, 1, 10), (5, 7)])
def test_the_static_forward_computes_what_transformers_computes(parts: tuple[int, ...]) -> None:
    model = random_model(TINY, "float32", "cpu")
    with torch.no_grad():
        for block in model.model.layers:  # transformers begins with biases of 0 and norms of 1
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                linear.bias.normal_()
            block.input_layernorm.weight.uniform_(0.5, 1.5)
    tokens = torch.randint(TINY.vocab, (3, sum(parts)), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens, use_cache=False).logits
    static, cache = static_of(model), KVCache.random(TINY, 3, 16, torch.float32, CPU)
    hidden, begin = [], 0
    for count in parts:
        hidden.append(static.hidden(tokens[:, begin : begin + count], cache, begin))
        begin += count
    logits = static.logits(torch.cat(hidden, dim=1)).view_as(expected)
    torch.testing.assert_close(logits.clone(), expected, atol=2e-3, rtol=1e-3)


def test_rows_of_a_cache_are_views_and_fewer_layers_can_be_run() -> None:
    static = StaticModel.random(TINY, torch.float32, CPU)
    cache = KVCache.random(TINY, 4, 8, torch.float32, CPU)
    tokens = torch.randint(TINY.vocab, (4, 3))
    whole = static.hidden(tokens, cache, 2)
    for keys in cache.keys:
        keys[:, :, 2:5] = torch.nan
    parts = torch.cat([static.hidden(tokens[row : row + 2], cache.rows(row, row + 2), 2) for row in (0, 2)])
    torch.testing.assert_close(parts.clone(), whole.clone())
    assert not torch.allclose(static.hidden(tokens, cache, 2, layers=1), whole)


def test_bf16_flips_are_counted_with_their_margins(tmp_path: Path) -> None:
    settings = replace(DRY_RUN, dtype="bfloat16")
    stage = Stage("flips", settings, 1.0, lambda: None, lambda: 0.0)
    measure_flips(stage)
    assert len(stage.figures["ways"]) == 9 and stage.figures["compared"] == 16
    assert stage.figures["ways"][0]["1.0"] == {"flips": 0, "flips_per_1000": 0.0}
    assert "1.0" in stage.figures["near_ties"]
    found = compare([1, 2, 3, 4], [0.5, 0.25, 2.0, 0.125], [1, 9, 3, 9])
    assert found["flips"] == 2 and found["flips_per_1000"] == 500.0
    assert (found["margin_max"], found["margins"]) == (0.25, [0.125, 0.25])


def test_logits_are_spread_like_those_of_a_trained_model() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(20_000, 64, generator=generator), torch.randn(32, 64, generator=generator)
    told = spread_head(weight, hidden @ weight.T)
    logits = hidden @ weight.T
    assert mean_entropy(logits) == pytest.approx(told["entropy_nats"], rel=1e-3)
    assert told["entropy_nats"] == pytest.approx(ENTROPY_NATS, rel=1e-3)
    assert float(logits.median(dim=-1).values.abs().max()) < 0.5
    assert float(logits.quantile(0.84, dim=-1).mean()) == pytest.approx(BULK_STD, rel=0.1)
    assert float(logits.amax(dim=-1).mean()) == pytest.approx(told["top_logit"], rel=1e-3)
    assert 12 < told["top_logit"] < 40


def test_a_whole_model_is_the_slope_over_its_layers() -> None:
    assert whole_model_s(TINY_SAMPLED, (1, 2), (0.003, 0.005)) == pytest.approx(0.013)
    assert whole_model_s(TINY_SAMPLED, (1, 2), (0.003, 0.002)) == 0.003, "noise makes no layer cheaper than free"


def test_shapes_are_those_of_the_published_models() -> None:
    by_name = {shape.name: shape for shape in ON_GPU.forwards.shapes}
    assert {shape.head_dim for shape in by_name.values()} == {64, 128}
    assert QWEN_7B.cache_bytes(1, 2) == 57_344
    assert by_name["qwen2.5-32b"].built_layers == 6 and by_name["qwen2.5-32b"].layers == 64
    assert all(ON_GPU.flips.tokens % length == 0 for length in ON_GPU.flips.lengths)
    assert max(ON_GPU.flips.batches) >= ON_GPU.flips.rows


def test_an_oracle_is_right_as_often_as_it_is_told() -> None:
    output = list(range(4000))
    for accuracy in (0.0, 0.3, 0.9, 1.0):
        oracle = ByName(OracleProposer({"r": output}, accuracy, 5000))
        oracle.open("r", (1, 2), (), SamplingParams(max_tokens=4000), 4000)
        assert oracle.extend() == ["r"] and oracle.extend() == []
        base, tail = oracle.tail("r")
        right = sum(mine == theirs for mine, theirs in zip(tail, output, strict=True))
        assert base == 0 and right / 4000 == pytest.approx(accuracy, abs=0.03)
    again = ByName(OracleProposer({"r": output}, 0.3, 5000))
    again.open("r", (1, 2), range(100), SamplingParams(max_tokens=4000), 50)
    again.extend()
    first = ByName(OracleProposer({"r": output}, 0.3, 5000))
    first.open("r", (1, 2), (), SamplingParams(max_tokens=4000), 150)
    first.extend()
    assert again.tail("r") == (100, first.tail("r")[1][100:150]), "a position is right or wrong however it is reached"


def test_an_oracle_follows_commits_to_the_end_of_the_output() -> None:
    oracle = ByName(OracleProposer({"r": [5, 6, 7]}, 1.0, 100))
    assert not oracle.commit("r", 0, [5]), "not open"
    oracle.open("r", (1,), (), SamplingParams(), 2)
    oracle.extend()
    assert oracle.tail("r") == (0, (5, 6))
    assert oracle.commit("r", 0, [5]) and oracle.extend() == ["r"] and oracle.tail("r") == (1, (6, 7))
    assert not oracle.commit("r", 3, [9]), "a gap"
    assert oracle.commit("r", 1, [8]) and oracle.extend() == ["r"]
    assert oracle.tail("r") == (2, (7,)), "after another token the guess is that of the position"
    oracle.close("r")
    assert oracle.extend() == []


def test_stages_that_fail_or_are_late_leave_their_figures_and_the_others_run(tmp_path: Path) -> None:
    clock = HandClock()

    def fails(stage: Stage) -> None:
        stage.figures["half"] = 1
        raise RuntimeError("no kernel image")

    def is_cut(stage: Stage) -> None:
        stage.figures["first"] = 2
        clock.seconds = stage.deadline + 1.0
        stage.check("the second")

    def measures(stage: Stage) -> None:
        stage.figures["x"] = float("nan")
        stage.note("measured")

    report = Report(tmp_path / "check.json", HEAD)
    stages = {"a": (1.0, fails), "b": (1.0, is_cut), "c": (1.0, measures)}
    run_stages(stages, DRY_RUN, report, clock.now() + 60, clock.now)
    report.close()
    data = json.loads((tmp_path / "check.json").read_text())
    assert {name: entry["status"] for name, entry in data["stages"].items()} == {
        "a": "failed",
        "b": "cut",
        "c": "complete",
    }
    assert data["status"] == "failed" and "no kernel image" in data["stages"]["a"]["error"]
    assert data["stages"]["a"]["figures"] == {"half": 1} and data["stages"]["b"]["figures"] == {"first": 2}
    assert data["stages"]["b"]["error"] == "out of time before the second"
    assert data["stages"]["c"]["figures"] == {"x": None}, "JSON has no NaN"
    late = Report(tmp_path / "late.json", HEAD)
    run_stages(stages, DRY_RUN, late, clock.now() - 1, clock.now)
    assert {entry["status"] for entry in late.stages.values()} == {"cut"}


def test_a_stage_gives_the_time_it_did_not_need_to_those_after_it(tmp_path: Path) -> None:
    clock, shares = HandClock(), []

    def takes_10(stage: Stage) -> None:
        shares.append(stage.deadline - clock.now())
        clock.seconds += 10.0

    stages = {"a": (1.0, takes_10), "b": (2.0, takes_10), "c": (1.0, takes_10)}
    run_stages(stages, DRY_RUN, Report(tmp_path / "check.json", HEAD), 100.0, clock.now)
    assert shares == pytest.approx([25.0, 60.0, 80.0])
    with pytest.raises(OutOfTime, match="anything"):
        Stage("a", DRY_RUN, clock.now() - 1, lambda: None, clock.now).check("anything")


def test_the_hardware_file_is_yaml_with_numbers(tmp_path: Path) -> None:
    shapes = {
        "qwen2.5-7b": {"graph": [[1, 1, 512, 4.1e-05]], "eager": [[1, 1, 512, 0.02]]},
        "qwen2.5-32b": {"graph": [], "eager": [[1, 2, 512, 0.03]], "scaled": "qwen2.5-32b from 2 and 6 layers to 64"},
    }
    hardware = yaml.safe_load(hardware_yaml({**HEAD, "dry_run": False}, shapes))
    assert hardware == {
        "kind": "specactor hardware",
        "name": "h200-measured",
        "device": "NVIDIA H200",
        "source": "scripts/gpu-check, 2026-01-02, torch 2.11.0; qwen2.5-32b from 2 and 6 layers to 64",
        "measured": {
            "qwen2.5-7b": {"gpus": 1, "graph": [[1, 1, 512, 4.1e-05]], "eager": [[1, 1, 512, 0.02]]},
            "qwen2.5-32b": {"gpus": 1, "eager": [[1, 2, 512, 0.03]]},
        },
    }
    assert slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_shapes_without_a_figure_are_left_out_of_the_hardware_file(tmp_path: Path) -> None:
    report = Report(tmp_path / "check.json", HEAD)
    shapes = report.open_stage("forwards")["figures"]["shapes"] = {"begun": {"graph": [], "eager": []}}
    report.save()
    assert not report.yaml_path.exists()
    shapes["measured"] = {"graph": [], "eager": [[1, 1, 8, 0.5]]}
    report.save()
    assert yaml.safe_load(report.yaml_path.read_text())["measured"].keys() == {"measured"}


def test_a_report_refuses_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "check.yaml").touch()
    with pytest.raises(InputError, match=r"check\.yaml exists"):
        Report(tmp_path / "check.json", HEAD)


def test_what_it_uses_of_the_product_needs_neither_ray_nor_omegaconf() -> None:
    modules = sorted((REPOSITORY / "specactor_ray/benchmarks/gpu_check").glob("[a-z]*.py"))
    imports = "; ".join(f"import specactor_ray.benchmarks.gpu_check.{path.stem}" for path in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys(('ray', 'vllm', 'omegaconf', 'rich'))); {imports}"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
