"""Which drafters verifiers host, which have draft actors, and what follows from it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import draft_actors, hosted_drafters, scale_refusal
from specactor_ray.config.schema import Config, DrafterConfig, TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.draft.proposer import build_proposer
from tests.refused import refused

LOOKUP = "tests.fakes.own_proposers:Lookup"
MODEL = {"method": "draft_model", "model": "m"}
OUTSIDE = "tests.fakes.own_proposers:Noisy"


def config(mode: str, *drafters: dict[str, Any]) -> Config:
    return from_mapping({"mode": mode, "drafters": list(drafters)})


@pytest.mark.parametrize(
    ("mode", "ngram", "hosted", "actors"),
    [
        ("plain", {}, [], {}),
        ("coupled", {"hosted": False}, ["ngram", LOOKUP, "draft_model"], {}),
        ("decoupled", {}, ["ngram", LOOKUP], {"draft_model": 1}),
        ("decoupled", {"replicas": 0}, [LOOKUP], {"draft_model": 1}),
        ("decoupled", {"replicas": 3}, ["ngram", LOOKUP], {"draft_model": 1}),
        ("decoupled", {"hosted": False}, [LOOKUP], {"ngram": 1, "draft_model": 1}),
        (
            "decoupled",
            {"hosted": False, "replicas": 0},
            [LOOKUP],
            {"ngram": 0, "draft_model": 1},
        ),
    ],
)
def test_where_a_method_drafts(mode: str, ngram: dict[str, Any], hosted: list[str], actors: dict[str, int]) -> None:
    settings = config(mode, {"method": "ngram", **ngram}, {"method": LOOKUP}, MODEL)
    assert [one.method for one in hosted_drafters(settings)] == hosted
    assert draft_actors(settings) == actors


@pytest.mark.parametrize(
    ("mode", "method", "number", "key"),
    [
        ("decoupled", "suffix", 3, None),
        ("decoupled", "draft_model", 0, None),
        ("decoupled", "ngram", 3, "drafters.1.hosted"),
        ("plain", "draft_model", 1, "mode"),
        ("coupled", "draft_model", 1, "mode"),
        ("decoupled", "eagle", 1, "drafters"),
        ("decoupled", "draft_model", -1, "drafters.draft_model"),
        ("decoupled", "draft_model", None, "drafters.draft_model"),
    ],
)
def test_numbers_of_draft_actors_that_cannot_be(mode: str, method: str, number: Any, key: str | None) -> None:
    drafters = MODEL, {"method": "ngram"}, {"method": "suffix", "hosted": False}
    refusal = scale_refusal(config(mode, *drafters), method, number)
    assert getattr(refusal, "key", None) == key


@pytest.mark.parametrize("method", [MODEL, {"method": "eagle", "model": "m"}, {**MODEL, "method": OUTSIDE}])
@pytest.mark.parametrize("mode", ["auto", "decoupled"])
def test_models_are_hosted_in_mode_coupled_alone(mode: str, method: dict[str, Any]) -> None:
    drafters = {"method": "ngram", "hosted": True}, {**method, "hosted": True}
    with refused("drafters.1.hosted", "mode=coupled"):
        config(mode, *drafters)
    assert [one.method for one in hosted_drafters(config("coupled", *drafters))] == ["ngram", method["method"]]


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("magic", "ngram"),
        ("no.such.module:Drafter", "no.such.module"),
        ("tests.fakes.misbehaving:NoSuchDrafter", "NoSuchDrafter"),
        ("tests.leaves_at_import:Drafter", "SystemExit: no use (leaves_at_import.py"),
        ("collections:OrderedDict", "RowProposer"),
    ],
)
def test_no_proposer(method: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        build_proposer(DrafterConfig(method=method), TargetConfig(), "cpu")
