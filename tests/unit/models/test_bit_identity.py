"""Tokens and log-probabilities are the same bits in every mode where kernels do not depend on the batch: dense models
with `hf` on CPUs.

Plain decoding of one request at a time is compared with verification of drafts of changing lengths, right and wrong
ones, among changing numbers of other requests, whose prompts arrive in chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.identity import is_mixture, token_identity
from specactor_ray.core.types import Probe
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.hf import HfEngine
from tests.families import VOCAB_SIZE, save_model
from tests.tiny import tiny_target
from tests.unit.engine_conformance import Driver, answers, noisy_tails, requests

needs_bfloat16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this CPU has no AVX512_BF16: bfloat16 is not packed for oneDNN"
)


def engine(model: str, dtype: str, **limits: Any) -> Driver:
    return Driver(HfEngine(RaggedModel(load_model(model, dtype=dtype), 128 << 20), **limits))


def check(model: str, dtype: str, count: int, max_tokens: int) -> None:
    batch, one_by_one = requests(count, 0.9, max_tokens=max_tokens, ignore_eos=True), engine(model, dtype)
    truth, logprobs = dict[str, list[int]](), dict[str, list[float]]()
    for request in batch:
        found = answers(one_by_one, [request])
        truth, logprobs = truth | found.tokens, logprobs | found.logprobs
    for seed, limits in enumerate(({}, {"max_step_tokens": 24}, {"max_batch": 3, "max_step_tokens": 40})):
        found = answers(engine(model, dtype, **limits), batch, noisy_tails(truth, seed, one_by_one.vocab_size))
        assert found.tokens == truth
        assert found.logprobs == logprobs, "not the same bits"
        assert any(output.num_accepted for output in found.outputs)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_tiny_model(dtype: str) -> None:
    check(str(tiny_target()), dtype, count=12, max_tokens=40)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_mixtures_of_experts_differ_by_rounding(kind: str, dtype: str, tmp_path: Path) -> None:
    """Each expert's rows change with the batch, which no run calls identical."""
    model = RaggedModel(load_model(save_model(kind, tmp_path), dtype=dtype), 8 << 20)
    rng = np.random.default_rng(0)
    tokens, count = rng.integers(0, VOCAB_SIZE, 48), np.array([48])
    scores = []
    for others in (0, 1, 5):
        rows = np.array([model.cache.open(48) for _ in range(1 + others)])
        beside = [rng.integers(0, VOCAB_SIZE, 9 * n) for n in range(1, 1 + others)]
        counts = np.array([48, *map(len, beside)])
        logits = model.forward(
            rows, counts, np.concatenate([tokens, *beside]), np.where(np.arange(1 + others), 0, count)
        )
        scores.append(logits.float().log_softmax(-1)[:-1].gather(1, torch.from_numpy(tokens[1:, None]))[:, 0].numpy())
        for row in rows:
            model.cache.free(row)
    alone = Probe(tokens, scores[0], 1e-5 if dtype == "float32" else 0.05)
    assert max(alone.gap(beside) for beside in scores[1:]) <= alone.tolerance
    assert not token_identity("cpu", dtype, is_mixture(model.model.config.to_dict())).holds


@pytest.mark.e2e
@pytest.mark.slow
@needs_bfloat16
def test_smollm2() -> None:
    check("smollm2-135m", "bfloat16", count=3, max_tokens=16)
