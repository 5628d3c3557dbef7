"""Padded models compute what the model computes, in another shape; built-in names choose them."""

from __future__ import annotations

import itertools
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.models import builtin, loading, padded
from specactor_ray.models.checkpoint_files import read_config, weight_files
from specactor_ray.models.shapes import count_parameters
from tests.tiny import tiny_prompt_ids

PARAMETERS = 3e6


def padded_dir(source: Path, folder: Path, parameters: float = PARAMETERS) -> Path:
    folder.mkdir()
    padded.pad_checkpoint(source, parameters, folder)
    return folder


def random_llama(folder: Path, **shape: Any) -> Path:
    """A model with random norms, too: with equal ones a wrong place could not be seen."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96, **shape}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * (1.0 if "norm" in name else 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        *itertools.product(
            [
                {"num_attention_heads": heads, "num_key_value_heads": keys, **tied}
                for heads, keys in ((4, 4), (4, 2), (4, 1), (2, 1), (1, 1))
                for tied in ({}, {"tie_word_embeddings": True})
            ],
            [1e6],
        ),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}, 3e6),
        ({"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}, 2e7),
    ],
)
def test_logits_are_those_of_the_model(shape: dict[str, Any], parameters: float, tmp_path: Path) -> None:
    source = random_llama(tmp_path / "own", **shape)
    folder = padded_dir(source, tmp_path / "padded", parameters)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, got = (loading.load_model(str(path))(ids).logits for path in (source, folder))
    assert torch.allclose(expected, got, rtol=0, atol=2e-5 * float(expected.abs().max()))
    count, text = count_parameters(str(folder))
    assert abs(count / parameters - 1) < 0.1 and text.hidden_size % 128 == 0 and text.intermediate_size % 128 == 0
    own = read_config(source)
    assert text.head_dim == own["hidden_size"] // own["num_attention_heads"] and text.hidden_size > own["hidden_size"]
    groups = [heads // keys for heads, keys in ((text.num_attention_heads, text.num_key_value_heads),
              (own["num_attention_heads"], own["num_key_value_heads"]))]  # fmt: skip
    assert groups[0] == groups[1]


def test_files_are_of_a_size_that_every_machine_maps(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded, "_FILE_BYTES", 4_000_000)
    folder = padded_dir(tiny_model_dir, tmp_path / "parts")
    files = weight_files(folder)
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 4_100_000
    monkeypatch.undo()
    whole = loading.load_model(str(padded_dir(tiny_model_dir, tmp_path / "whole"))).state_dict()
    parts = loading.load_model(str(folder)).state_dict()
    assert whole.keys() == parts.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.fixture(scope="module")
def tiny_padded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded_dir(tiny_model_dir, tmp_path_factory.mktemp("padded") / "model")


def test_answers_are_those_of_the_model(tiny_model_dir: Path, tiny_padded: Path) -> None:
    own, big = (loading.load_model(str(path)) for path in (tiny_model_dir, tiny_padded))
    for prompt in tiny_prompt_ids(5):
        outputs = [one.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40) for one in (own, big)]
        assert torch.equal(*outputs)
    assert loading.load_tokenizer(str(tiny_padded)).eos_token_id == own.generation_config.eos_token_id


def test_training_changes_no_zero(tiny_model_dir: Path, tiny_padded: Path) -> None:
    """So a padded model learns what the model would, and weight updates keep its text."""
    from safetensors.torch import load_file

    model, own = loading.load_model(str(tiny_padded)), load_file(tiny_model_dir / "model.safetensors")
    model.requires_grad_(True)
    ids = torch.tensor([tiny_prompt_ids(1)[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        corner = tuple(slice(size) for size in own[name].shape)
        assert weight.grad[corner].any()
        weight.grad[corner] = 0.0
        assert not weight.grad.any(), name


def test_a_size_that_is_too_small_names_the_smallest(tiny_model_dir: Path) -> None:
    config = {**read_config(tiny_model_dir), "num_hidden_layers": 100}
    with pytest.raises(ModelLoadError, match="ask for 15 million or more"):
        padded.padded_shape(config, 2e6)
    shape = padded.padded_shape(config, 15e6)
    assert shape["hidden_size"] == 128 and shape["intermediate_size"] == 256


def test_a_full_disk_is_named_before_anything_is_written(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(padded.shutil, "disk_usage", lambda folder: usage(1_000_000))
    with pytest.raises(ModelLoadError, match=r"0\.0 GB are free.*SPECACTOR_CACHE"):
        padded_dir(tiny_model_dir, tmp_path / "model")
    assert not [*(tmp_path / "model").glob("*.safetensors")]


# ---- built-in names ----


@pytest.fixture
def cache(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which the built-in model is the tiny one."""
    monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path))
    shutil.copytree(tiny_model_dir, tmp_path / "models" / f"smollm2-135m-v{builtin._RECIPE_VERSION}")
    return tmp_path / "models"


def test_a_name_with_a_size_is_a_model_like_others(cache: Path) -> None:
    assert loading.require_model("smollm2-135m@3m") is None  # it is made when it is read
    folder = cache / f"smollm2-135m@0.003b-v{builtin._RECIPE_VERSION}"
    assert loading.locate_model("smollm2-135m@3m") == loading.locate_model("smollm2-135m@0.003B") == (folder, None)
    assert loading.require_model("smollm2-135m@3m") == folder
    assert 2.8e6 < count_parameters("smollm2-135m@3m")[0] < 3.2e6
    assert loading.load_model_config("smollm2-135m@3m").hidden_size == read_config(folder)["hidden_size"] > 64
    assert loading.load_tokenizer("smollm2-135m@3m").eos_token_id == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("smollm2-135m@100k", "smollm2-135m@7b"),
        ("smollm2-135m@main", "smollm2-135m@7b"),
        ("smollm2-135m~0.05", "0.1 to 0.95"),
        ("smollm2-135m~1", "0.1 to 0.95"),
        ("smollm2-135m~.0", "0.1 to 0.95"),
        ("smollm2-135m~0.70000001", "six digits"),
        ("smollm2-135m@٧b", "smollm2-135m@7b"),
        ("smollm2-135m@9999999999999999999b", "up to 1000b"),
        (f"smollm2-135m@{'9' * 200}m", "up to 1000b"),
        ("smollm2-135m~", "smollm2-135m~0.7"),
        ("smollm2-135m@1b~0.7", "or both"),
        ("smollm2-135m@0.1m", "million or more"),
    ],
)
def test_names_that_are_refused(cache: Path, name: str, fix: str) -> None:
    for call in (loading.require_model, loading.load_model_config):
        with pytest.raises(ModelLoadError) as caught:
            call(name)
        assert fix in str(caught.value)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"smollm2-135m-v{builtin._RECIPE_VERSION}"]


def test_names_of_different_numbers_are_different_folders() -> None:
    names = ["smollm2-135m@1.23456789b", "smollm2-135m@1.23456711b", "smollm2-135m~0.700001", "smollm2-135m~0.7"]
    assert len({builtin._parse(name).folder for name in names}) == len(names)
    for one, other in (("@1234.56789m", "@1.23456789B"), ("@7b", "@7000.0m"), ("~.7", "~0.700")):
        assert builtin._parse(f"smollm2-135m{one}").folder == builtin._parse(f"smollm2-135m{other}").folder
    assert builtin._parse("smollm2-135m@1000b").folder.name.startswith("smollm2-135m@1000b-")


def test_a_folder_of_such_a_name_is_that_folder(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, "smollm2-135m@mine")
    assert loading.load_model_config("smollm2-135m@mine").hidden_size == 64
