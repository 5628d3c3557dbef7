"""Recipes: which layers are kept, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.drafter_training.batches import batches_of_epoch
from specactor_ray.drafter_training.corpus import Record
from specactor_ray.drafter_training.recipe import CorpusRecipe, TrainRecipe, check, choose_layers, parse_layers
from specactor_ray.errors import InputError
from specactor_ray.messages import SamplingParams

RECIPE = TrainRecipe(CorpusRecipe("target"))


@given(st.integers(3, 100), st.data())
def test_the_outer_layers_are_kept(total: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(2, total - 1))
    kept = choose_layers(total, wanted)
    assert len(kept) == wanted and kept[0] == 0 and kept[-1] == total - 1 and list(kept) == sorted(set(kept))
    dropped = [layer for layer in range(total) if layer not in kept]
    assert dropped == list(range(dropped[0], dropped[-1] + 1)), "one stretch in the middle"
    assert 0 <= dropped[0] - (total - 1 - dropped[-1]) <= 1


def test_layers_may_be_named() -> None:
    assert choose_layers(30, parse_layers("0,1,15,29")) == (0, 1, 15, 29)
    assert choose_layers(30, parse_layers("6")) == (0, 1, 2, 27, 28, 29)
    assert choose_layers(30, parse_layers("5")) == (0, 1, 2, 28, 29)


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("1", "1 is too few"),
        ("30", "would draft no faster"),
        ("0,30", "no layer 30"),
        ("3,1", "must rise"),
        ("2,2", "must rise"),
        ("six", "neither a number"),
        ("", "neither a number"),
    ],
)
def test_layers_that_cannot_be_kept(layers: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        choose_layers(30, parse_layers(layers))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": "medusa"}, "'medusa' cannot be trained; use one of draft_model"),
        ({"minutes": None, "epochs": None}, "--minutes or --epochs"),
        ({"minutes": 0.0}, "--minutes: 0.0 is out of range"),
        ({"minutes": float("nan")}, "--minutes"),
        ({"epochs": -1.0}, "--epochs"),
        ({"tokens": 0}, "--tokens"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"batch_tokens": 0}, "--batch-tokens"),
        ({"dtype": "int8"}, "--dtype"),
        ({"layers": "1"}, "--layers"),
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
    records = [Record(i, (1,), (2,) * length, SamplingParams(), "stop") for i, length in enumerate(lengths)]
    batches = batches_of_epoch(records, most, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(records)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(records[i].num_tokens for i in batch) <= most
    assert batches == batches_of_epoch(records, most, seed, epoch)
