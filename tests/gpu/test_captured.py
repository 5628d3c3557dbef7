"""Captured decode steps on a GPU: they find what the same steps find without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specactor_ray.core.machine import fallbacks
from specactor_ray.models.captured import CudaCapturer
from specactor_ray.models.ragged_model import HEAD_INPUT, RaggedModel
from specactor_ray.target.hf import HfEngine
from tests.fakes.capturer import FakeCapturer
from tests.tiny import tiny_target
from tests.unit.models.test_captured import MIXES, Turns, equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def engine(capturer: Any) -> HfEngine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.bfloat16).to("cuda")
    ragged = RaggedModel(model, 64 << 20, (0, HEAD_INPUT))
    return HfEngine(ragged, max_batch=6, record_margins=True, capturer=capturer)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_captured_step_finds_what_the_step_finds(sleeps: bool) -> None:
    """The same rows and tokens, padding included, so kernels have no choice; also after weights were replaced."""
    engines = engine(CudaCapturer()), engine(FakeCapturer())
    for one in engines if sleeps else ():
        weights = {name: 1.1 * tensor.cpu() for name, tensor in one._model.model.state_dict().items()}
        one.sleep()
        one.wake()
        one.load_weights(1, weights)
    ours, theirs = (Turns(one, 5) for one in engines)
    for turn, mix in enumerate(MIXES * 2):
        assert equal(ours.step(mix), theirs.step(mix)), turn
    assert not any("without CUDA graphs" in line for line in fallbacks())


def test_a_step_that_waits_is_refused_and_leaves_no_trace() -> None:
    before, x = torch.cuda.current_stream(), torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaCapturer(x.device).capture(x.item)
    assert torch.cuda.current_stream() == before and not torch.cuda.get_sync_debug_mode()
    replay = CudaCapturer(x.device).capture(lambda: x.add_(1.0))
    value = x.item()
    replay()
    assert x.item() == value + 1.0
