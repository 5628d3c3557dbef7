"""Which drafters verifiers host, which have draft actors, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import draft_actors, drafter_specs, inline_drafters
from specactor_ray.config.schema import Config, DrafterConfig, ModeName, TargetConfig
from specactor_ray.controller.elastic import scale_refusal
from specactor_ray.core.errors import ConfigError
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.rollout.planning import Devices, resolve_mode, settle
from tests.fakes.loops import EAGLE_LAYERS
from tests.tiny import tiny_draft, tiny_eagle
from tests.unit.draft.test_own_proposers import Bench, config_of

LOOKUP = "tests.fakes.own_proposers:Lookup"
OWN_MODEL = {"method": "tests.fakes.own_proposers:Model"}
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


@pytest.mark.parametrize("method", [MODEL, {"method": "eagle", "model": "m"}, OWN_MODEL])
def test_decoupled_verifiers_host_models_that_are_to_be_hosted(method: dict[str, Any]) -> None:
    """Such a model serves one verifier and drafts one chain."""
    settings = config("decoupled", {**MODEL, "method": OUTSIDE}, {**method, "hosted": True})
    assert [one.method for one in inline_drafters(settings)] == [method["method"]]
    assert draft_actors(settings) == {OUTSIDE: 1}
    settings.target.replicas, settings.target.max_batch = 3, 5
    specs = drafter_specs(settings)
    assert [(one.max_batch, one.branches) for one in specs.values()] == [(15, 16), (5, 0)]
    assert isinstance(scale_refusal(settings, method["method"], 2), ConfigError)


def test_a_hosted_head_beside_draft_actors() -> None:
    head = {"method": "eagle", "model": "h", "hosted": True}
    settings = config("decoupled", MODEL, head)
    assert {method: spec.branches for method, spec in drafter_specs(settings).items()} == {
        "draft_model": 16,
        "eagle": 0,
    }
    on_gpu = {"mode": "decoupled", "target": {"gpus": 1}, "drafters": [{**MODEL, "gpus": 1}, head]}
    assert [one.dtype for one in settle(from_mapping(on_gpu), None).drafters] == ["bfloat16"] * 2, "its verifier's GPU"
    half = [{**MODEL, "gpus": 1}, {**head, "dtype": "float16"}]
    from_mapping({**on_gpu, "drafters": half})
    with pytest.raises(ConfigError) as error:
        from_mapping({"mode": "decoupled", "drafters": half})
    assert error.value.key == "drafters.1.dtype" and error.value.fix == "use float32, or target.gpus=1."
    auto, lines = resolve_mode(from_mapping({**on_gpu, "mode": "auto"}), Devices(16, 2))
    assert auto.mode is ModeName.decoupled, lines
    assert resolve_mode(from_mapping({**on_gpu, "mode": "auto"}), Devices(16, 1))[0].mode is ModeName.coupled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("outside", [OWN_MODEL, {**MODEL, "model": str(tiny_draft())}])
def test_a_hosted_head_drafts_where_draft_actors_fail_and_changes_no_token(
    outside: dict[str, Any], temperature: float
) -> None:
    head = {"method": "eagle", "model": str(tiny_eagle()), "hosted": True}
    bench = Bench(config_of(outside, head, mode="decoupled", hidden_layers=list(EAGLE_LAYERS)))
    bench.run(temperature=temperature)
    assert bench.apart.keys() == {outside["method"]}
    seats = {one.spec.method: one for one in bench.drafting.policy.drafters.values()}
    assert seats["eagle"].takes_turns and not seats[outside["method"]].takes_turns
    acceptance = bench.drafting.policy.acceptance
    right, tried = acceptance.evidence.sum(axis=2)
    assert tried[acceptance.number(outside["method"])] > 0 and right[acceptance.number("eagle")] > 0, "both drafted"
    assert bench.verifier.metrics.accepted_tokens > 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("magic", "unknown method 'magic'; known: ngram"),
        ("no.such.module:Drafter", "cannot be imported"),
        ("tests.fakes.misbehaving:NoSuchDrafter", "cannot be imported"),
        ("tests.leaves_at_import:Drafter", r"cannot be imported \(SystemExit: no use\)"),
        ("collections:OrderedDict", "is no proposer: .*derive it from .*RowProposer"),
    ],
)
def test_no_proposer(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_proposer(DrafterConfig(method=method), TargetConfig(), "cpu")
