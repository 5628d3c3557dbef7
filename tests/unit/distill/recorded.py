"""Recorded rollouts of the tiny target, made once per session."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, collect
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT, RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.hf import HfEngine
from tests.tiny import tiny_prompt_ids, tiny_target

EOS = 1


def make_engine(**limits: Any) -> HfEngine:
    model = load_model(str(tiny_target()))
    hidden = limits.pop("hidden_layers", (HEAD_INPUT,))
    return HfEngine(RaggedModel(model, 64 << 20, hidden), [EOS], **limits)


def requests(n: int, seed: int, temperature: float = 1.0) -> list[TargetRequest]:
    return [
        TargetRequest(str(i), ids, SamplingParams(temperature, max_tokens=40, seed=1000 * seed + i))
        for i, ids in enumerate(tiny_prompt_ids(n, seed))
    ]


@functools.cache
def recorded(part: str) -> list[CorpusRecord]:
    """`train` (80 rollouts), `heldout` (20) and `greedy` (8), with the states of a head's layers."""
    folder = Path(tempfile.mkdtemp(prefix="specactor-test-corpus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    wanted = {"train": requests(80, 5), "heldout": requests(20, 6), "greedy": requests(8, 6, 0.0)}[part]
    return collect(make_engine(hidden_layers=(0, 1, 2, HEAD_INPUT), max_batch=32), RecordStore(wanted, folder, part))
