"""Attention over pages: every path against each query alone in float64, and nothing in a layer waits for the device."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specactor_ray.models import paged_cache, ragged_attention, ragged_model
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import (
    Attention,
    AttentionRules,
    RaggedBatch,
    attend_masked,
    attend_on_cpu,
    attend_varlen,
    merge,
    reads_common_pages_once,
    to_device,
    why_masked,
)
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.ragged import places
from tests.attention import attending
from tests.tiny import tiny_target

CPU = torch.device("cpu")


FLASH_DTYPES = [torch.float16, torch.bfloat16]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`varlen_attn` on pages as FlashAttention 2 does it, with what that refuses."""
    if query.dtype not in FLASH_DTYPES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    rows, (total, heads, dim) = len(cu_seq_q) - 1, query.shape
    assert key.dtype == value.dtype == query.dtype and return_aux.lse and num_splits == 1
    for array, shape in ((cu_seq_q, (rows + 1,)), (cu_seq_k, (rows + 1,)), (seqused_k, (rows,))):
        assert array is not None and array.dtype == torch.int32 and array.shape == shape and array.is_contiguous()
    assert block_table is not None and block_table.dtype == torch.int32 and len(block_table) == rows > 0
    assert block_table.stride(-1) == query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    if key.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    if dim % 8 or dim > 256 or value.shape != key.shape or key.shape[3] != dim:
        raise RuntimeError("head_size must be a multiple of 8, at most 256, and the same for keys and values")
    assert heads == key.shape[2] or (enable_gqa and heads % key.shape[2] == 0)
    counts, lengths = cu_seq_q.diff(), seqused_k
    assert int(counts.min()) >= 1 and int(counts.max()) <= max_q and int(lengths.max()) <= max_k
    assert int(cu_seq_q[-1]) == total and int(lengths.min()) >= 1 and torch.equal(cu_seq_k.diff(), lengths)
    output, lse = torch.empty_like(query), torch.empty(heads, total)
    left, right = window_size
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seq_q.tolist())):
        k, v = (pool[block_table[row].long()].flatten(0, 1)[: lengths[row]].double() for pool in (key, value))
        k, v = (part.repeat_interleave(heads // key.shape[2], dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), k) * (dim**-0.5 if scale is None else scale)
        at = torch.arange(int(lengths[row]) - (end - begin), int(lengths[row]))[:, None]
        seen = torch.arange(int(lengths[row]))
        hidden = (seen > at + right) if right >= 0 else torch.zeros(1, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (seen < at - left)
        scores = scores.masked_fill(hidden, -math.inf)
        output[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)
        lse[:, begin:end] = scores.logsumexp(-1).float()
    return output, lse


def test_the_reference_is_called_as_the_real_function() -> None:
    ours, theirs = (inspect.signature(one).parameters for one in (flash_attention, varlen.varlen_attn))
    described = [[(one.name, one.kind, one.default) for one in found.values()] for found in (ours, theirs)]
    assert described[0] == described[1]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`varlen_attn` is the reference."""
    monkeypatch.setattr(varlen, "varlen_attn", flash_attention)
    for probe in (why_masked, reads_common_pages_once):
        probe.cache_clear()
    yield
    for probe in (why_masked, reads_common_pages_once):
        probe.cache_clear()


def load(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=dtype)


@dataclass
class Case:
    batch: RaggedBatch
    query: torch.Tensor
    rules: AttentionRules

    def outputs(self, attention: Attention) -> torch.Tensor:
        return attention(self.batch, 0, self.query, self.rules)

    def expected(self) -> torch.Tensor:
        """Each query and head alone."""
        cache, batch = self.batch.cache, self.batch
        keys, values = cache.keys[0].flatten(0, 1).double(), cache.values[0].flatten(0, 1).double()
        shared = self.query.shape[1] // keys.shape[1]
        outputs = []
        for row, (begin, end) in enumerate(itertools.pairwise(batch.starts.tolist())):
            for query in range(begin, end):
                last = int(batch.lengths[row]) - (end - query)
                first = 0 if self.rules.window is None else max(last - self.rules.window + 1, 0)
                at = np.arange(first, last + 1)
                slots = torch.from_numpy(
                    batch.pages[row, at // cache.page_size] * cache.page_size + at % cache.page_size
                )
                for head in range(self.query.shape[1]):
                    k, v = keys[slots.long(), head // shared], values[slots.long(), head // shared]
                    scores = k @ self.query[query, head].double() * self.rules.scaling
                    if self.rules.softcap is not None:
                        scores = torch.tanh(scores / self.rules.softcap) * self.rules.softcap
                    if self.rules.sinks is not None:
                        scores = torch.cat([scores, self.rules.sinks[head : head + 1].double()])
                    outputs.append(scores.softmax(0)[: len(v)] @ v)
        return torch.stack(outputs).view(len(self.query), self.query.shape[1], -1)


def make(seed: int, dtype: torch.dtype, page_size: int, most: int, extras: bool) -> Case:
    """Rows of random lengths and counts in scattered pages; what is in no row is not a number."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, shared, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([8, 16, 24]))
    shape = LayerShape(kv_heads, dim, int(rng.choice([8, 16])) if extras else dim)
    lengths = rng.integers(1, most, rng.integers(1, 6))
    counts = np.maximum(1, np.minimum(lengths, rng.choice([1, 4, most], len(lengths))))
    tokens = sum(-(-int(length) // page_size) for length in lengths) * 2 * page_size
    cache = PagedCache([shape], shape.bytes(dtype) * tokens, dtype, CPU, page_size)
    for pool in (cache.keys[0], cache.values[0]):
        pool.fill_(math.nan)
    rows = []
    for length in lengths.tolist():
        rows.append(cache.open(length))
        if rng.random() < 0.5:
            cache.open(1)
    cache.lengths[rows] = lengths - counts
    for row, length in zip(rows, lengths.tolist(), strict=True):
        pages = cache.page_table(np.array([row]), np.array([length]))[0]
        for pool in (cache.keys[0], cache.values[0]):
            for place, page in enumerate(pages.tolist()):
                end = min(length - place * page_size, page_size)
                pool[page, :end] = torch.randn(end, *pool.shape[2:]).to(dtype)
    batch = RaggedBatch(cache, np.array(rows), counts, ())
    query = torch.randn(kv_heads * shared, batch.num_tokens, dim).to(dtype).transpose(0, 1)
    rules = AttentionRules(
        float(rng.choice([0.2, 1.0])),
        int(rng.integers(1, most)) if rng.random() < 0.5 else None,
        float(rng.choice([2.0, 20.0])) if extras and rng.random() < 0.5 else None,
        torch.randn(kv_heads * shared) if extras and rng.random() < 0.5 else None,
    )
    return Case(batch, query, rules)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 3, 16]))
def test_masked_attention_equals_each_query_alone(seed: int, dtype: torch.dtype, page_size: int) -> None:
    case = make(seed, dtype, page_size, 40, extras=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(case.outputs(attend_masked).double(), case.expected(), atol=tolerance, rtol=tolerance)


def test_rows_of_unlike_counts_share_no_masked_call() -> None:
    cache = PagedCache([LayerShape(1, 8, 8)], 1 << 20, torch.float32, CPU)
    counts = np.array([1, 300, 64, 65, 1, 400])
    rows = np.array([cache.open(int(count)) for count in counts])
    groups = RaggedBatch(cache, rows, counts, ()).groups
    assert [(group.rows, group.num_queries, group.num_keys) for group in groups] == [
        (3, 64, 128), (1, 65, 128), (2, 400, 512)
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([torch.float16, torch.bfloat16]))
def test_calls_of_varlen_attention_equal_each_query_alone(seed: int, dtype: torch.dtype) -> None:
    case = make(seed, dtype, 256, 600, extras=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", flash_attention)
        outputs = case.outputs(attend_varlen)
    masked = case.outputs(attend_masked)
    assert torch.allclose(outputs.double(), masked.double(), atol=0.05, rtol=0.05)
    assert len(case.query) > 60 or torch.allclose(outputs.double(), case.expected(), atol=0.02, rtol=0.02)


def branched(seed: int, dtype: torch.dtype, page_size: int) -> Case:
    """Requests with branches, and rows alone; what the cache holds behind a row is not a number."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, shared = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    cache = PagedCache(
        [LayerShape(kv_heads, 16, 16)], 40 * page_size * kv_heads * 32 * dtype.itemsize, dtype, CPU, page_size
    )
    rows: list[int] = []
    for length in rng.integers(1, 4 * page_size, 3).tolist():
        row = cache.open(length)
        assert row is not None
        cache.lengths[row] = length
        ends = rng.integers(max(length - 9, 0), length + 1, rng.integers(0, 4))
        rows += [row, *cache.fork(np.full(len(ends), row), ends).tolist()]
    rng.shuffle(rows)
    packed, counts = np.array(rows), rng.choice([1, 1, 2, 5], len(rows))
    lengths = cache.lengths[packed] + counts
    assert cache.reserve_rows(packed, lengths).all()
    read = cache.page_table(packed, lengths)[
        np.arange(len(rows)).repeat(lengths), places(0 * lengths, lengths) // page_size
    ]
    slots = torch.from_numpy(read * page_size + places(0 * lengths, lengths) % page_size).long()
    for pool in (cache.keys[0], cache.values[0]):
        pool.fill_(math.nan)
        pool.flatten(0, 1)[slots] = torch.randn(len(slots), kv_heads, 16).to(dtype)
    batch = RaggedBatch(cache, packed, counts, ())
    return Case(
        batch, torch.randn(batch.num_tokens, kv_heads * shared, 16).to(dtype), AttentionRules(0.3, None, None, None)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_reading_common_pages_once_equals_each_query_alone(seed: int) -> None:
    calls: list[int] = []

    def counted(query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(int(options["seqused_k"].sum()))
        return flash_attention(query, *args, **options)

    case = branched(seed, torch.bfloat16, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", counted)
        whole = case.outputs(attend_varlen)
        assert case.batch.common is None, "so little is not worth a merge"
        del case.batch.__dict__["common"]
        patch.setattr(ragged_attention, "_LEAST_SAVED", 1e-9)
        reads_common_pages_once.cache_clear()
        outputs = case.outputs(attend_varlen)
    assert torch.allclose(outputs.double(), case.expected(), atol=0.02, rtol=0.02)
    assert torch.allclose(outputs.double(), whole.double(), atol=0.02, rtol=0.02)
    groups, common = case.batch.shared, case.batch.common
    if groups is not None:
        saved = int(((np.diff(groups.starts) - 1) * groups.pages).sum()) * 256
        again = int((case.batch.lengths * (case.batch.counts - 1)).sum())
        assert saved <= again if common is None else saved - again <= common.saved <= saved
    assert calls[0] - calls[-1] == (0 if common is None else common.saved)


def test_parts_of_attention_are_merged() -> None:
    query, keys, values = (torch.randn(shape) for shape in ((7, 3, 8), (40, 3, 8), (40, 3, 8)))
    scores = 2 * torch.einsum("qhd,khd->hqk", query, keys)
    parts = [(part.softmax(-1), part.logsumexp(-1)) for part in (scores, scores[..., :31], scores[..., 31:])]
    (whole, _), (first, first_lse), (second, second_lse) = parts
    own, other = torch.einsum("hqk,khd->qhd", second, values[31:]), torch.einsum("hqk,khd->qhd", first, values[:31])
    merge(own, second_lse, other, first_lse)
    torch.testing.assert_close(own, torch.einsum("hqk,khd->qhd", whole, values))


@pytest.mark.usefixtures("flash")
def test_common_pages_are_read_for_each_row_where_sums_are_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = CPU, torch.bfloat16, 256, 4, LayerShape(2, 64, 64)
    assert reads_common_pages_once(*shape)
    for wrong, reason in ((lambda lse: lse.T, "size"), (lambda lse: lse / math.log(2), "other results")):
        reads_common_pages_once.cache_clear()
        monkeypatch.setattr(varlen, "varlen_attn", lambda *args, wrong=wrong, **options: apply(wrong, *args, **options))
        with caplog.at_level(logging.WARNING):
            assert not reads_common_pages_once(*shape) and reason in caplog.text


def apply(
    wrong: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = flash_attention(*args, **options)
    return output, wrong(lse)


@pytest.mark.usefixtures("flash")
def test_what_varlen_attention_refuses_is_masked_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    half, shape = torch.bfloat16, LayerShape(2, 64, 64)
    with caplog.at_level(logging.WARNING):
        assert why_masked(CPU, half, 256, 4, shape, "") == ""
        assert not caplog.records
        for _ in range(2):
            assert "fp16 and bf16" in why_masked(CPU, torch.float32, 256, 4, shape, "")
        assert len(caplog.records) == 1 and "fp16 and bf16" in caplog.text
        assert "multiple of 8" in why_masked(CPU, half, 256, 4, LayerShape(2, 64, 32), "")
        assert "multiple of 8" in why_masked(CPU, half, 256, 4, LayerShape(2, 12, 12), "")
        assert "divisible by 256" in why_masked(CPU, half, 128, 4, shape, "")
        assert why_masked(CPU, half, 256, 4, shape, "attention sinks") == "attention sinks"


@pytest.mark.usefixtures("flash")
def test_a_kernel_that_reads_behind_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*args: Any, seqused_k: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        longer = seqused_k + 1
        starts = torch.cat([longer.new_zeros(1), longer.cumsum(0)]).int()
        return flash_attention(*args[:4], starts, args[5], args[6] + 1, seqused_k=longer, **options)

    monkeypatch.setattr(varlen, "varlen_attn", careless)
    assert "behind the end" in why_masked(CPU, torch.bfloat16, 256, 4, LayerShape(2, 64, 64), "")


def test_arrays_reach_the_device_as_they_are() -> None:
    arrays = (np.arange(5), np.arange(3, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(2))
    assert [one.tolist() for one in to_device(arrays, CPU)] == [one.tolist() for one in arrays]


def test_a_model_on_varlen_attention_computes_what_it_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill chunks, verified drafts and single tokens, packed, in half precision."""
    monkeypatch.setattr(varlen, "varlen_attn", flash_attention)
    monkeypatch.setattr(paged_cache, "_CPU_PAGE", 256)
    monkeypatch.setattr(ragged_model, "cheapest_row_counts", lambda packed: [0])  # devices are not padded
    steps, logits = ([600, 1, 30, 5], [1, 4, 1, 1], [3, 70, 1, 9]), []
    for attention in (attend_on_cpu, attend_varlen):
        with attending(attention):
            model = RaggedModel(load(torch.bfloat16), 32 << 20)
            rows, tokens = np.array([model.cache.open(700) for _ in range(4)]), np.random.default_rng(0)
            for counts in steps:
                fed = tokens.integers(model.vocab_size, size=sum(counts))
                logits.append(model.forward(rows, np.array(counts), fed, np.minimum(counts, 3)).logits.float())
    for ours, theirs in zip(logits[:3], logits[3:], strict=True):
        assert float((ours - theirs).abs().max() / ours.abs().max()) < 0.03


class Watch(TorchDispatchMode):
    """Operators by name; those that copy from the device, or are as long as a tensor's values say, are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_values = name in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "repeat_interleave",
            "bincount",
            "unique2",
        )
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        assert not by_values and not by_mask, f"{name} waits for the device"
        assert name not in ("lift_fresh", "_to_copy"), f"{name} makes a tensor"
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


class NoHost(TorchFunctionMode):
    """Nothing goes to the host or comes from there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in (
            "item", "tolist", "numpy", "cpu", "to", "cuda", "from_numpy", "tensor", "as_tensor", "__bool__", "__int__",
            "__float__", "__index__",
        ), f"{func.__name__} waits for the device"  # fmt: skip
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", [attend_masked, attend_varlen])
def test_nothing_in_a_layer_waits_for_the_device(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_, **__: (torch.zeros_like(query), query[..., 0].T))
    layers: list[set[str]] = []

    def watched(batch: RaggedBatch, layer: int, *arguments: Any) -> torch.Tensor:
        with Watch() as watch, NoHost():
            output = attend(batch, layer, *arguments)
        layers.append(watch.seen)
        return output

    def watched_whole(batch: RaggedBatch, *arrays: torch.Tensor) -> torch.Tensor:
        if attention is attend_masked:
            assert batch.groups, "made once per forward, on the host"
        with Watch():
            return run(batch, *arrays)

    with attending(attention):
        monkeypatch.setattr(RaggedModel, "_check_split_forward", lambda _: None)  # nothing attends with these zeros
        model = RaggedModel(load(torch.float32), 8 << 20)
        attend, run = RaggedBatch.attend, model._run
        monkeypatch.setattr(RaggedBatch, "attend", watched)
        monkeypatch.setattr(model, "_run", watched_whole)
        rows = np.array([model.cache.open(100) for _ in range(3)])
        for counts in (np.array([70, 3, 1]), np.array([1, 2, 1])):
            model.forward(rows, counts, np.ones(counts.sum(), np.int64), np.ones(3, np.int64))
    made = {"arange", "zeros", "full"}
    assert len(layers) == 2 * len(model.cache.keys) and all("index_copy_" in seen for seen in layers)
    assert not any(seen & made for i, seen in enumerate(layers) if i % len(model.cache.keys)), "masks are made once"


WAITS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[x > 0],
    lambda x: x.index_put((x > 0,), x.sum()),
    lambda x: x.nonzero(),
    lambda x: torch.where(x > 0),
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: bool(x.any()),
    lambda x: torch.tensor([1, 2]),
]


@pytest.mark.parametrize("offend", WAITS)
def test_the_watch_sees_what_waits(offend: Callable[[torch.Tensor], Any]) -> None:
    values = torch.ones(3)
    with pytest.raises(AssertionError, match=r"waits|makes"), Watch(), NoHost():
        offend(values)
