"""Weights from a trainer: a model's whole persistent state, checked tensor by tensor before any engine gets
it, with errors that name the tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from specactor_ray.actors.process import ActorHost
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError, ModelLoadError
from specactor_ray.learner.deepspeed_engine import Rendezvous
from specactor_ray.learner.trainer import WEIGHTS, Trainer
from specactor_ray.models.loading import load_empty_model, load_model, load_tokenizer, named_weights, tied
from specactor_ray.models.weight_buckets import WeightLayout, fitting_weights, pack, unpack
from specactor_ray.transport.messages import WeightSet
from tests.families import FAMILIES, make_model, save_model
from tests.tiny import tiny_draft, tiny_target

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def taken(weights: Any, of: Path | None = None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    layout = WeightLayout.of(str(of or tiny_target()), str(dtype).removeprefix("torch."), 2**20)
    return dict(fitting_weights(weights, layout))


@pytest.fixture(scope="module")
def untied() -> dict[str, torch.Tensor]:
    return load_model(str(tiny_target())).state_dict()


@pytest.fixture(scope="module")
def shared() -> dict[str, torch.Tensor]:
    return load_model(str(tiny_draft())).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_form_has_the_same_weights_in_the_targets_dtype(untied: dict[str, torch.Tensor]) -> None:
    for form in (untied, iter(untied.items()), load_model(str(tiny_target())).named_parameters(), str(tiny_target())):
        assert same(taken(form), untied)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other = {name: tensor.to(dtype) for name, tensor in untied.items()}
        assert same(taken(other), {name: tensor.float() for name, tensor in other.items()})
    assert taken(untied, dtype=torch.bfloat16)[HEAD].dtype is torch.bfloat16


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_of_every_family_from_a_directory(name: str, tmp_path: Path) -> None:
    folder, whole = save_model(name, tmp_path), make_model(name).state_dict()
    layout = WeightLayout.of(folder, "float32", 10_000)
    assert same(dict(fitting_weights(folder, layout)), {key: whole[key] for key in whole.keys() - layout.tied.keys()})
    assert tied(load_empty_model(folder)) == layout.tied


def test_a_tensor_is_not_used_after_the_next_was_requested(untied: dict[str, torch.Tensor]) -> None:
    """As under DeepSpeed's ZeRO-3, which frees what it gathered."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in untied.items():
            whole = tensor.clone()
            yield name, whole
            whole.zero_()

    assert same(taken(gathered()), untied)


def test_tied_weights_may_come_once_or_twice_and_are_equal(shared: dict[str, torch.Tensor]) -> None:
    own = {name: tensor for name, tensor in shared.items() if name != HEAD}
    renamed = {HEAD if name == EMBEDDING else name: tensor for name, tensor in own.items()}
    for form in (shared, own, renamed, tiny_draft()):
        assert same(taken(form, tiny_draft()), own)
    with pytest.raises(InputError, match=rf"{HEAD} .*{EMBEDDING}.*tie_word_embeddings"):
        taken({**shared, HEAD: shared[HEAD] + 1e-3}, tiny_draft())


@pytest.mark.parametrize(
    ("weights_of", "message"),
    [
        (lambda own: {**own, "module.model.norm.weight": torch.ones(64)}, r"no module.*Did you mean model\.norm"),
        (lambda own: {**own, NORM: torch.ones(63)}, rf"{NORM} has shape \(63,\); the target's has \(64,\)"),
        (lambda own: {**own, NORM: torch.ones(0)}, rf"{NORM} has shape \(0,\)"),  # a share under ZeRO-3
        (lambda own: {**own, NORM: torch.ones(64, dtype=torch.int8)}, rf"{NORM} is int8; allowed are float32"),
        (lambda own: {**own, NORM: torch.ones(64, device="meta")}, rf"{NORM} is on the meta device"),
        (lambda own: {**own, NORM: torch.ones(64).to_sparse()}, rf"{NORM} is sparse; give whole tensors"),
        (lambda own: {**own, NORM: [1.0] * 64}, rf"{NORM} is list; give whole tensors"),
        (lambda own: {**own, NORM: torch.full((64,), torch.nan)}, rf"{NORM} has a value that is no finite number"),
        (lambda own: {**own, NORM: torch.tensor([1.0] * 63 + [torch.inf])}, rf"{NORM} has a value that is no finite"),
        (lambda own: list(own.items())[:-2], r" and 1 more missing"),
        (lambda own: [*own.items(), (NORM, torch.ones(64))], rf"{NORM} comes twice"),
        (lambda _: 7, "this is int"),
        (lambda _: torch.nn.Linear(2, 2), r"model\.state_dict\(\)"),
        (lambda _: [NORM], "one item is str"),
        (lambda _: "/no/where", "no dir"),
    ],
)
def test_errors_name_the_tensor(untied: dict[str, torch.Tensor], weights_of: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        taken(weights_of(untied))


def test_checkpoints_in_shards_under_other_names_and_damaged(untied: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shards, alone, old = tmp_path / "shards", tmp_path / "alone", tmp_path / "old"
    load_model(str(tiny_target())).save_pretrained(shards, max_shard_size="200KB")
    assert len(list(shards.glob("*.safetensors"))) > 1 and same(taken(shards), untied)

    (shards / "config.json").rename(tmp_path / "config.json")  # trainers write weights alone
    assert same(taken(shards), untied)

    alone.mkdir()
    save_file({**untied, "model.strange": torch.zeros(2)}, alone / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.strange"):
        taken(alone)

    old.mkdir()  # a format of pickled files, which transformers reads
    (tmp_path / "config.json").rename(old / "config.json")
    torch.save(untied, old / "pytorch_model.bin")
    assert same(taken(old), untied)

    file = next(shards.glob("*.safetensors"))
    for damage in (lambda: file.write_bytes(b"no tensors"), file.unlink):
        damage()
        with pytest.raises(ModelLoadError, match="safetensors"):
            taken(shards)


def test_buckets_hold_at_most_their_size_and_only_one_is_held(untied: dict[str, torch.Tensor]) -> None:
    requested = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in untied.items():
            requested.append(tensor.nbytes)
            yield name, tensor

    limit, done, whole = 100_000, 0, {}
    layout = WeightLayout.of(str(tiny_target()), "float32", limit)
    for bucket in layout.buckets(counted()):
        here = dict(unpack(bucket))
        size = sum(tensor.nbytes for tensor in here.values())
        done += size
        assert size <= limit or len(here) == 1
        assert sum(requested[:-1]) <= done, "more was requested than the buckets so far and the next tensor"
        whole |= here
    assert same(whole, untied)


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
    found = dict(unpack(pack(whole.items(), dtypes)))
    assert same(found, whole) and {key: tensor.dtype for key, tensor in found.items()} == dtypes
    shapes = {key: tuple(tensor.shape) for key, tensor in whole.items()}
    layout = WeightLayout("m", "float32", False, shapes, {}, dtypes, 2**20)
    assert len(list(layout.buckets(whole))) == 1
    for wrong in (torch.randn(5), torch.arange(5, dtype=torch.int64)):
        with pytest.raises(InputError, match=r"ids .*int32"):
            list(layout.buckets({**whole, "ids": wrong}))


# ---- buffers and data types ----


def test_tables_that_are_not_saved_are_not_sent() -> None:
    model = make_model("qwen3-tied")
    tables = {name for name, _ in model.named_buffers()}
    assert tables and tables.isdisjoint(name for name, _ in named_weights(model, every_name=True))


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "ernie4_5_moe", "gpt_oss", "minimax_m2", "apertus", "glm4-moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_weight_is_sent_in_fewer_bits_than_it_is_served_in(name: str, dtype: str, tmp_path: Path) -> None:
    """Routers in float32, some by their class and some by the list of transformers, and buffers."""
    layout = WeightLayout.of(save_model(name, tmp_path), dtype, 2**20)
    served = load_model(str(tmp_path), dtype=dtype).state_dict()
    assert {key: torch.promote_types(sent, served[key].dtype) for key, sent in layout.dtypes.items()} == layout.dtypes


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_a_trainer_sends_saves_and_resumes_buffers(name: str, tmp_path: Path) -> None:
    """In float32, to a target in bfloat16."""
    folder, saved = save_model(name, tmp_path / "model"), tmp_path / "checkpoint"
    load_tokenizer(str(tiny_target())).save_pretrained(folder)
    config = from_mapping({"target": {"model": folder, "dtype": "bfloat16"}})
    alone = Rendezvous(0, 1, "", 0)
    trainer = Trainer(config, None, alone, lambda: None)
    bias = trainer.engine.policy.model.get_buffer(BIAS)
    bias += 1.25  # as a balancing rule does
    sent = {key: tensor for bucket in trainer.buckets() if bucket for key, tensor in unpack(bucket)}
    assert torch.equal(sent[BIAS], bias) and sent[NORM].dtype is torch.bfloat16
    lacking = {key: tensor for key, tensor in sent.items() if key != BIAS}
    with pytest.raises(InputError, match=rf"{BIAS} .*state_dict"):
        list(trainer.layout.buckets(lacking))
    saved.mkdir()
    assert not trainer.save(saved).problem
    assert torch.equal(load_model(str(saved / WEIGHTS)).get_buffer(BIAS), bias)
    resumed = Trainer(config, saved, alone, lambda: None)
    assert torch.equal(resumed.engine.policy.model.get_buffer(BIAS), bias)


class Copies(TorchDispatchMode):
    """Counts what makes a copy of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "clone", "cat", "zeros", "zero_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_made_with_one_copy_of_each_tensor(dtype: torch.dtype, untied: dict[str, torch.Tensor]) -> None:
    with Copies() as copies:
        bucket = pack(untied.items(), dict.fromkeys(untied, dtype))
    assert copies.counts == {"copy_": len(untied)}, "of what is sent, one in host memory"
    assert same(dict(unpack(bucket)), {name: tensor.to(dtype) for name, tensor in untied.items()})


def test_limits_of_time_grow_with_the_size_of_weights() -> None:
    asked, host = list[float](), ActorHost()
    host.calls = SimpleNamespace(transport=SimpleNamespace(fetch=lambda _, limit_s: asked.append(limit_s) or []))
    for gigabytes in (0, 65):
        host.fetch_weights(WeightSet(1, (), gigabytes * 10**9))
    assert asked == [300.0, 950.0], "32B in bfloat16 through a network of 100 MB/s"
