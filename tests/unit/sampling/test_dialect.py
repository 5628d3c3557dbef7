"""Options of other engines: what keyed sampling does not have is refused by name; what asks for nothing passes."""

from __future__ import annotations

import pickle

import pytest

from specactor_ray.core.errors import InputError, UnavailableError
from specactor_ray.sampling.dialect import UNAVAILABLE, Dialect

TRL = Dialect(known=("temperature",), ignored=("user",), neutral={"logprobs": (0,)}, where="TRL: ")


def test_what_asks_for_nothing_passes() -> None:
    for name, (neutral, _) in UNAVAILABLE.items():
        for value in neutral:
            assert TRL.read({name: value, "temperature": 0.7}) == {"temperature": 0.7}
    nothing = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "logit_bias": {}, "temperature": None}
    assert TRL.read({**nothing, "logprobs": 0, "user": "x", "unknown": [], "stop": None}) == {}


def test_what_asks_for_more_is_refused_by_name() -> None:
    for name, (neutral, _) in UNAVAILABLE.items():
        for value in (2, True, {"type": "json_object"}, ["x"]):
            if value in neutral:
                continue
            with pytest.raises(UnavailableError, match=f"^TRL: {name}=.*Fix: ") as caught:
                TRL.read({"temperature": 0.7, name: value})
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, InputError) and again.option == name and str(again) == str(caught.value)


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    for options, message in (
        ({"logprobs": 1}, r"^TRL: logprobs=1 .*temperature"),
        ({"temprature": 1.0}, r"Did you mean temperature\?$"),
    ):
        with pytest.raises(UnavailableError, match=message):
            TRL.read(options)
    with pytest.raises(UnavailableError, match=r"stream, top_k.* Did you mean stream\?$"):
        Dialect(known=("top_k",), others=("stream",)).read({"steam": True})


def test_names_and_values_are_those_of_sampling_params() -> None:
    dialect = Dialect(known=("top_k", "stop"), renamed={"max_new_tokens": "max_tokens"})
    read = dialect.read({"top_k": -1, "stop": "end", "max_new_tokens": 3})
    assert read == {"top_k": 0, "stop": ("end",), "max_tokens": 3}
    with pytest.raises(UnavailableError, match=r"^max_tokens=3 .*Did you mean max_new_tokens"):
        dialect.read({"max_tokens": 3})
