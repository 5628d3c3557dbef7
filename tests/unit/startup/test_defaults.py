"""Defaults that follow from the device: data types, batches, cores, caches, and what of a GPU is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from specactor_ray.config import Config, load_config, to_yaml
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import drafter_specs, unused_branches
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.draft.proposer import footprint
from specactor_ray.models.loading import load_model_config
from specactor_ray.models.shapes import GIB, context_of, token_bytes
from specactor_ray.rollout.rollout import Rollout
from specactor_ray.startup import memory
from specactor_ray.startup.machine import Devices, Machine
from specactor_ray.startup.memory import drafter_on_node, settle_caches, target_on_node
from specactor_ray.startup.mode import settle
from specactor_ray.target import sizes
from specactor_ray.target.sizes import beside_the_cache, cache_bytes, room_on_cpu, room_on_gpu
from tests.fakes.loops import ragged
from tests.tiny import tiny_draft, tiny_target

QWEN_7B = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
PARAMETERS = 7_615_616_512
DRAFTER = "drafters=[{method: draft_model, model: m}]"


HERE = Machine(16)


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 7B parameters, of which the configuration alone is there."""
    config = LlamaConfig(**QWEN_7B)
    monkeypatch.setattr(sizes, "count_parameters", lambda *_: (PARAMETERS, config))
    monkeypatch.setattr(sizes, "load_model_config", lambda *_, **__: config)


def on_gpu(**target: Any) -> TargetConfig:
    return TargetConfig(**{"model": "7b", "backend": "vllm", "gpus": 1, **target})


def test_batches_and_steps_by_the_device() -> None:
    cpu, gpu = load_config().target, load_config(None, ["target.gpus=1"]).target
    assert (cpu.cores, cpu.max_batch, cpu.max_step_tokens) == (1, 16, 512)
    assert (gpu.max_batch, gpu.max_step_tokens) == (128, 2048)
    assert load_config(None, ["target.max_batch=1024"]).target.max_step_tokens == 1024 + 128
    keys = ("cores", "max_batch", "max_step_tokens", "kv_cache_gb", "max_model_len", "dtype")
    assert load_config(None, [f"target.{key}=auto" for key in keys]) == load_config()


@pytest.mark.parametrize(
    ("overrides", "target", "drafter"),
    [
        (["mode=coupled"], "cpu", "cpu"),
        (["mode=coupled", "target.gpus=1"], "gpu", "gpu"),
        (["mode=decoupled", "target.gpus=1"], "gpu", "cpu"),
        (["mode=decoupled", "drafters.0.gpus=1"], "cpu", "gpu"),
        (["mode=auto", "target.gpus=1"], "gpu", "gpu"),
        (["mode=auto"], "cpu", "cpu"),
    ],
)
@pytest.mark.parametrize("bf16", [True, False], ids=["AVX512_BF16", "without"])
def test_the_data_type_of_each_device(bf16: bool, overrides: list[str], target: str, drafter: str) -> None:
    config = load_config(None, [DRAFTER, *overrides])
    settled, _ = settle(config, Machine(8, bfloat16=bf16), Devices(8, 2))
    expected = {"gpu": "bfloat16", "cpu": "bfloat16" if bf16 else "float32"}
    assert (settled.target.dtype, settled.drafters[0].dtype) == (expected[target], expected[drafter])
    assert load_config(None, [DRAFTER, *overrides]) == config, "it is not changed"
    assert settle(settled, HERE, None) == (settled, []) and f"dtype: {expected[target]}" in to_yaml(settled)
    validate(settled)


@pytest.mark.parametrize(
    ("devices", "overrides", "cores"),
    [
        (None, ["target.gpus=1"], 5),
        (Devices(64, 8), ["target.gpus=1"], 5),
        (Devices(64, 8), ["target.gpus=4", "target.backend=vllm", "target.tensor_parallel=4"], 8),
        (Devices(9, 2), ["target.gpus=1", "target.replicas=2"], 4),
        (Devices(9, 2), ["target.gpus=1", "mode=decoupled", "drafters=[{method: ngram, hosted: false, cores: 6}]"], 3),
        (Devices(9, 2), ["target.gpus=1", "mode=coupled", "drafters=[{method: ngram, cores: 6}]"], 5),
        (Devices(1, 2), ["target.gpus=1", "target.replicas=2"], 1),
    ],
)
def test_cores_of_verifiers_on_gpus(devices: Devices | None, overrides: list[str], cores: int) -> None:
    assert settle(load_config(None, ["mode=plain", *overrides]), HERE, devices)[0].target.cores == cores


def test_the_cache_of_a_cpu() -> None:
    """Whole requests, within the room."""
    rows = 16
    target = TargetConfig(model=str(tiny_target()), dtype="float32", max_batch=rows)
    model = load_model_config(target.model).get_text_config()
    per_token, blocks = token_bytes(model, 4), context_of(model) // 256
    needed = (rows * blocks + 1) * 256 * per_token
    assert cache_bytes(target, float("inf")) == needed
    assert cache_bytes(target, 1000.0) == 1000.0
    target.max_model_len = 257
    assert cache_bytes(target, float("inf")) == (rows * 2 + 1) * 256 * per_token
    target.kv_cache_gb = 0.5
    assert cache_bytes(target, 1000.0) == 0.5 * GIB
    assert room_on_cpu(TargetConfig(replicas=2, tensor_parallel=2), 8 * GIB) == GIB / 2


@pytest.mark.parametrize("layers", [[], [0, 2, 3]])
def test_the_plan_counts_the_hidden_states_that_drafters_read(layers: list[int]) -> None:
    """In the cache of `hf`, and beside that of vLLM."""
    target = TargetConfig(model=str(tiny_target()), dtype="float32", hidden_layers=layers)
    text = load_model_config(target.model).get_text_config()
    of_states = 64 * 4 * len(layers)
    own = sizes.cached_token_bytes(target, text)
    assert own == token_bytes(text, 4) + of_states == ragged(tiny_target(), layers).cache.bytes_per_token
    assert sizes.states_beside_the_cache(target, own * 100.0) == 0
    without = beside_the_cache(replace(target, hidden_layers=[]))
    assert beside_the_cache(target) - without == (target.max_step_tokens + 8192) * of_states
    target.backend = "vllm"
    plain = token_bytes(text, 4)
    assert sizes.cached_token_bytes(target, text) == plain
    assert sizes.states_beside_the_cache(target, plain * 100.0) == pytest.approx(of_states * 100)


@pytest.mark.usefixtures("qwen")
def test_the_cache_of_a_cpu_is_a_gigabyte_or_one_request() -> None:
    """7B in bfloat16: 57344 bytes a token, 1.75 GiB a request of 32768 tokens."""
    target = TargetConfig(model="7b", dtype="bfloat16")
    assert cache_bytes(target, float("inf")) == (32768 + 256) * 57344
    target.max_model_len = 4096
    assert cache_bytes(target, float("inf")) == GIB


@pytest.mark.usefixtures("qwen")
@pytest.mark.parametrize("gib", [24, 80])
def test_the_plan_of_a_gpu(gib: int) -> None:
    """Weights 14.2 GiB, logits of 2048 positions 1.7, graphs 1.3; at most 92% of the GPU, all where it is needed."""
    total, target = gib * GIB, on_gpu(dtype="bfloat16")
    cache = cache_bytes(target, room_on_gpu(target, total))
    beside = beside_the_cache(target)
    assert 18.5 < beside / GIB < 20.5
    assert cache + beside == pytest.approx(0.92 * total)
    halved = on_gpu(dtype="bfloat16", max_batch=512, gpus=2, tensor_parallel=2)
    more = cache_bytes(halved, room_on_gpu(halved, total))
    assert more / (57344 / 2) > 2 * cache / 57344, "tokens: half the weights and half of each token's keys and values"
    short = on_gpu(dtype="bfloat16", max_model_len=128, max_batch=4)
    assert cache_bytes(short, room_on_gpu(short, total)) == 5 * 256 * 57344, "no more than four requests take"
    assert room_on_gpu(target, total, 2.0 * GIB) == pytest.approx(room_on_gpu(target, total) - 2 * GIB)


def config_of(target: TargetConfig, **sections: Any) -> Config:
    given = {key: value for key, value in vars(target).items() if key != "engine_arguments"}
    return settle(from_mapping({"mode": "plain", "target": given, **sections}), HERE, None)[0]


def with_cache(config: Config, *gpu_bytes: int) -> TargetConfig:
    """The target with its cache on a machine with such GPUs."""
    settled = copy.deepcopy(config)
    settle_caches(settled, replace(HERE, gpu_bytes=gpu_bytes))
    return settled.target


@pytest.mark.usefixtures("qwen")
def test_a_gpu_that_cannot_hold_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"7b in bfloat16 .* takes 19\.\d\d GiB .* a GPU has 16\.00 GiB") as error:
        with_cache(config_of(on_gpu()), 80 * GIB, 16 * GIB)
    assert error.value.key == "target.gpus" and "target.tensor_parallel" in error.value.fix
    with pytest.raises(ConfigError, match=r"beside a cache of 10\.00 GiB") as error:
        with_cache(config_of(on_gpu(kv_cache_gb=10)), 24 * GIB)
    assert error.value.key == "target.kv_cache_gb"
    size = float(error.value.fix.split()[1])
    assert with_cache(config_of(on_gpu(kv_cache_gb=size - 0.1)), 24 * GIB).kv_cache_gb == pytest.approx(size - 0.1)
    assert with_cache(config_of(on_gpu()), 24 * GIB).kv_cache_gb == pytest.approx(size, abs=0.01)


@pytest.mark.usefixtures("qwen")
def test_a_cache_is_settled_once_here_or_on_the_node_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: 24.0 * GIB)
    elsewhere = with_cache(config_of(on_gpu(), cluster={"address": "10.0.0.1:6379"}), 80 * GIB)
    assert elsewhere.kv_cache_gb is None, "its GPUs are not known here"
    here = with_cache(config_of(on_gpu()), 24 * GIB)
    assert target_on_node(elsewhere, []) == here and target_on_node(here, []) is here
    drafters = [{"method": "draft_model", "model": str(tiny_draft()), "dtype": "float32", "kv_cache_gb": 0.25}]
    hosting = {"mode": "coupled", "target": {"model": str(tiny_target())}, "drafters": drafters}
    (spec,) = drafter_specs(from_mapping(hosting)).values()
    assert drafter_on_node(spec, elsewhere, "cuda") is spec
    auto = drafter_on_node(replace(spec, kv_cache_gb=None), elsewhere, "cuda")
    assert auto.kv_cache_gb * GIB == footprint(replace(spec, kv_cache_gb=None), elsewhere, 24 * GIB)[0]


def test_hosted_drafters_leave_less_of_a_gpu() -> None:
    target = {"model": str(tiny_target()), "gpus": 1, "max_batch": 2048, "max_step_tokens": 2048}
    plain = with_cache(settle(from_mapping({"mode": "plain", "target": target}), HERE, None)[0], GIB * 5 // 2)
    drafters = [{"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.1}]
    hosting = settle(from_mapping({"mode": "coupled", "target": target, "drafters": drafters}), HERE, None)[0]
    hosts = with_cache(hosting, GIB * 5 // 2)
    assert 0.1 < plain.kv_cache_gb - hosts.kv_cache_gb < 0.12
    (spec,) = drafter_specs(hosting).values()
    cache, held = footprint(spec, hosts, GIB * 5 // 2)
    assert (plain.kv_cache_gb - hosts.kv_cache_gb) * GIB == pytest.approx(held) and cache == 0.1 * GIB
    with pytest.raises(ConfigError) as error:
        with_cache(hosting, GIB * 9 // 4)
    assert error.value.key == "target.gpus" and "kv_cache_gb or max_batch of hosted drafters" in error.value.fix


def test_a_draft_actor_that_does_not_fit_is_refused() -> None:
    drafters: list[dict[str, Any]] = [{"method": "draft_model", "model": str(tiny_draft()), "gpus": 1, "max_batch": 64}]
    target = {"model": str(tiny_target()), "gpus": 1, "max_batch": 4, "max_step_tokens": 64}
    config, _ = settle(from_mapping({"mode": "decoupled", "target": target, "drafters": drafters}), HERE, None)
    assert with_cache(config, 80 * GIB, 4 * GIB).kv_cache_gb
    (spec,) = drafter_specs(config).values()
    _, held = footprint(spec, config.target, 4 * GIB)
    config.drafters[0].kv_cache_gb = 1.7
    with pytest.raises(ConfigError, match=r"with its cache and graphs takes 1\.7\d GiB; a GPU has 4\.00 GiB") as error:
        with_cache(config, 80 * GIB, 4 * GIB)
    assert error.value.key == "drafters.0.gpus" and "kv_cache_gb" in error.value.fix
    config.drafters[0].kv_cache_gb = 1.6
    assert with_cache(config, 80 * GIB, 4 * GIB).kv_cache_gb and held < 0.5 * GIB


@pytest.mark.usefixtures("qwen")
def test_the_plan_counts_captured_steps() -> None:
    own, other = on_gpu(backend="hf", dtype="bfloat16"), on_gpu(dtype="bfloat16")
    fits = int(beside_the_cache(other) / 0.92 + 0.5 * GIB)
    assert with_cache(config_of(other), fits).kv_cache_gb == pytest.approx(0.46, abs=0.01)
    with pytest.raises(ConfigError, match="with activations, graphs and hosted drafters takes") as error:
        with_cache(config_of(own), fits)
    assert error.value.key == "target.gpus" and "target.max_step_tokens" in error.value.fix
    fewer = with_cache(config_of(on_gpu(backend="hf", dtype="bfloat16", max_step_tokens=512)), fits)
    assert fewer.kv_cache_gb > 0, "as it proposes"


def test_a_resumed_rollout_keeps_its_data_type(tmp_path: Path) -> None:
    from specactor_ray.config.load import save_config
    from specactor_ray.runs.trajectories import lease_interrupted

    saved = load_config(None, ["target.dtype=bfloat16", "run.name=r", f"run.dir={tmp_path}"])
    save_config(saved, tmp_path / "r" / "config.yaml")
    (tmp_path / "r" / "trajectories.jsonl.partial").touch()
    config = load_config(None, ["run.name=r", f"run.dir={tmp_path}"])
    found = lease_interrupted(config)
    assert found is not None and found[0] == tmp_path / "r" and config.target.dtype == "bfloat16"
    found[1].release()
    with pytest.raises(ConfigError, match=r"target\.dtype: is .float32., and the interrupted run r has .bfloat16."):
        lease_interrupted(load_config(None, ["run.name=r", f"run.dir={tmp_path}", "target.dtype=float32"]))
    (tmp_path / "r" / "config.yaml").write_text("speculation: {of_another_version: 1}")
    with pytest.raises(ConfigError, match=r"r/config\.yaml: speculation\.of_another_version: .* new run under another"):
        lease_interrupted(config)


def test_actors_report_fallbacks_and_each_is_named_once() -> None:
    rows = [{"counters": {"fallbacks": ["a", "b"]}}, {"counters": {}}, {"counters": {"fallbacks": ["b", "c"]}}]
    rollout: Any = SimpleNamespace(status=lambda: rows, config=load_config())
    assert Rollout.fallbacks(rollout) == ["a", "b", "c"]
    rows.append({"phase": "gone"})
    assert Rollout.fallbacks(rollout) == [], "a status that cannot be read ends no run"
    rollout.config = load_config(None, ["mode=decoupled", "drafters=[{method: ngram}]", "speculation.branches=3"])
    assert Rollout.fallbacks(rollout) == [unused_branches(rollout.config)] != [""]


@pytest.mark.parametrize(
    ("overrides", "reaches", "batches"),
    [
        (["mode=decoupled"], {"ngram": (8, 0), "draft_model": (16, 16)}, [16, 16]),
        (["mode=decoupled", "target.replicas=3"], {"ngram": (8, 0), "draft_model": (16, 16)}, [16, 48]),
        (["mode=decoupled", "target.replicas=20"], {"ngram": (8, 0), "draft_model": (16, 16)}, [16, 128]),
        (["mode=decoupled", "speculation.window=10"], {"ngram": (10, 0), "draft_model": (10, 16)}, [16, 16]),
        (["mode=decoupled", "speculation.branches=4"], {"ngram": (8, 0), "draft_model": (16, 4)}, [16, 16]),
        (["mode=coupled", "speculation.branches=3"], {"ngram": (8, 0), "draft_model": (8, 0)}, [16, 16]),
    ],
)
def test_how_far_drafters_run_ahead_and_for_how_many(
    overrides: list[str], reaches: dict[str, tuple[int, int]], batches: list[int]
) -> None:
    own = "{method: eagle, model: h, window: 4, max_batch: 5}"
    config = load_config(None, [f"drafters=[{{method: ngram}}, {{method: draft_model, model: m}}, {own}]", *overrides])
    *specs, last = drafter_specs(config).values()
    assert {spec.method: (spec.window, spec.branches) for spec in specs} == reaches
    assert [spec.max_batch for spec in specs] == batches and (last.window, last.max_batch) == (4, 5)
    unused = "speculation.branches=3 has no effect: hosted drafters draft one chain"
    assert unused_branches(config) == (unused if "speculation.branches=3" in overrides else "")
