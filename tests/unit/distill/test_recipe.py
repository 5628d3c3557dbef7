"""Recipes: what is refused before anything is loaded; batches of an epoch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.loop import batches_of_epoch
from specactor_ray.distill.recipe import CorpusRecipe, TrainRecipe, check

RECIPE = TrainRecipe(CorpusRecipe("target"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"minutes": None, "epochs": None}, "--minutes or --epochs"),
        ({"minutes": 0.0}, "--minutes: 0.0 is out of range"),
        ({"minutes": float("nan")}, "--minutes"),
        ({"epochs": -1.0}, "--epochs"),
        ({"tokens": 0}, "--tokens"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"batch_tokens": 0}, "--batch-tokens"),
        ({"dtype": "int8"}, "--dtype"),
        ({"draft_vocab": 1}, "--draft-vocab"),
        ({"depths": 17}, "--depths"),
        ({"corpus": CorpusRecipe("t", temperature=-1.0)}, "--temperature"),
        ({"corpus": CorpusRecipe("t", samples=0)}, "--samples"),
        ({"corpus": CorpusRecipe("t", max_tokens=0)}, "--max-tokens"),
        ({"corpus": CorpusRecipe("t", seed=-1)}, "--seed"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], problem: str) -> None:
    check(RECIPE)
    with pytest.raises(InputError, match=problem):
        check(dataclasses.replace(RECIPE, **changes))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 200), st.integers(0, 5), st.integers(0, 3))
def test_every_record_is_in_one_batch_of_an_epoch(lengths: list[int], most: int, seed: int, epoch: int) -> None:
    records = [CorpusRecord(i, (1,), (2,) * length, SamplingParams(), "stop") for i, length in enumerate(lengths)]
    batches = batches_of_epoch(records, most, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(records)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(records[i].num_tokens for i in batch) <= most
    assert batches == batches_of_epoch(records, most, seed, epoch)
