"""Options that keyed sampling does not have are refused by name; what asks for nothing passes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from specactor_ray.core.errors import InputError, UnavailableError
from specactor_ray.sampling.unavailable import UNAVAILABLE, refuse


def test_what_asks_for_nothing_passes() -> None:
    for name, option in UNAVAILABLE.items():
        for value in option.neutral:
            refuse({name: value})
    refuse({"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "temperature": 0.7, "logit_bias": {}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1.0}),
        ("min_p", 0.1),
        ("min_tokens", 3),
        ("structured_outputs", {"json": {}}),
        ("response_format", {"type": "json_object"}),
        ("best_of", 2),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
    ],
)
def test_what_asks_for_more_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnavailableError, match=f"^{name}=.* is not available: .*. Fix: leave it out$") as caught:
        refuse({"temperature": 0.7, name: value})
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, InputError) and again.option == name and str(again) == str(caught.value)
    with pytest.raises(UnavailableError, match=f"^TRL: {name}="):
        refuse({name: value}, "TRL: ")
