"""Which drafters verifiers host, which have draft actors, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from specactor_ray.config.drafting import draft_actors, inline_drafters
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.controller.seats import scale_refusal
from specactor_ray.errors import ConfigError

MODEL = {"method": "draft_model", "model": "m"}


def config(mode: str, *drafters: dict[str, Any]) -> Config:
    return from_mapping({"mode": mode, "drafters": list(drafters)})


@pytest.mark.parametrize(
    ("mode", "ngram", "inline", "actors"),
    [
        ("plain", {}, [], {}),
        ("coupled", {}, ["ngram", "tests.own_proposers:Lookup", "draft_model"], {}),
        ("coupled", {"hosted": False}, ["ngram", "tests.own_proposers:Lookup", "draft_model"], {}),
        ("decoupled", {}, ["ngram", "tests.own_proposers:Lookup"], {"draft_model": 1}),
        ("decoupled", {"hosted": True}, ["ngram", "tests.own_proposers:Lookup"], {"draft_model": 1}),
        ("decoupled", {"replicas": 0}, ["tests.own_proposers:Lookup"], {"draft_model": 1}),
        ("decoupled", {"replicas": 3}, ["ngram", "tests.own_proposers:Lookup"], {"draft_model": 1}),
        ("decoupled", {"hosted": False}, ["tests.own_proposers:Lookup"], {"ngram": 1, "draft_model": 1}),
        ("decoupled", {"hosted": False, "replicas": 0}, ["tests.own_proposers:Lookup"], {"ngram": 0, "draft_model": 1}),
    ],
)
def test_where_a_method_drafts(mode: str, ngram: dict[str, Any], inline: list[str], actors: dict[str, int]) -> None:
    settings = config(mode, {"method": "ngram", **ngram}, {"method": "tests.own_proposers:Lookup"}, MODEL)
    assert [one.method for one in inline_drafters(settings)] == inline
    assert draft_actors(settings) == actors


def test_hosted_lookups_are_not_scaled() -> None:
    settings = config("decoupled", MODEL, {"method": "ngram"}, {"method": "suffix", "hosted": False})
    refusal = scale_refusal(settings, "ngram", 3)
    assert isinstance(refusal, ConfigError) and refusal.key == "drafters.1.hosted"
    assert refusal.fix == "start the run with drafters.1.hosted=false."
    assert scale_refusal(settings, "suffix", 3) is scale_refusal(settings, "draft_model", 0) is None


@pytest.mark.parametrize("method", [MODEL, {"method": "eagle", "model": "m"}, {"method": "tests.own_proposers:Model"}])
def test_decoupled_verifiers_host_no_model(method: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mode=coupled") as error:
        config("decoupled", {"method": "ngram"}, {**method, "hosted": True})
    assert error.value.key == "drafters.1.hosted"
    config("coupled", {"method": "ngram"}, {**method, "hosted": True})
