"""Checks before anything starts: ranks, context, cache, memory, heads and their targets. No vLLM is needed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BartConfig, LlamaConfig, MixtralConfig

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.core.identity import token_identity
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.checkpoint import load_head, save_head
from specactor_ray.models.loading import load_model_config, load_tokenizer
from specactor_ray.models.shapes import ROW_BYTES, token_bytes
from specactor_ray.startup import resolve as resolution
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.memory import PROCESS_BYTES, check_memory, plan_rollout_memory
from specactor_ray.startup.mode import settle
from specactor_ray.startup.resolve import (
    check_draft_models,
    check_target,
    export_what_drafters_read,
    require_devices,
    require_named,
    resolve,
    start_notes,
)
from specactor_ray.target.sizes import reject_cache_below_one_request
from tests.refused import refused
from tests.tiny import tiny_draft, tiny_eagle, tiny_target

LLAMA = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}


HERE = Machine(16)


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "require_vllm", lambda: "0.32.0")
    monkeypatch.setattr(resolution, "require_engine_arguments", lambda names: None)


def check(model: Any, /, **target: Any) -> None:
    config = config_with(**target)
    check_target(config, model)
    reject_cache_below_one_request(config.target, config.sampling.max_tokens, model.get_text_config())


def config_with(**target: Any) -> Config:
    ranks = target.get("tensor_parallel", 1)
    return from_mapping(
        {"mode": "plain", "target": {"model": "m", "backend": "vllm", "dtype": "float32", "cores": ranks, **target}}
    )


def test_a_configuration_made_in_code_is_checked_like_a_file() -> None:
    config = from_mapping(
        {"mode": "coupled", "target": {"model": str(tiny_target())}, "drafters": [{"method": "ngram"}]}
    )
    config.drafters += config.drafters
    with refused("drafters.1.method"):
        resolve(config, HERE)


def test_stop_ids_are_tokens() -> None:
    model = LlamaConfig(**LLAMA, vocab_size=9)
    check_target(replace(config_with(), sampling=SamplingParams(stop_token_ids=(8, 0))), model)
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids: 9 is no token of m; its largest id is 8\. Fix"):
        check_target(replace(config_with(), sampling=SamplingParams(stop_token_ids=(8, 9))), model)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"gpus": 1}, None),
        ({"gpus": 1, "engine_arguments": {"quantization": "fp8"}}, None),
        ({"gpus": 1, "engine_arguments": {"quantization": "gptq"}}, r"quantized \(gptq\)"),
        ({"gpus": 1, "backend": "hf"}, None),
        ({"backend": "hf"}, None),
        ({}, "vllm's kernels on CPUs depend"),
        ({"backend": "hf", "model": "mixture"}, "a mixture of experts in float32 on CPUs"),
        ({"gpus": 1, "model": "mixture"}, None),
    ],
)
def test_batch_invariance_that_no_kernel_gives_is_refused(target: dict[str, Any], problem: str | None) -> None:
    model = MixtralConfig(**LLAMA) if "model" in target else LlamaConfig(**LLAMA)
    if problem is None:
        check(model, batch_invariant=True, **target)
        return
    with pytest.raises(ConfigError, match=rf"target\.batch_invariant: .*{problem}.* Fix: set"):
        check(model, batch_invariant=True, **target)
    check(model, **target)


LONG = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("rope", "target", "problem"),
    [
        ("", {"hidden_layers": [0, 3], "max_model_len": 512}, ""),
        ("", {"hidden_layers": [0, 4]}, r"target\.hidden_layers: 4 is no layer of .* 0 to 3\. Fix: use"),
        *(("", {"tensor_parallel": ranks}, "") for ranks in (1, 2, 4, 12)),  # of 12 heads; 4 key/value heads are copied
        ("", {"tensor_parallel": 3}, "12 attention heads and 4 key/value heads .* use one of 1, 2, 4, 12"),
        ("", {"max_model_len": 513}, r"target\.max_model_len: 513, but m was made for 512 tokens"),
        ("linear", {"max_model_len": 513}, ""),  # vLLM serves such positions beyond the context that the model names
        ("linear", {"max_model_len": 513, "backend": "hf"}, "was made for 512"),
        ("longrope", {"max_model_len": 513}, "was made for 512"),
        ("dynamic", {"max_model_len": 513}, "was made for 512"),
    ],
)
def test_models_are_held_to_what_they_have(rope: str, target: dict[str, Any], problem: str) -> None:
    scaling = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4, **(LONG if rope == "longrope" else {})}
    model = LlamaConfig(**LLAMA, max_position_embeddings=512, rope_parameters=scaling if rope else None)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check(model, **target)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"max_step_tokens": 19}, None),
        ({"max_step_tokens": 18}, "target.max_step_tokens"),
        ({"max_step_tokens": 18, "backend": "hf"}, None),
        ({"max_model_len": 51}, None),
        ({"max_model_len": 51, "gpus": 1}, "target.max_model_len"),
        ({"max_model_len": 52, "gpus": 1}, None),
    ],
)
def test_vllm_has_room_for_the_largest_window(overrides: dict[str, Any], key: str | None) -> None:
    """11 drafts of a request, beside 7 others; nothing is needed without drafts."""
    drafters = [{"method": "ngram", "window": 11}, {"method": "suffix"}]
    target = {"model": str(tiny_target()), "backend": "vllm", "max_batch": 8, **overrides}
    given = {"drafters": drafters, "sampling": {"max_tokens": 8}, "target": target}
    require_named(from_mapping({"mode": "plain", **given}), HERE)
    if key is None:
        require_named(from_mapping({"mode": "coupled", **given}), HERE)
        return
    with pytest.raises(ConfigError, match=r"11 drafts.* Fix: use (19|52) or more, .*window") as error:
        require_named(from_mapping({"mode": "coupled", **given}), HERE)
    assert error.value.key == key


def test_models_that_do_not_only_decode_or_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^target\.model: There is no directory '/nowhere'\. Fix: "):
        resolve(config_with(model="/nowhere"), HERE)
    with pytest.raises(ModelLoadError, match=r"drafters\.1\.model: There is no EAGLE head"):
        export_what_drafters_read(config(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="encoder-decoder"):
        check(BartConfig())


def test_a_cache_that_holds_no_whole_request() -> None:
    """A token takes 4 layers x 2 x 4 heads x 8 numbers x 4 bytes = 1 KiB; blocks hold 128, and one stays empty. With
    `hf` a head takes 64 bytes."""
    model = LlamaConfig(**LLAMA, max_position_embeddings=4096)
    check(model, kv_cache_gb=(4096 + 128) / 2**20)
    check(model, kv_cache_gb=(1024 + 128) / 2**20, max_model_len=1000)
    with pytest.raises(ConfigError, match=r"holds 896 tokens of m in blocks of 128.*may have 4096") as error:
        check(model, kv_cache_gb=1100 / 2**20)
    assert error.value.key == "target.kv_cache_gb"
    assert "use 0.005 or more" in error.value.fix and "target.max_model_len" in error.value.fix
    check(model, kv_cache_gb=1100 / 2**20, max_model_len=896)
    check(model, backend="hf", kv_cache_gb=288 / 2**20)
    with pytest.raises(ConfigError, match="holds 128 tokens of m in blocks of 16, and a request may have 129"):
        check(model, backend="hf", kv_cache_gb=287 / 2**20)


def test_a_drafters_cache_holds_a_page() -> None:
    def config(kv_cache_gb: float) -> Config:
        drafter = {"method": "draft_model", "model": str(tiny_draft()), "dtype": "float32", "kv_cache_gb": kv_cache_gb}
        return from_mapping({"mode": "coupled", "target": {"model": str(tiny_target())}, "drafters": [drafter]})

    with pytest.raises(ConfigError, match=r"drafters\.0\.kv_cache_gb: 1e-07 holds no page") as error:
        check_draft_models(config(1e-7), 512)
    least = float(error.value.fix.split()[1])
    check_draft_models(config(least), 512)
    with pytest.raises(ConfigError, match=r"drafters\.0\.model: .* a vocabulary of 512 tokens, the target .* of 511\."):
        check_draft_models(config(least), 511)
    page = 16 * token_bytes(load_model_config(str(tiny_draft())), 4, row=ROW_BYTES)
    assert page <= least * 2**30 < page + 2**11


@pytest.mark.parametrize("kind", ["same", "other", "none"])
def test_a_draft_model_may_lack_padding_if_the_tokenizer_is_the_targets(kind: str, tmp_path: Path) -> None:
    """As Qwen2.5-0.5B with 151,936 rows beside 7B with 152,064."""
    tokenizer = load_tokenizer(str(tiny_target()))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_target() / name)
    if kind == "other":
        tokenizer.add_tokens(["<other>"])
    if kind != "none":
        tokenizer.save_pretrained(tmp_path)
    drafter = {"method": "draft_model", "model": str(tiny_draft()), "dtype": "float32"}
    config = from_mapping({"mode": "coupled", "target": {"model": str(tmp_path)}, "drafters": [drafter]})
    if kind == "same":
        check_draft_models(config, 640)
        return
    with pytest.raises(ConfigError if kind == "other" else ModelLoadError, match="tokenizer"):
        check_draft_models(config, 640)


def test_a_cache_is_that_of_each_rank() -> None:
    """Two ranks hold half of the key/value heads each: 512 bytes a token."""
    model = LlamaConfig(**LLAMA, max_position_embeddings=4096)
    half = (4096 + 128) / 2**21
    check(model, kv_cache_gb=half, tensor_parallel=2)
    with pytest.raises(ConfigError, match="holds 2048 tokens"):
        check(model, kv_cache_gb=(2048 + 128) / 2**20)
    plans = (config_with(model=str(tiny_target()), kv_cache_gb=1.0, tensor_parallel=ranks) for ranks in (1, 2))
    one, two = (next(iter(plan_rollout_memory(plan).values())) for plan in plans)
    assert two - one == pytest.approx(2**30 + 2 * PROCESS_BYTES)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["target.accelerator=L4"], "target", "1 GPU(s) of L4 in all, and there are 0: those of this machine are H100"),
        (["target.accelerator='!H100'"], "target", "of !H100"),
        (["trainer.gpus=1", "trainer.accelerator=A100"], "trainer", "of A100"),
        (["target.accelerator=market=spot", "trainer.gpus=1"], "", ""),
        (["cluster.address=auto", "target.accelerator=L4"], "", ""),
        (
            ["target.accelerator=H100", "drafters=[{method: draft_model, model: m, gpus: 1, accelerator: L4}]"],
            "drafters.0",
            "of L4",
        ),
    ],
)
def test_a_kind_that_this_machine_has_not_is_refused_before_a_start(overrides: list[str], key: str, words: str) -> None:
    given = ["mode=decoupled", "drafters=[{method: ngram}]", "target.gpus=1", "target.cores=1", *overrides]
    with refused(f"{key}.accelerator", words) if key else nullcontext():
        require_devices(from_mapping({}, given), Machine(16, 2, kind="H100"), trains=True)


def test_a_machine_with_too_little_memory_is_told_before_anything_starts() -> None:
    config = from_mapping(
        {
            "mode": "decoupled",
            "target": {"model": str(tiny_target()), "dtype": "float32", "kv_cache_gb": 8, "replicas": 2},
            "drafters": [{"method": "ngram", "replicas": 3, "hosted": False}, {"method": "suffix", "replicas": 3}],
            "cluster": {"pin_cores": False, "num_cpus": 5},
        }
    )
    plan = plan_rollout_memory(config)
    assert (
        plan["verifiers, 2 x (weights + cache)"] > 16 * 2**30 and plan["draft actors, 3 x ngram"] == 3 * PROCESS_BYTES
    )
    assert plan["verifiers, 2 x suffix"] < PROCESS_BYTES
    with pytest.raises(
        ConfigError, match=r"needs about 1[78]\.\d\d GiB \(verifiers, .*\), and 4\.00 GiB are free"
    ) as error:
        resolve(config, Machine(2, free_bytes=4.0 * 2**30))
    assert "target.kv_cache_gb" in error.value.fix
    small = from_mapping({"mode": "plain", "target": {"model": str(tiny_target()), "backend": "vllm"}})
    with pytest.raises(ConfigError, match=r"target\.kv_cache_gb: 0.0002\d* holds 128 tokens"):
        resolve(small, Machine(2, free_bytes=2.0**20))
    config.cluster.address = "10.0.0.1:6379"  # its memory is not known here
    check_memory(config, 0.0, plan)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ({"mode": "plain"}, "1 of 16 CPU cores are used; target.cores=16 uses more"),
        ({"mode": "plain", "target": {"replicas": 3}}, "3 of 16 CPU cores are used; target.cores=5 uses more"),
        ({"mode": "plain", "target": {"gpus": 1, "cores": 1}}, ""),
        ({"mode": "plain", "target": {"cores": 16, "backend": "vllm"}}, "target.compiled=false starts sooner"),
    ],
)
def test_idle_cores_and_a_start_that_compiles_are_announced(overrides: dict[str, Any], note: str) -> None:
    settings = {"cluster": {"num_cpus": 16}, **overrides}
    config, _ = settle(from_mapping(settings), HERE, None)
    identity = token_identity("cpu", "float32", False)
    found = [note for note in start_notes(config, HERE, identity) if note != identity.line]
    assert len(found) == bool(note) and note in "".join(found)


@pytest.mark.parametrize(
    ("mode", "hosted", "replicas", "there"),
    [
        ("decoupled", None, 1, False),
        ("decoupled", False, 1, True),
        ("decoupled", False, 0, True),
        ("coupled", None, 1, True),
        ("plain", None, 1, True),
    ],
)
def test_a_decoupled_mode_without_draft_actors_is_announced(
    mode: str, hosted: bool | None, replicas: int, there: bool
) -> None:
    drafter = {"method": "ngram", "replicas": replicas} | ({} if hosted is None else {"hosted": hosted})
    config, _ = settle(from_mapping({"mode": mode, "drafters": [drafter]}), HERE, None)
    found = "".join(start_notes(config, HERE, token_identity("cpu", "float32", False)))
    assert ("drafters.0.hosted=false makes some" in found) == (not there)


def config(head: Path) -> Config:
    return from_mapping(
        {
            "mode": "decoupled",
            "target": {"model": str(tiny_target())},
            "drafters": [{"method": "ngram"}, {"method": "eagle", "model": str(head)}],
        }
    )


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(load_head(str(tiny_eagle()), str(tiny_target())), tmp_path)
    return tmp_path


def test_a_head_and_a_model_are_not_taken_for_each_other(head: Path) -> None:
    model = r"drafters\.1\.model: .*no draft_vocab_size.* Fix: .*method: draft_model"
    with pytest.raises(ModelLoadError, match=model):
        require_named(config(tiny_draft()), HERE)
    with pytest.raises(ModelLoadError, match=model):
        export_what_drafters_read(config(tiny_draft()))
    settings = config(head)
    settings.drafters[1].method = "draft_model"
    with pytest.raises(ModelLoadError, match=r"drafters\.1\.model: .* holds an EAGLE head.* method: eagle"):
        require_named(settings, HERE)
    settings.target.model = str(head)
    with pytest.raises(ModelLoadError, match=r"target\.model: .* holds an EAGLE head"):
        require_named(settings, HERE)
