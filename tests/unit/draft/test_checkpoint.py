"""EAGLE heads on disk: both formats, and what is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.draft.eagle.checkpoint import load_head, read_head_config, save_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead
from tests.tiny import tiny_target
from tests.unit.draft.test_eagle import head


def load_with(tmp_path: Path, changes: dict[str, Any]) -> str:
    """The error of loading a head with other values at dotted keys of its `config.json`."""
    save_head(head(), tmp_path)
    path = tmp_path / "config.json"
    facts = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(ModelLoadError) as caught:
        load_head(str(tmp_path), str(tiny_target()))
    return str(caught.value)


def test_a_head_survives_the_disk(tmp_path: Path) -> None:
    first = head()
    save_head(first, tmp_path)
    second = load_head(str(tmp_path), str(tiny_target()))
    assert second.config == first.config
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())


def test_the_files_follow_the_format_of_speculators(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_head(head(), tmp_path)
    facts, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert facts["speculators_model_type"] == "eagle3" and facts["draft_vocab_size"] == len(weights["d2t"])
    assert facts["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert weights["t2d"].sum() == facts["draft_vocab_size"]
    hidden = facts["transformer_layer_config"]["hidden_size"]
    assert weights["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * hidden


def test_the_format_of_the_authors_loads(tmp_path: Path) -> None:
    first = head()
    config = first.config
    facts = {**config.layer, "draft_vocab_size": config.draft_vocab_size}
    facts["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    weights = {key.replace("layers.0.", "midlayer."): value for key, value in trained_weights(first).items()}
    target_has_draft = torch.zeros(512, dtype=torch.bool)
    target_has_draft[first.draft_token_ids()] = True
    mapping = {"d2t": first.d2t, "t2d": target_has_draft}
    torch.save({**weights, **mapping}, tmp_path / "pytorch_model.bin")
    second = load_head(str(tmp_path), str(tiny_target()))
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_hidden_size": 4096}, ["4096 numbers", "has 64"]),
        ({"transformer_layer_config.vocab_size": 32000}, ["32000 tokens", "has 512"]),
        ({"specactor_ray": {"verifier_layers": 30}}, ["30 decoder layers", "has 4"]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, ["27 decoder layers", "has 4"]),
        ({"speculators_model_type": "mlp"}, ["mlp", "eagle3"]),
        ({"draft_vocab_size": 77}, ["77"]),
    ],
)
def test_a_head_for_another_target_is_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    error = load_with(tmp_path, change)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_vocab_size", "many"),
        ("draft_vocab_size", 0),
        ("transformer_layer_config", [1, 2]),
        ("transformer_layer_config.hidden_size", {}),
        ("transformer_layer_config.num_attention_heads", True),
        ("transformer_layer_config.num_hidden_layers", "one"),
        ("transformer_layer_config.rope_parameters", 7),
        ("transformer_layer_config.hidden_act", ["silu"]),
        ("target_hidden_size", -64),
        ("eagle_aux_hidden_state_layer_ids", ["low"]),
        ("eagle_aux_hidden_state_layer_ids", [0]),
        ("speculators_config.verifier", [1]),
        ("eagle_config", 3),
        ("specactor_ray", [1]),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    error, last = load_with(tmp_path, {key: value}), key.rpartition(".")[2]
    assert str(tmp_path / "config.json") in error and (last in ("rope_parameters", "hidden_act") or last in error)


@pytest.mark.parametrize("text", ["[" * 100000, '{"draft_vocab_size": ' + "9" * 5000 + "}", '{"a"'])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json is not valid JSON"):
        read_head_config(str(tmp_path), str(tiny_target()))


@pytest.mark.parametrize("weights", [b"nothing", b"", None])
def test_weights_that_are_none_are_not_run(tmp_path: Path, weights: bytes | None) -> None:
    save_head(head(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    if weights is None:
        torch.save({"a": Path("x")}, path)  # a class that torch.load would have to import
    else:
        path.write_bytes(weights)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_head(str(tmp_path), str(tiny_target()))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        read_head_config(str(tmp_path), str(tiny_target()))
    save_head(head(), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_head(str(tmp_path), str(tiny_target()))


def of_mapping(folder: Path, **mapping: torch.Tensor | None) -> str:
    """The error of loading a head of 128 draft tokens whose tensors of these names are others, or are missing."""
    from safetensors.torch import load_file, save_file

    save_head(EagleHead(dataclasses.replace(head().config, draft_vocab_size=128)), folder)
    weights = {**load_file(folder / "model.safetensors"), **mapping}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load_head(str(folder), str(tiny_target()))
    return str(caught.value)


def test_offsets_that_contradict_the_ids_of_the_target_are_refused(tmp_path: Path) -> None:
    size, shown = 128, torch.zeros(512, dtype=torch.bool)
    assert "contradict each other" in of_mapping(tmp_path, d2t=torch.arange(size))
    assert "contradict each other" in of_mapping(tmp_path, t2d=shown)
    assert "has shape (511,), not (512,)" in of_mapping(tmp_path, t2d=shown[:511].clone())
    assert "holds ids, not offsets" in of_mapping(tmp_path, d2t=torch.arange(size), t2d=None)
