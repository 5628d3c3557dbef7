"""Proposers of a user's own, named as `package.module:Class`, are driven by what their classes say they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import drafter_specs, is_hosted, traits
from specactor_ray.config.schema import Config, DrafterConfig, ModeName, SpeculationConfig, TargetConfig, VerifyPolicy
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.lookup import NgramProposer, SuffixProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.rollout.preflight import export_what_drafters_read
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import Finished, FinishedOutput, Progress
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop
from tests.fakes.loops import engine, truth_of
from tests.fakes.own_proposers import Learner
from tests.tiny import tiny_draft, tiny_target
from tests.unit.engine_conformance import requests

LAYERS = (1, 2)


def own(name: str) -> str:
    return f"tests.fakes.own_proposers:{name}"


def config_of(*drafters: dict[str, Any], mode: str = "coupled", **target: Any) -> Config:
    target = {"model": str(tiny_target()), **target}
    return from_mapping({"mode": mode, "target": target, "drafters": list(drafters)})


class Bench:
    """A verifier and the drafters of a configuration, hosted or apart, step by step in one thread."""

    def __init__(self, config: Config) -> None:
        coupled = config.mode is ModeName.coupled
        self.proposers: dict[str, Any] = {}
        self.loops, links = dict[str, DraftLoop](), dict[str, Any]()
        for method, spec in drafter_specs(config).items():
            self.proposers[method] = build_proposer(spec, config.target, "cpu")
            loop = self.loops[method] = DraftLoop(method, self.proposers[method])
            link = Link(direct_sender(loop.deliver))
            links[method] = HostedDrafter(spec, link, loop) if is_hosted(spec, config.mode) else DrafterLink(spec, link)
        hosted = [one for one in links.values() if isinstance(one, HostedDrafter)]
        self.apart = {name: self.loops[name] for name, one in links.items() if one not in hosted}
        speculation = SpeculationConfig(verify=VerifyPolicy.all)
        self.drafting = Drafting("v0", coupled, speculation, 512)
        target = engine(tuple(config.target.hidden_layers))
        self.verifier = VerifyLoop(target, self.drafting, hosted)
        for loop in self.apart.values():
            loop.set_verifiers({"v0": Link(direct_sender(self.verifier.deliver))})
        if self.apart:
            self.verifier.set_drafters({name: links[name] for name in self.apart})
        self.steps = 0

    def step(self) -> None:
        self.verifier.run_once()
        for loop in self.apart.values():
            loop.run_once()
        self.steps += 1

    def run(self, n: int = 4, temperature: float = 0.0) -> None:
        """Requests of plain decoding's tokens."""
        batch = requests(n, temperature)
        self.verifier.submit(batch)
        tokens: dict[str, list[int]] = {one.request_id: [] for one in batch}
        left, read = set(tokens), 0
        while left:
            self.step()
            events = self.verifier.poll(read, 0.0)[1]
            read += len(events)
            for event in events:
                if isinstance(event, Progress):
                    for request_id, more, _, _ in event.rows():
                        tokens[request_id] += more
                elif isinstance(event, Finished):
                    left.remove(event.request_id)
        self.step()  # the last closes
        assert tokens == truth_of(batch)


both = pytest.mark.parametrize("mode", ["coupled", "decoupled"])


def test_a_lookup_of_ones_own_is_driven_as_a_lookup() -> None:
    """Once before every step, for all requests, and nothing waits for it or times it."""
    bench = Bench(config_of({"method": own("Lookup")}))
    bench.run()
    lookup = bench.proposers[own("Lookup")]
    assert bench.verifier.metrics.accepted_tokens
    assert lookup.calls <= bench.steps + 1
    assert bench.loops[own("Lookup")].snapshot()["token_s"] == 0.0


def test_lookups_of_decoupled_verifiers_are_as_fresh_as_those_of_coupled_ones() -> None:
    """No message lies between; a model apart that says nothing is not waited for."""
    coupled = Bench(config_of({"method": own("Lookup")}))
    decoupled = Bench(config_of({"method": own("Lookup")}, {"method": own("Model")}, mode="decoupled"))
    assert decoupled.apart.keys() == {own("Model")}
    decoupled.apart.clear()
    for bench in (coupled, decoupled):
        bench.run()
    assert coupled.verifier.metrics.accepted_tokens == decoupled.verifier.metrics.accepted_tokens > 0
    assert coupled.steps == decoupled.steps


@both
def test_one_that_keeps_history_is_told_outputs_to_their_ends_and_forgets(mode: str) -> None:
    bench = Bench(config_of({"method": own("Learner")}, mode=mode))
    bench.run()
    learner = bench.proposers[own("Learner")]
    assert sorted(learner.learned) == sorted(truth_of(requests(4, 0.0)).values())
    forgotten = (bench.apart.get(own("Learner")) or bench.verifier).forget_history()
    bench.step()
    assert forgotten.done() and not learner.learned


def test_finished_outputs_come_from_requests_without_a_place_and_from_other_verifiers_too() -> None:
    learner = Learner(DrafterConfig(method=own("Learner"), max_batch=1))
    for slot in range(3):
        learner.open(slot, f"r{slot}", [7], [slot, slot], SamplingParams(), 4)
    for slot, finished in ((0, True), (1, True), (1, True), (2, False)):
        learner.close(slot, finished)
    learner.learn([FinishedOutput("other", (7,), np.array([9], np.int32))])
    assert learner.learned == [[0, 0], [1, 1], [9]]


@both
def test_a_reader_of_ones_own_is_sent_the_states_of_all_committed_positions(mode: str) -> None:
    config = export_what_drafters_read(config_of({"method": own("Reader")}, mode=mode, hidden_layers=list(LAYERS)))
    bench = Bench(config)
    bench.run()
    spans = bench.proposers[own("Reader")].spans
    assert spans.keys() == truth_of(requests(4, 0.0)).keys()
    for parts in spans.values():
        assert all(part.states.shape[1] == 64 * len(LAYERS) for part in parts)
        assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]


def test_a_reader_of_ones_own_needs_layers_to_read() -> None:
    with pytest.raises(ConfigError, match=r"target\.hidden_layers: drafters\.0 reads.*list the decoder layers"):
        export_what_drafters_read(config_of({"method": own("Reader")}))


@pytest.mark.parametrize("shared", [True, False])
def test_a_noisy_model_of_ones_own_is_made_with_its_checkpoint_and_its_noise(shared: bool) -> None:
    section = {"method": own("Noisy"), "model": str(tiny_draft()), "shared_noise": shared}
    bench = Bench(config_of(section))
    bench.run(temperature=1.0)
    assert bench.verifier.metrics.accepted_tokens


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"method": own("Lookup"), "shared_noise": False}, r"drafters\.0\.shared_noise: .*draws no noise"),
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
        ("Hollow", r"Hollow is made without mirrors. Fix: .*super\(\).__init__\(\)"),
        ("Broken", r"Broken cannot be made: RuntimeError: .*no luck.*Fix: mend"),
        ("Nothing", r"Nothing cannot be made: TypeError: .*returned None.*Fix: mend"),
    ],
)
def test_a_class_that_makes_no_proposer_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_proposer(config_of({"method": own(name)}).drafters[0], TargetConfig(), "cpu")


def test_classes_are_not_imported_where_nothing_is_drafted() -> None:
    assert drafter_specs(config_of({"method": "no.such.module:Drafter"}, mode="plain")) == {}


@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer, DraftModelProposer, EagleProposer])
def test_what_is_known_of_a_built_in_method_without_its_class_holds_for_its_class(proposer: type[Proposer]) -> None:
    assert proposer.traits == traits(proposer.method)
    assert proposer.traits.keeps_history == (proposer.forget_history is not Proposer.forget_history)
    assert proposer.traits.reads_features == (proposer.add_features is not Proposer.add_features)
