"""Options that keyed sampling does not have are refused by name; what asks for nothing passes."""

from __future__ import annotations

import pickle

import pytest

from specactor_ray.core.errors import InputError, UnavailableError
from specactor_ray.sampling.unavailable import UNAVAILABLE, refuse


def test_what_asks_for_nothing_passes() -> None:
    for name, option in UNAVAILABLE.items():
        for value in option.neutral:
            refuse({name: value})
    refuse({"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "temperature": 0.7, "logit_bias": {}})


def test_what_asks_for_more_is_refused_by_name() -> None:
    for name, option in UNAVAILABLE.items():
        for value in (2, True, {"type": "json_object"}, ["x"]):
            if value in option.neutral:
                continue
            with pytest.raises(
                UnavailableError, match=f"^TRL: {name}=.* is not available: .*. Fix: leave it out$"
            ) as caught:
                refuse({"temperature": 0.7, name: value}, "TRL: ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, InputError) and again.option == name and str(again) == str(caught.value)
