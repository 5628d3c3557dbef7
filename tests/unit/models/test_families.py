"""Families of models: the engine computes what transformers does, whatever else is in the batch, or refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.models.ragged_model import RaggedModel
from tests.families import PROVED, REFUSED, VARIANTS, VOCAB_SIZE, make_model

TOKENS = 60
PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.mark.parametrize("kind", [*PROVED, *VARIANTS])
def test_log_probabilities_are_those_of_transformers(kind: str) -> None:
    """A row in chunks, with rejected tokens between them, beside a longer row."""
    model = make_model(kind)
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, TOKENS, np.int32)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].float()
    ragged = RaggedModel(model, 4 << 20)
    row, other = ragged.cache.open(TOKENS), ragged.cache.open(120)
    assert row is not None and other is not None
    company, found = np.arange(100) % VOCAB_SIZE, []
    for number, (begin, end) in enumerate([(0, 13), (13, 26), (26, 39), (39, TOKENS)]):
        rows, counts = np.array([other, row]), np.array([25, end - begin])
        part = np.concatenate([company[25 * number : 25 * number + 25], tokens[begin:end]])
        found.append(ragged.forward(rows, counts, part, np.array([0, end - begin])))
        if end < TOKENS:  # drafts that are wrong
            ragged.forward(np.array([row]), np.array([3]), np.array([5, 4, 3]), np.array([1]))
            ragged.cache.truncate(np.array([row]), end)
    gap = torch.log_softmax(torch.cat(found).float(), -1) - torch.log_softmax(expected, -1)
    assert float(gap.abs().max()) < 1e-3


@pytest.mark.parametrize("kind", REFUSED)
def test_other_models_are_refused_with_a_reason(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=r"transformers|attention|serve"):
        RaggedModel(make_model(kind), 4 << 20)


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = make_model("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(ModelLoadError, match="float32"):
        RaggedModel(model, 4 << 20)


def test_the_documented_families_are_those_that_are_compared() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{kind}`" in text for kind in (*PROVED, *REFUSED))


def test_a_model_that_gives_the_logits_of_all_positions_is_refused() -> None:
    model = make_model("llama")
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **kwargs: forward(**kwargs)
    with pytest.raises(ModelLoadError, match="logits_to_keep"):
        RaggedModel(model, 4 << 20)
