"""`bench rollout --peers`: vLLM as it is, with its own drafters; it loads the heads that are written here."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specactor_ray.bench.peers import measure_peers
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.checkpoint import load_head, save_head
from specactor_ray.draft.eagle.head import EagleHead
from tests.tiny import tiny_eagle, tiny_prompt_ids, tiny_target, tiny_vllm_target
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.slow, pytest.mark.timeout(500)]


def head_of_wide_heads(folder: Path) -> Path:
    """A head of random weights whose attention vLLM can run."""
    config = load_head(str(tiny_eagle()), str(tiny_target())).config
    layer = {**config.layer, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    save_head(EagleHead(replace(config, layer=layer)), folder)
    return folder


def test_vllm_runs_plain_and_with_its_own_drafters(tmp_path: Path) -> None:
    config = from_mapping(
        {
            "mode": "coupled",
            "target": {
                "model": str(tiny_vllm_target()),
                "backend": "vllm",
                "compiled": False,
                "max_model_len": 256,
                "kv_cache_gb": 0.05,
                "dtype": "float32",
            },
            "drafters": [
                {"method": "ngram"},
                {"method": "eagle", "model": str(head_of_wide_heads(tmp_path))},
            ],
            "speculation": {"window": 4},
        }
    )
    workloads = [("tiny", tuple(tiny_prompt_ids(16)), (SamplingParams(temperature=0.0, max_tokens=24),) * 16)]
    shown = io.StringIO()
    rows = measure_peers(config, [16], workloads, Console(file=shown, width=200))
    labels = [row["variant"].rpartition(" ")[0] for row in rows]
    assert labels == ["vllm plain", "vllm ngram", "vllm eagle3"], shown.getvalue()
    assert all(row["requests"] == 16 and row["tokens"] > 0 and row["seconds"] > 0 for row in rows)
    plain, ngram, eagle = rows
    assert plain["mode"] == "plain" and plain["metrics"]["acceptance_length"] == 1.0
    for row in (ngram, eagle):
        assert 1.0 <= row["metrics"]["acceptance_length"] <= 5.0 and row["metrics"]["supply_share"] <= 1.0
        assert row["metrics"]["accepted_tokens"] <= row["metrics"]["drafted_tokens"]
    assert ngram["metrics"]["accepted_tokens"] > 0 and eagle["metrics"]["drafted_tokens"] > 0
