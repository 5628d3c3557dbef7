"""Proposers of a user's own, named as `package.module:Class`, are driven by what their classes say they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import BUILT_IN, class_of, drafter_specs, traits
from specactor_ray.config.schema import Config, DrafterConfig, TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.startup.resolve import export_what_drafters_read
from specactor_ray.transport.messages import FinishedOutput
from tests.by_name import ByName
from tests.fakes.loops import EAGLE_LAYERS, Bench, truth_of
from tests.fakes.own_proposers import Learner
from tests.tiny import tiny_draft, tiny_target
from tests.unit.engine_conformance import requests


def own(name: str) -> str:
    return f"tests.fakes.own_proposers:{name}"


def config_of(*drafters: dict[str, Any], mode: str = "coupled") -> Config:
    return from_mapping({"mode": mode, "target": {"model": str(tiny_target())}, "drafters": list(drafters)})


@contextlib.contextmanager
def driven(name: str, mode: str = "coupled", temperature: float = 0.0, **section: Any) -> Iterator[tuple[Any, Bench]]:
    """A proposer that has drafted for some requests, and its loops."""
    config = config_of({"method": own(name), **section}, mode=mode)
    (spec,) = drafter_specs(config).values()
    proposer = build_proposer(spec, config.target, "cpu")
    bench, batch = (
        Bench({"own": proposer}, mode == "coupled", hosts_lookups=True, draft_wait_s=120.0),
        requests(4, temperature),
    )
    try:
        assert bench.run(batch) == truth_of(batch)
        bench.await_closed()
        yield proposer, bench
    finally:
        bench.close()


both = pytest.mark.parametrize("mode", ["coupled", "decoupled"])


@both
@pytest.mark.parametrize("name", ["Lookup", "OfTable"])
def test_a_lookup_of_ones_own_is_driven_as_a_lookup(name: str, mode: str) -> None:
    """Inside the verifier in every mode, and without a measurement of its time."""
    with driven(name, mode) as (_, bench):
        assert bench.verifier.metrics.accepted_tokens
        assert bench.verifier.snapshot()["hosted"]["own"]["token_s"] == 0.0


@both
def test_one_that_keeps_history_is_told_outputs_to_their_ends_and_forgets(mode: str) -> None:
    with driven("Learner", mode) as (learner, bench):
        assert sorted(learner.learned) == sorted(truth_of(requests(4, 0.0)).values())
        (bench.drafts.get("own") or bench.verifier).forget_history().result(120)
        assert not learner.learned


@both
def test_a_reader_of_ones_own_is_sent_the_states_of_all_committed_positions(mode: str) -> None:
    with driven("Reader", mode) as (reader, _):
        assert reader.spans.keys() == truth_of(requests(4, 0.0)).keys()
        for parts in reader.spans.values():
            assert all(states.shape[1] == 64 * len(EAGLE_LAYERS) for _, states in parts)
            assert [begin for begin, _ in parts] == [0, *(begin + len(states) for begin, states in parts[:-1])]


def test_a_model_of_ones_own_is_made_with_its_checkpoint() -> None:
    with driven("Noisy", temperature=1.0, model=str(tiny_draft()), dtype="float32", kv_cache_gb=0.1) as (_, bench):
        assert bench.verifier.metrics.accepted_tokens


def test_finished_outputs_come_from_requests_without_a_place_and_from_other_verifiers_too() -> None:
    learner = Learner(DrafterConfig(method=own("Learner"), max_batch=1))
    requests = ByName(learner)
    for number in range(3):
        requests.open(f"r{number}", [7], [number, number], SamplingParams(), 4)
    for number, finished in ((0, True), (1, True), (1, True), (2, False)):
        requests.close(f"r{number}", finished)
    learner.learn([FinishedOutput("other", (7,), np.array([9], np.int32))])
    assert learner.learned == [[0, 0], [1, 1], [9]]


def test_a_reader_of_ones_own_needs_layers_to_read() -> None:
    with pytest.raises(ConfigError, match=r"target\.hidden_layers: drafters\.0 reads.*list the decoder layers"):
        export_what_drafters_read(config_of({"method": own("Reader")}))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"method": own("Lookup"), "gpus": 1}, r"drafters\.0\.gpus: .*runs on the CPU"),
        ({"method": own("Noisy")}, r"drafters\.0\.model: .*needs a model.*a local directory"),
        ({"method": own("Noisy"), "model": "x", "online": {"where": "trainer"}}, r"drafters\.0\.online\.where: "),
        (
            {"method": own("Deaf")},
            r"drafters\.0\.method: .*lacks add_features.*reads_features=True.*reads_features=False",
        ),
        ({"method": own("SecretReader")}, r"drafters\.0\.method: .*has add_features, but.*set reads_features=True"),
        ({"method": own("SecretLearner")}, r"drafters\.0\.method: .*has forget_history, but.*set keeps_history=True"),
        ({"method": own("Vague")}, r"drafters\.0\.method: .*traits is \{'looks_up': True\}.*an instance of .*Traits"),
        ({"method": own("Unfinished")}, r"drafters\.0\.method: .*lacks guess"),
    ],
)
def test_a_section_that_contradicts_the_class_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_specs(config_of(section))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nameless", "Nameless is made without method. Fix: set method"),
        ("Hollow", r"Hollow is made without branches. Fix: .*super\(\).__init__\(\)"),
        ("Broken", r"Broken cannot be made: RuntimeError: .*no luck.*Fix: mend"),
        ("Nothing", r"Nothing cannot be made: TypeError: .*returned None.*Fix: mend"),
    ],
)
def test_a_class_that_makes_no_proposer_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_proposer(config_of({"method": own(name)}).drafters[0], TargetConfig(), "cpu")


def test_classes_are_not_imported_where_nothing_is_drafted() -> None:
    assert drafter_specs(config_of({"method": "no.such.module:Drafter"}, mode="plain")) == {}


@pytest.mark.parametrize("method", BUILT_IN)
def test_what_is_known_of_a_built_in_method_without_its_class_holds_for_its_class(method: str) -> None:
    proposer = class_of(method, "drafters.0.method")
    assert proposer.method == method and proposer.traits == traits(method)
    assert proposer.traits.keeps_history == (proposer.forget_history is not Proposer.forget_history)
    assert proposer.traits.reads_features == (proposer.add_features is not Proposer.add_features)
