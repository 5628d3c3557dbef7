"""What a trainer hands over is checked tensor by tensor, before anyone gets it, and every error names the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specactor_ray.core.errors import InputError, ModelLoadError
from specactor_ray.models.loading import load_model
from specactor_ray.models.weight_buckets import WeightLayout, fitting_weights, unpack
from tests.tiny import tiny_draft, tiny_target

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def taken(weights: Any, of: Path | None = None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    layout = WeightLayout.of(str(of or tiny_target()), str(dtype).removeprefix("torch."), 2**20)
    return dict(fitting_weights(weights, layout))


@pytest.fixture(scope="module")
def untied() -> dict[str, torch.Tensor]:
    return load_model(str(tiny_target())).state_dict()


@pytest.fixture(scope="module")
def tied() -> dict[str, torch.Tensor]:
    return load_model(str(tiny_draft())).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_dict_pairs_and_a_directory_are_the_same_weights(untied: dict[str, torch.Tensor]) -> None:
    assert same(taken(untied), untied)
    assert same(taken(iter(untied.items())), untied)
    assert same(taken(load_model(str(tiny_target())).named_parameters()), untied)
    assert same(taken(str(tiny_target())), untied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_arrive_in_the_targets_dtype(untied: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    other = {name: tensor.to(dtype) for name, tensor in untied.items()}
    assert same(taken(other), {name: tensor.float() for name, tensor in other.items()})
    assert taken(untied, dtype=torch.bfloat16)[HEAD].dtype is torch.bfloat16


def test_a_tensor_is_not_used_after_the_next_was_requested(untied: dict[str, torch.Tensor]) -> None:
    """As under DeepSpeed's ZeRO-3, which frees what it gathered."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in untied.items():
            whole = tensor.clone()
            yield name, whole
            whole.zero_()

    assert same(taken(gathered()), untied)


def test_tied_weights_may_come_once_or_twice(tied: dict[str, torch.Tensor]) -> None:
    own = {name: tensor for name, tensor in tied.items() if name != HEAD}
    assert HEAD in tied and same(taken(tied, tiny_draft()), own)
    assert same(taken(own, tiny_draft()), own)
    renamed = {HEAD if name == EMBEDDING else name: tensor for name, tensor in own.items()}
    assert same(taken(renamed, tiny_draft()), own)
    assert same(taken(tiny_draft(), tiny_draft()), own)


def test_tied_weights_that_differ_are_refused(tied: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InputError, match=rf"{HEAD} .*{EMBEDDING}.*tie_word_embeddings"):
        taken({**tied, HEAD: tied[HEAD] + 1e-3}, tiny_draft())


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module.model.norm.weight": torch.ones(64)}, r"no module\.model\.norm\.weight\. Did you mean model\.norm"),
        ({NORM: torch.ones(63)}, r"model\.norm\.weight has shape \(63,\); the target's has \(64,\)"),
        ({NORM: torch.ones(64, dtype=torch.int8)}, r"model\.norm\.weight is int8; allowed are float32"),
        ({NORM: torch.ones(64, dtype=torch.float8_e4m3fn)}, r"model\.norm\.weight is float8_e4m3fn"),
        ({NORM: torch.ones(64, device="meta")}, r"model\.norm\.weight is on the meta device"),
        ({NORM: torch.ones(64).to_sparse()}, r"model\.norm\.weight is sparse; give whole tensors"),
        ({NORM: [1.0] * 64}, r"model\.norm\.weight is list; give whole tensors"),
        ({NORM: torch.full((64,), float("nan"))}, r"model\.norm\.weight has a value that is no finite number"),
        ({NORM: torch.tensor([1.0] * 63 + [float("inf")])}, r"model\.norm\.weight has a value that is no finite"),
        ({NORM: torch.ones(0)}, r"model\.norm\.weight has shape \(0,\)"),  # a share under ZeRO-3
    ],
)
def test_errors_name_the_tensor(untied: dict[str, torch.Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        taken({**untied, **change})


@pytest.mark.parametrize(
    ("weights_of", "message"),
    [
        (lambda all_of_them: all_of_them[:-2], r" and 1 more missing"),
        (lambda all_of_them: [*all_of_them, (NORM, torch.ones(64))], r"model\.norm\.weight comes twice"),
        (lambda _: 7, "this is int"),
        (lambda _: torch.nn.Linear(2, 2), r"model\.state_dict\(\)"),
        (lambda _: [NORM], "one item is str"),
        (lambda _: "/no/where", "no dir"),
    ],
)
def test_incomplete_sets_are_refused(untied: dict[str, torch.Tensor], weights_of: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        taken(weights_of(list(untied.items())))


def test_checkpoints_in_shards_under_other_names_and_damaged(untied: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = load_model(str(tiny_target()))
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert same(taken(tmp_path / "shards"), untied)

    (tmp_path / "shards" / "config.json").rename(tmp_path / "config.json")  # trainers write weights alone
    assert same(taken(tmp_path / "shards"), untied)
    (tmp_path / "config.json").rename(tmp_path / "shards" / "config.json")

    alone = tmp_path / "alone"
    alone.mkdir()
    save_file({**untied, "model.strange": torch.zeros(2)}, alone / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.strange"):
        taken(alone)

    old = tmp_path / "old"  # a format of pickled files, which transformers reads
    old.mkdir()
    (old / "config.json").write_bytes((tmp_path / "shards" / "config.json").read_bytes())
    torch.save(untied, old / "pytorch_model.bin")
    assert same(taken(old), untied)

    next((tmp_path / "shards").glob("*.safetensors")).write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match="safetensors"):
        taken(tmp_path / "shards")
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        taken(tmp_path / "shards")


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
