"""Bursts on a GPU: a captured step drafts what the same step drafts without a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.machine import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.checkpoint import load_head
from specactor_ray.draft.eagle.proposer import EagleProposer, EagleRunner
from specactor_ray.draft.model import DraftModelProposer, ModelProposer
from specactor_ray.models.captured import CudaCapturer
from specactor_ray.models.ragged_model import RaggedModel
from tests.by_name import ByName, extend_fully
from tests.fakes.capturer import FakeCapturer
from tests.tiny import tiny_draft, tiny_eagle, tiny_prompt_ids, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def draft_model(**options: Any) -> ModelProposer:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.bfloat16).to("cuda")
    return DraftModelProposer(RaggedModel(model, 64 << 20), **options)


def eagle(**options: Any) -> ModelProposer:
    head = load_head(str(tiny_eagle()), str(tiny_target()), dtype="bfloat16", device="cuda")
    return EagleProposer(EagleRunner(head, 64 << 20), **options)


def drafted(drafter: ModelProposer, burst: int) -> list[list[int]]:
    """Tails after each of some commits; nine requests, so that the bucket is padded."""
    drafter.budget, drafter.burst, found = 40, burst, list[list[int]]()
    states = np.random.default_rng(0).standard_normal((9, 400, 192)).astype(np.float32)
    prompts = [tiny_prompt_ids(4)[i % 4] for i in range(9)]
    requests = ByName(drafter, 12)
    for number, prompt in enumerate(prompts):
        requests.open(f"r{number}", prompt, (), SamplingParams(1.0, seed=number, max_tokens=300), 12)
    for turn in range(5):
        for number, prompt in enumerate(prompts):
            requests.commit(f"r{number}", turn, [number + turn])
            if drafter.traits.reads_features:
                requests.add_features(f"r{number}", 0, states[number, : len(prompt) + turn])
        extend_fully(requests)
        _, lengths, tokens = requests.table.tails(0, requests.rows)
        found += [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    for number in range(9):
        requests.close(f"r{number}")
    return found


@pytest.mark.parametrize("make", [draft_model, eagle])
@pytest.mark.parametrize("branches", [0, 4])
def test_a_captured_step_drafts_what_the_step_drafts(make: Any, branches: int) -> None:
    """The same rows, padding included, so kernels have no choice. That the step drafts what single forwards draft is
    proved where products do not depend on the number of rows: in `tests/unit/draft/test_burst.py`."""
    captured = drafted(make(branches=branches, capturer=CudaCapturer()), 8)
    assert captured == drafted(make(branches=branches, capturer=FakeCapturer()), 8)
    assert not any("without CUDA graphs" in line for line in fallbacks())


@pytest.mark.parametrize("make", [draft_model, eagle])
def test_a_sleeping_drafter_gives_its_memory_back_and_drafts_the_same_afterwards(make: Any) -> None:
    drafter = make(capturer=CudaCapturer())
    before, awake = drafted(drafter, 4), torch.cuda.memory_reserved()
    drafter.sleep()
    assert awake - torch.cuda.memory_reserved() > 64 << 20, "the cache, and more"
    drafter.wake()
    assert drafted(drafter, 4) == before
