"""Which drafters verifiers host, which have draft actors, and what follows from it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import draft_actors, inline_drafters, scale_refusal
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
    ("mode", "ngram", "inline", "actors"),
    [
        ("plain", {}, [], {}),
        ("coupled", {}, ["ngram", LOOKUP, "draft_model"], {}),
        ("coupled", {"hosted": False}, ["ngram", LOOKUP, "draft_model"], {}),
        ("decoupled", {}, ["ngram", LOOKUP], {"draft_model": 1}),
        ("decoupled", {"hosted": True}, ["ngram", LOOKUP], {"draft_model": 1}),
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
def test_where_a_method_drafts(mode: str, ngram: dict[str, Any], inline: list[str], actors: dict[str, int]) -> None:
    settings = config(mode, {"method": "ngram", **ngram}, {"method": LOOKUP}, MODEL)
    assert [one.method for one in inline_drafters(settings)] == inline
    assert draft_actors(settings) == actors


def test_hosted_lookups_are_not_scaled() -> None:
    settings = config("decoupled", MODEL, {"method": "ngram"}, {"method": "suffix", "hosted": False})
    refusal = scale_refusal(settings, "ngram", 3)
    assert isinstance(refusal, ConfigError) and refusal.key == "drafters.1.hosted"
    assert refusal.fix == "start the run with drafters.1.hosted=false."
    assert scale_refusal(settings, "suffix", 3) is scale_refusal(settings, "draft_model", 0) is None


@pytest.mark.parametrize(
    ("mode", "method", "number", "key"),
    [
        ("plain", "draft_model", 1, "mode"),
        ("coupled", "draft_model", 1, "mode"),
        ("decoupled", "eagle", 1, "drafters"),
        ("decoupled", "draft_model", -1, "drafters.draft_model"),
        ("decoupled", "draft_model", None, "drafters.draft_model"),
    ],
)
def test_numbers_that_cannot_be(mode: str, method: str, number: Any, key: str) -> None:
    refusal = scale_refusal(config(mode, MODEL), method, number)
    assert isinstance(refusal, ConfigError) and refusal.key == key


@pytest.mark.parametrize("method", [MODEL, {"method": "eagle", "model": "m"}, {**MODEL, "method": OUTSIDE}])
@pytest.mark.parametrize("mode", ["auto", "decoupled"])
def test_models_are_hosted_in_mode_coupled_alone(mode: str, method: dict[str, Any]) -> None:
    drafters = {"method": "ngram", "hosted": True}, {**method, "hosted": True}
    with refused("drafters.1.hosted", "mode=coupled"):
        config(mode, *drafters)
    assert [one.method for one in inline_drafters(config("coupled", *drafters))] == ["ngram", method["method"]]


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
