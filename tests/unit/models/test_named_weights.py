"""What is sent, saved and loaded is a model's whole persistent state: parameters, and buffers in full precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError
from specactor_ray.learner.deepspeed_engine import Rendezvous
from specactor_ray.learner.engine import WorkCounter
from specactor_ray.learner.trainer import WEIGHTS, Trainer
from specactor_ray.models.loading import load_empty_model, load_model, named_weights, tied, weight_shapes
from specactor_ray.models.weight_buckets import WeightLayout, fitting_weights, pack, unpack
from tests.families import FAMILIES, make_model, save_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_dict_is_accepted_as_it_is_and_arrives_whole(name: str, tmp_path: Path) -> None:
    folder, whole = save_model(name, tmp_path), make_model(name, seed=1).state_dict()
    layout = WeightLayout.of(folder, "float32", 10_000)
    sent = {key: tensor for bucket in layout.buckets(whole) for key, tensor in unpack(bucket)}
    assert sent.keys() == whole.keys() - layout.tied.keys()
    assert all(torch.equal(tensor, whole[key]) for key, tensor in sent.items())
    assert weight_shapes(load_empty_model(folder)) == (dict(layout.shapes), layout.tied)
    assert dict(fitting_weights(folder, layout)).keys() == sent.keys(), "the same from a directory"


def test_tables_that_are_not_saved_are_not_sent_and_ties_are_found() -> None:
    model = make_model("qwen3-tied")
    tables = {name for name, _ in model.named_buffers()}
    assert tables and tables.isdisjoint(name for name, _ in named_weights(model, every_name=True))
    assert tied(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in dict(named_weights(model))


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_a_buffer_is_sent_in_float32_to_a_target_in_bfloat16(name: str, tmp_path: Path) -> None:
    layout = WeightLayout.of(save_model(name, tmp_path), "bfloat16", 2**20)
    served = load_model(str(tmp_path), dtype="bfloat16").state_dict()
    assert dict(layout.dtypes) == {key: tensor.dtype for key, tensor in served.items()}
    whole = make_model(name, seed=1).state_dict()
    sent = {key: tensor for bucket in layout.buckets(whole) for key, tensor in unpack(bucket)}
    assert torch.equal(sent[BIAS], whole[BIAS]) and sent["model.norm.weight"].dtype is torch.bfloat16
    lacking = {key: tensor for key, tensor in whole.items() if key != BIAS}
    with pytest.raises(InputError, match=rf"{BIAS} .*state_dict"):
        list(layout.buckets(lacking))


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "ernie4_5_moe", "gpt_oss", "minimax_m2", "apertus"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_weight_is_sent_in_fewer_bits_than_it_is_served_in(name: str, dtype: str, tmp_path: Path) -> None:
    """Routers in float32, some by their class and some by the list of transformers."""
    layout = WeightLayout.of(save_model(name, tmp_path), dtype, 2**20)
    served = load_model(str(tmp_path), dtype=dtype).state_dict()
    assert {key: torch.promote_types(sent, served[key].dtype) for key, sent in layout.dtypes.items()} == layout.dtypes


def test_tensors_of_all_kinds_share_a_bucket() -> None:
    whole = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "count": torch.tensor(7),
        "bias": torch.randn(3),
        "nothing": torch.zeros(0, 4),
        "ids": torch.arange(5, dtype=torch.int32),
    }
    dtypes = {key: tensor.dtype for key, tensor in whole.items()}
    bucket = pack(whole.items(), dtypes)
    found = dict(unpack(bucket))
    assert {key: tensor.dtype for key, tensor in found.items()} == dtypes
    assert all(torch.equal(found[key], tensor) for key, tensor in whole.items())

    layout = WeightLayout(
        "m", "float32", False, {key: tuple(tensor.shape) for key, tensor in whole.items()}, {}, dtypes, 2**20
    )
    assert len(list(layout.buckets(whole))) == 1
    for wrong in (torch.randn(5), torch.arange(5, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"ids .*int32"):
            list(layout.buckets({**whole, "ids": wrong}))


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_a_trainer_sends_saves_and_resumes_buffers(name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path / "model")
    config = from_mapping({"target": {"model": folder, "dtype": "bfloat16"}})
    alone = Rendezvous(0, 1, "", 0)
    trainer = Trainer(config, None, alone, WorkCounter())
    bias = trainer.engine.policy.model.get_buffer(BIAS)
    bias += 1.25  # as a balancing rule does
    sent = {key: tensor for bucket in trainer.buckets() if bucket for key, tensor in unpack(bucket)}
    assert torch.equal(sent[BIAS], bias)
    (tmp_path / "checkpoint").mkdir()
    with_tokenizer(tmp_path / "model")
    assert not trainer.save(tmp_path / "checkpoint").problem
    assert torch.equal(load_model(str(tmp_path / "checkpoint" / WEIGHTS)).get_buffer(BIAS), bias)
    resumed = Trainer(config, tmp_path / "checkpoint", alone, WorkCounter())
    assert torch.equal(resumed.engine.policy.model.get_buffer(BIAS), bias)


def with_tokenizer(folder: Path) -> None:
    from specactor_ray.models.loading import load_tokenizer
    from tests.tiny import tiny_target

    load_tokenizer(str(tiny_target())).save_pretrained(folder)
