"""Who drafts for what while requests run: real engine, proposers and loops in one thread, by a clock of the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.drafters.base import Proposer
from specactor_ray.drafters.draft_model import DraftModelProposer
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.speculator import Speculator
from specactor_ray.messages import DraftTail, Mode
from specactor_ray.modeling.ragged_model import RaggedModel
from specactor_ray.queues.conflation import for_drafter, for_verifier
from specactor_ray.queues.outbox import Outbox
from specactor_ray.targets.base import TargetRequest
from specactor_ray.targets.hf import HfEngine
from tests.clocks import HandClock
from tests.tiny import tiny_draft, tiny_target
from tests.unit.engine_conformance import requests, run

torch.set_num_threads(1)

WINDOW = 6


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The tiny models, loaded once; each test makes its own caches."""
    from transformers import AutoModelForCausalLM

    folders = {"target": tiny_target(), "draft": tiny_draft()}
    return {n: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for n, f in folders.items()}


class Specialist(DraftModelProposer):
    """The target as its own drafter, so nearly always right; but only for some requests. For the others it is wrong."""

    def __init__(self, method: str, model: RaggedModel, field: Sequence[str]) -> None:
        super().__init__(model)
        self.method, self._field = method, set(field)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        base_len, token_ids = super().tail(request_id)
        return base_len, token_ids if request_id in self._field else tuple((t + 1) % 400 for t in token_ids)


class Stepper:
    """One verifier and its drafters, stepped by hand: before each step all drafters do all that they can."""

    def __init__(
        self,
        target: HfEngine,
        proposers: Mapping[str, Proposer],
        mode: Mode = Mode.DECOUPLED,
        token_s: Mapping[str, float] | None = None,
        max_batch: int = 16,
        b_max: int = 64,
        **speculation: Any,
    ) -> None:
        self.clock, self.target = HandClock(), target
        config = SpeculationConfig(window=WINDOW, **{"verify": VerifyPolicy.all, **speculation})
        self.spec = Speculator("v0", mode, config, target.vocab_size, self.clock, max_batch)
        self.drafts = {name: DraftLoop(name, proposer, self.clock) for name, proposer in proposers.items()}
        self._token_s = token_s or {}
        links = {}
        for name, loop in self.drafts.items():
            outbox: Outbox[Any] = Outbox(lambda batch, loop=loop: _delivered(loop.deliver, batch), for_drafter())
            links[name] = DrafterLink(loop.proposer.method, WINDOW, outbox, b_max)
            back: Outbox[Any] = Outbox(lambda batch, name=name: _delivered(self._take, batch), for_verifier())
            loop.set_verifiers({"v0": back})
        self.spec.set_drafters(links)
        self.tokens: dict[str, list[int]] = {}

    def _take(self, batch: Sequence[Any]) -> None:
        """Tails arrive with the cost that the test gives their sender."""
        self.spec.inbox.put(
            [
                replace(m, token_s=self._token_s[m.drafter_id])
                if isinstance(m, DraftTail) and m.drafter_id in self._token_s
                else m
                for m in batch
            ]
        )

    def add(self, batch: Sequence[TargetRequest]) -> None:
        for request in batch:
            self.target.add(request)
            self.spec.open(request)
            self.tokens[request.request_id] = []

    def step(self) -> None:
        decoding = self.target.decoding()
        self.spec.plan_waits(decoding)
        self.spec.flush()
        for loop in self.drafts.values():
            while loop.run_once():
                pass
        self.spec.take_messages()
        result = self.target.step(self.spec.choose_tails(decoding))
        for output in result.outputs:
            self.spec.commit(output)
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.target.remove(output.request_id)
                self.spec.close(output.request_id, finished=True)
        result.forward_s, result.sampling_s = 0.05 + 0.001 * result.num_tokens, 0.0
        self.clock.seconds += result.forward_s
        self.spec.observe_step(result)

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        while self.target.has_work() and max_steps:
            self.step()
            max_steps -= 1
        assert max_steps, "it did not finish"
        return self.tokens

    def mirrored(self) -> dict[str, set[str]]:
        """Drafter → requests it has open, after it has read its messages."""
        self.spec.flush()
        for loop in self.drafts.values():
            loop.run_once()
        return {name: set(loop._open) for name, loop in self.drafts.items()}

    @property
    def ladder(self) -> dict[str, Any]:
        return dict(self.spec.snapshot()["ladder"])


def _delivered(deliver: Any, batch: Any) -> Future[Any]:
    deliver(batch)
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def engine(models: Mapping[str, Any]) -> HfEngine:
    return HfEngine(ragged(models, "target"), [1])


def ragged(models: Mapping[str, Any], name: str) -> RaggedModel:
    return RaggedModel(models[name], 16 << 20)


def truth_of(models: Mapping[str, Any], batch: Sequence[TargetRequest]) -> dict[str, list[int]]:
    target = engine(models)
    for request in batch:
        target.add(request)
    return run(target).tokens


def test_each_request_ends_up_with_the_drafter_that_is_good_for_it(models: dict[str, Any]) -> None:
    """Two methods of equal average; each is right about half of the requests and wrong about the others."""
    batch = requests(6, 1.0, max_tokens=160, ignore_eos=True)
    right = {request.request_id: "low" if number < 3 else "high" for number, request in enumerate(batch)}
    drafters = {
        method: Specialist(method, ragged(models, "target"), [r for r, best in right.items() if best == method])
        for method in ("low", "high")
    }
    stepper = Stepper(engine(models), drafters, race=RaceName.off)
    stepper.add(batch)
    chosen: dict[str, set[str]] = {}
    late: dict[str, list[bool]] = {request_id: [] for request_id in right}
    while stepper.target.has_work():
        stepper.step()
        for method, mirrored in stepper.mirrored().items():
            for request_id in mirrored:
                chosen.setdefault(request_id, set()).add(method)
                if len(stepper.tokens[request_id]) > 80:
                    late[request_id].append(method == right[request_id])
    assert stepper.tokens == truth_of(models, batch)
    assert any(len(methods) == 2 for methods in chosen.values()), "nobody began with the wrong one: nothing was shown"
    assert all(len(seen) >= 3 and sum(seen) >= 0.7 * len(seen) for seen in late.values())


@pytest.mark.parametrize("race", list(RaceName))
def test_when_methods_race(models: dict[str, Any], race: RaceName) -> None:
    drafters = {"ngram": NgramProposer(2, 6, 0, 64), "small": DraftModelProposer(ragged(models, "draft"))}
    stepper = Stepper(engine(models), drafters, race=race, max_batch=16)
    batch = requests(6, 0.0, max_tokens=60, ignore_eos=True)
    stepper.add(batch)
    for _ in range(4):
        stepper.step()
    at_six = stepper.mirrored()
    for request in batch[:2]:
        stepper.target.remove(request.request_id)
        stepper.spec.close(request.request_id, finished=False)
    for _ in range(2):
        stepper.step()
    at_four, racing_at_four = stepper.mirrored(), stepper.ladder["racing"]
    stepper.add([TargetRequest(f"late {number}", r.prompt_token_ids, r.sampling) for number, r in enumerate(batch[:2])])
    for _ in range(2):
        stepper.step()
    at_six_again = stepper.mirrored()
    by_method = {0: race is RaceName.always, 1: race is not RaceName.off, 2: race is RaceName.always}
    for moment, mirrored in enumerate((at_six, at_four, at_six_again)):
        number = 4 if moment == 1 else 6
        assert len(mirrored["ngram"] | mirrored["small"]) == number, "a request without a drafter"
        both = mirrored["ngram"] & mirrored["small"]
        assert len(both) == (number if by_method[moment] else 0)
    assert racing_at_four == (race is not RaceName.off)
    stepper.run()
    truth = truth_of(models, batch)
    assert {r: stepper.tokens[r] for r in ("r2", "r5", "late 0")} == {
        "r2": truth["r2"],
        "r5": truth["r5"],
        "late 0": truth["r0"],
    }


def test_a_drafter_never_gets_more_than_it_takes(models: dict[str, Any]) -> None:
    drafters: dict[str, Proposer] = {f"ngram-{n}": NgramProposer(2, 6, 0, 2) for n in range(2)}
    drafters["small"] = DraftModelProposer(ragged(models, "draft"), 2)
    stepper = Stepper(engine(models), drafters, race=RaceName.always, b_max=2)
    batch = requests(6, 1.0, max_tokens=12) + requests(9, 1.0, max_tokens=40, ignore_eos=True)[6:]
    stepper.add(batch)
    served: set[str] = set()
    while stepper.target.has_work():
        stepper.step()
        mirrored = stepper.mirrored()
        assert all(len(open_requests) <= 2 for open_requests in mirrored.values())
        served |= set().union(*mirrored.values())
    assert stepper.tokens == truth_of(models, batch)
    assert served == {request.request_id for request in batch}, "places that fell free were not given away"
    assert not any(stepper.mirrored().values())


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_hopeless_requests_fall_back_to_plain_decoding_and_the_good_ones_do_not(
    models: dict[str, Any], mode: Mode
) -> None:
    """One drafter, so the only way out is Algorithm 2. Its cost is the test's: drafts are neither free nor dear."""
    batch = requests(4, 1.0, max_tokens=120, ignore_eos=True)
    drafter = Specialist("eagle", ragged(models, "target"), ["r0", "r1", "r2"])
    stepper = Stepper(engine(models), {"eagle": drafter}, mode, {"eagle": 0.03})
    stepper.add(batch)
    windows: dict[str, set[int]] = {request.request_id: set() for request in batch}
    while stepper.target.has_work():
        stepper.step()
        for request_id, entry in drafter._requests.items():
            windows[request_id].add(entry.mirror.window)
    assert stepper.tokens == truth_of(models, batch)
    assert 0 in windows["r3"], "a request whose drafts are all wrong goes on being drafted for"
    assert all(0 not in windows[good] for good in ("r0", "r1", "r2"))
    assert stepper.ladder["plan_changes"] >= 1


def test_the_ladder_is_shown_as_plain_data(models: dict[str, Any]) -> None:
    drafters = {"ngram": NgramProposer(2, 6, 0, 64), "small": DraftModelProposer(ragged(models, "draft"))}
    stepper = Stepper(engine(models), drafters, token_s={"ngram": 0.0001, "small": 0.003}, race=RaceName.always)
    assert stepper.ladder["loads"] == {"ngram": 0, "small": 0}
    stepper.add(requests(4, 0.0, max_tokens=100, ignore_eos=True))
    for _ in range(40):
        stepper.step()
    shown = stepper.ladder
    assert sorted(shown["methods"]) == ["draft_model", "ngram"] and shown["racing"] is True
    first = shown["methods"]["draft_model"]["buckets"]["0-63"]
    assert first["drafted"] > 50 and 0.0 < first["acceptance"] < 1.0 and first["tgs"] > 0.0
    assert shown["methods"]["draft_model"]["token_s"] == pytest.approx(0.003)
    assert shown["methods"]["ngram"]["buckets"]["1024+"]["acceptance"] is None


@pytest.mark.parametrize(("token_s", "drafted"), [(0.2, 1), (0.053, 1), (0.0005, 8)])
def test_new_requests_of_a_coupled_layout_are_drafted_for_where_that_pays(
    models: dict[str, Any], token_s: float, drafted: int
) -> None:
    """A drafter that is always right. When its tokens cost more than the target's, or so much that drafting promises
    a few percent only, one request in eight tries."""
    drafter = Specialist("small", ragged(models, "target"), [f"r{number}" for number in range(24)])
    stepper = Stepper(engine(models), {"small": drafter}, Mode.COUPLED, {"small": token_s}, verify=VerifyPolicy.auto)
    batch = requests(24, 1.0, max_tokens=40, ignore_eos=True)
    stepper.add(batch[:8])
    for _ in range(20):
        stepper.step()
    stepper.add(batch[8:16])
    stepper.step()
    windows = [drafter._requests[request.request_id].mirror.window for request in batch[8:16]]
    stepper.add(batch[16:])
    assert sum(window > 0 for window in windows) == drafted
    assert stepper.run() == truth_of(models, batch)


def test_the_window_of_a_coupled_layout_fits_the_batch(models: dict[str, Any]) -> None:
    """Positions cost as much as whole steps once there are many rows, so each of many requests gets few."""
    found = {}
    for size in (1, 12):
        drafter = Specialist("small", ragged(models, "target"), [f"r{number}" for number in range(0, 12, 2)])
        stepper = Stepper(engine(models), {"small": drafter}, Mode.COUPLED, {"small": 0.001}, verify=VerifyPolicy.auto)
        batch = requests(size, 1.0, max_tokens=150, ignore_eos=True)
        stepper.add(batch)
        for _ in range(17):
            stepper.step()
        found[size] = stepper.spec._planner._starts["small"][1].window
        assert stepper.run() == truth_of(models, batch)
    assert 1 <= found[12] < found[1]


@pytest.mark.parametrize(("race", "both"), [(RaceName.tail, False), (RaceName.always, True)])
def test_the_tail_of_a_coupled_layout_begins_no_race(models: dict[str, Any], race: RaceName, both: bool) -> None:
    drafters = {
        "one": Specialist("one", ragged(models, "target"), ["r0"]),
        "two": DraftModelProposer(ragged(models, "draft")),
    }
    stepper = Stepper(engine(models), drafters, Mode.COUPLED, race=race)
    stepper.add(requests(1, 0.0, max_tokens=40, ignore_eos=True))
    seen = []
    while stepper.target.has_work():
        stepper.step()
        seen.append(sum(bool(mirrored) for mirrored in stepper.mirrored().values()))
    assert (max(seen) == 2) == both
    assert stepper.tokens == truth_of(models, requests(1, 0.0, max_tokens=40, ignore_eos=True))
