"""The two loops together, without Ray: real engine, real proposers, real threads, and a channel that may misbehave."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specactor_ray.config.schema import RaceName, VerifyPolicy
from specactor_ray.core.step_cost import StepCost
from specactor_ray.draft import model, runner
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.runner import checksum
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target import hf
from specactor_ray.transport import inbox
from specactor_ray.transport.messages import WeightSet
from specactor_ray.verify import racing
from specactor_ray.verify.policy import DraftPolicy, Suspension
from tests.fakes.capturer import FakeCapturer
from tests.fakes.loops import Bench, eagle, proposers, ragged, truth_of
from tests.fakes.misbehaving import Crasher, Forker, Liar
from tests.tiny import tiny_draft, tiny_eagle, tiny_target
from tests.unit.engine_conformance import requests

ANSWERED = 120.0
"""A wait for drafts that ends when each drafter has answered, so that supply is no matter of time."""
NARROW = 448
"""Rows of an embedding that has those of all tokens of the tiny models, which have 512."""


def decoded(bench: Bench, batch: Sequence[TargetRequest], times: int = 1, lossy: bool = True) -> dict[str, Any]:
    """Counters after these requests, whose tokens are those of plain decoding; ends the bench."""
    try:
        for _ in range(times):
            assert bench.run(batch) == truth_of(batch)
        if not lossy:  # else a message that closes requests may be lost
            bench.await_closed()
        return bench.verifier.snapshot()
    finally:
        bench.close()


@pytest.mark.parametrize("failing", [False, True])
def test_an_engine_is_closed_when_its_loop_ends(failing: bool) -> None:
    """What it has outside the process would stay behind otherwise."""
    bench = Bench({}, False)
    closed = []
    bench.engine.close = lambda: closed.append(bench.verifier.error)  # type: ignore[method-assign]
    if failing:
        bench.engine.step = None  # type: ignore[method-assign, assignment]
        bench._threads[0].start()
        bench.verifier.submit(requests(1, 0.0))
        bench._threads[0].join(120)
    else:
        bench.run(requests(2, 0.0))
        bench.close()
    assert len(closed) == 1 and isinstance(closed[0], TypeError) == failing


@pytest.mark.parametrize("layout", ["hosted", "lookups", "decoupled"])
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("ngram", 1.0), ("suffix", 1.0), ("draft_model", 1.0), ("eagle", 1.0), ("all", 1.0), ("all", 0.0)],
)
def test_drafted_equals_plain(kind: str, layout: str, temperature: float) -> None:
    batch = requests(10, temperature)
    bench = Bench(proposers(kind), layout == "hosted", hosts_lookups=layout == "lookups", draft_wait_s=ANSWERED)
    snapshot = decoded(bench, batch, lossy=False)
    assert snapshot["accepted_tokens"] > 0, "no draft was ever accepted, so nothing was tested"
    assert snapshot["committed_tokens"] == sum(f.num_tokens for f in bench.finished.values())
    verified = [one.verified for one in bench.progress if one.verified is not None]
    assert sum(int(one.drafted.sum()) for one in verified) == snapshot["drafted_tokens"]
    assert sum(int(one.accepted.sum()) for one in verified) == snapshot["accepted_tokens"]
    assert sum(len(one.requests) for one in bench.progress) == snapshot["row_steps"]
    if kind == "suffix":
        assert all(loop.snapshot()["history_tokens"] for loop in bench.drafts.values())


@pytest.mark.parametrize("hosted", [False, True])
def test_a_draft_model_with_fewer_rows_of_padding_drafts_for_what_it_can_read(hosted: bool) -> None:
    """As Qwen2.5-0.5B beside 7B. A request with a token that only the target's embedding has is answered, empty."""
    small = LlamaForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32)
    small.resize_token_embeddings(NARROW)
    drafter = DraftModelProposer(RaggedModel(small, 16 << 20))
    batch = requests(6, 1.0)
    for index in (1, 4):
        prompt = (*batch[index].prompt_token_ids, NARROW)
        batch[index] = replace(batch[index], prompt_token_ids=prompt)
    bench = Bench({"small-0": drafter}, hosted, draft_wait_s=ANSWERED)
    snapshot = decoded(bench, batch, lossy=False)
    counters = bench.hosted["small-0"].snapshot() if hosted else bench.drafts["small-0"].snapshot()
    assert snapshot["accepted_tokens"] > 0
    assert (counters["opens"], counters["failures"], counters["resyncs"]) == (len(batch), 0, 0)


@pytest.mark.parametrize(
    ("temperature", "layout", "race", "names", "lossy"),
    [
        (0.0, "decoupled", RaceName.tail, "ngram-0 ngram-1 small-0", True),
        (1.0, "decoupled", RaceName.always, "ngram-0 small-0 eagle-0 liar", True),
        (1.0, "decoupled", RaceName.off, "ngram-0 small-0 liar", False),
        (1.0, "lookups", RaceName.tail, "ngram-0 suffix-0 small-0 eagle-0 liar", True),
        (0.0, "decoupled", RaceName.off, "small-0 eagle-0", True),
        (0.0, "hosted", RaceName.always, "ngram-0 suffix-0 small-0", False),
        (1.0, "hosted", RaceName.tail, "ngram-0 small-0 liar", False),
    ],
)
def test_races_and_reconfigurations_change_no_token(
    temperature: float, layout: str, race: RaceName, names: str, lossy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step another assignment, other rounds of drafting and other parts of tails; the channel loses, repeats and
    reorders."""
    monkeypatch.setattr(racing, "REVISE_EVERY", 1)
    monkeypatch.setattr(racing, "HORIZON_STEPS", 1e6)  # restless: a little more is enough
    rng, choose = np.random.default_rng(7), DraftPolicy.choose

    def whims(self: DraftPolicy, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seats, lengths = choose(self, rows)
        return seats, rng.integers(0, lengths, endpoint=True, dtype=np.int32)

    monkeypatch.setattr(DraftPolicy, "choose", whims)
    monkeypatch.setattr(DraftPolicy, "plan_rounds", lambda self, rows: int(rng.integers(0, 9)))
    batch = requests(8, temperature)
    drafters = {name: proposer for name, proposer in {**proposers("all"), "liar": Liar()}.items() if name in names}
    faults = random.Random(len(names)) if lossy else None
    bench = Bench(drafters, layout == "hosted", faults, hosts_lookups=layout == "lookups", race=race, draft_wait_s=0.01)
    snapshot = decoded(bench, batch)
    assert snapshot["drafted_tokens"] > 0 or layout == "decoupled", "apart, it is a matter of time what arrives"
    assert sum(snapshot["drafted_by_position"]) == snapshot["drafted_tokens"]
    assert sum(snapshot["accepted_by_position"]) == snapshot["accepted_tokens"]


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_a_coupled_model_runs_in_captured_steps_once_prompts_were_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: engine and drafter are eager for prompts alone, at any acceptance."""
    devices, batch = list[FakeCapturer](), requests(4, 1.0, max_tokens=100, ignore_eos=True)

    def capturer_for(device: torch.device) -> FakeCapturer:
        devices.append(FakeCapturer())
        return devices[-1]

    for module in (hf, model):
        monkeypatch.setattr(module, "capturer_for", capturer_for)
    drafter: Any = eagle() if kind == "eagle" else DraftModelProposer(ragged(tiny_target()))
    bench, eager = Bench({"d-0": drafter}, True), [0, 0]
    monkeypatch.undo()

    def counted(which: int, forward: Any) -> Any:
        def call(*arguments: Any) -> Any:
            eager[which] += 1
            return forward(*arguments)

        return call

    drafter._run = counted(0, drafter._run)
    bench.engine._model.forward = counted(1, bench.engine._model.forward)  # type: ignore[method-assign]
    snapshot = decoded(bench, batch)
    assert snapshot["accepted_tokens"] > 0 and len(devices) == 2
    assert max(eager) <= len(batch) < min(device.launches for device in devices), "a forward reads a prompt or more"


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_hosted_drafters_sleep_with_the_engine(kind: str) -> None:
    batch, hosted = requests(4, 1.0, max_tokens=40), proposers(kind)
    bench = Bench(hosted, True)
    try:
        counts = list[int]()
        for _ in range(2):
            assert bench.run(batch) == truth_of(batch)
            counts.append(bench.verifier.snapshot()["accepted_tokens"])
            bench.verifier.sleep().result(60)
            assert not any(one._cache._pools for one in hosted.values()) and not bench.engine._model.cache._pools  # type: ignore[attr-defined]
            bench.verifier.wake().result(60)
        assert 0 < counts[0] < counts[1]
    finally:
        bench.close()


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "decoupled"])
@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_branches_change_no_token(
    temperature: float, lies: bool, hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free(StepCost):
        """Further rows of a forward cost nothing."""

        is_known = True

        def curve(self, num_rows: int, most: int) -> np.ndarray:
            return np.ones(most + 1)

    monkeypatch.setattr(runner, "StepCost", Free)
    drafter: Proposer = Forker() if lies else DraftModelProposer(ragged(tiny_draft()), branches=4)
    batch, faults = requests(8, temperature), None if hosted else random.Random(3)
    bench = Bench({"d-0": drafter}, hosted, faults, branches=4, draft_wait_s=0.02)
    snapshot = decoded(bench, batch)
    assert not snapshot["malformed"]
    if hosted:  # apart, it is a matter of time what arrives
        assert snapshot["refuted_tails"] and snapshot["rescued_tails"]


@pytest.mark.parametrize("layout", ["hosted", "lookups", "decoupled"])
def test_suspensions_change_no_token(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)

    def on_a_whim(self: Suspension, *arguments: Any) -> None:
        self._left = self._left - 1 if self._left else rng.choice([0, 0, 3, 20])

    monkeypatch.setattr(Suspension, "record", on_a_whim)
    batch = requests(10, 1.0)
    drafters = {**proposers("all"), "ngram-0": NgramProposer(2, 6, 1 << 20, 64)}
    bench = Bench(drafters, layout == "hosted", hosts_lookups=layout == "lookups", verify=VerifyPolicy.auto)
    snapshot, lookup = decoded(bench, batch, times=2, lossy=False), bench.drafter("ngram-0").snapshot()
    assert 0 < snapshot["suspended_steps"] < snapshot["steps"]
    # In a loop of its own it is a matter of time how much has arrived.
    least = snapshot["committed_tokens"] / 2 if layout == "hosted" else 0
    assert lookup["history_tokens"] > least, "lookups learn in suspensions, too"


def test_a_model_is_told_at_its_turn_what_happened_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message a step would fill its inbox while it does not pay, and it would have to read everything again."""
    turns = itertools.chain([4] * 4, [0] * (inbox.MOST_WAITING + 50), itertools.repeat(4))
    monkeypatch.setattr(DraftPolicy, "plan_rounds", lambda self, rows: next(turns))
    batch = requests(2, 1.0, max_tokens=400, ignore_eos=True)
    bench = Bench({"twin": DraftModelProposer(ragged(tiny_target()))}, True)
    verifier, twin = decoded(bench, batch), bench.drafter("twin").snapshot()
    assert (twin["opens"], twin["resyncs"]) == (len(batch), 0)
    assert verifier["accepted_tokens"] > 50


def test_a_hosted_head_is_taught_between_two_steps_and_changes_no_token() -> None:
    batch, head = requests(6, 1.0), eagle()
    bench = Bench({"eagle-0": head}, True)
    fresh, pupil = eagle(), eagle()
    weights = {
        name: tensor + 0.1 for name, tensor in trained_weights(load_head(str(tiny_eagle()), str(tiny_target()))).items()
    }
    pupil.load_weights(5, weights)
    taught = bench.verifier.load_weights(WeightSet(5, (), method="eagle"), weights)
    other = bench.verifier.load_weights(WeightSet(6, (), method="draft_model"), weights)  # which it does not host
    health = decoded(bench, batch)["hosted"]["eagle-0"]["health"]
    assert taught.result(120) is other.result(120) is None
    assert (health["version"], health["checksum"]) == (5, checksum(weights))
    states = torch.ones(1, head._runner.config.feature_size)
    now, before, then = (one._runner.fuse(states) for one in (head, fresh, pupil))
    assert torch.equal(now, then) and not torch.equal(now, before)


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "decoupled"])
def test_a_head_is_told_each_state_once_and_before_it_drafts(hosted: bool) -> None:
    """With every commit come the states that it made known, so that the head never guesses from older ones."""

    class Reader(EagleProposer):
        steps, behind, repeated = 0, 0, 0

        def add_features(self, slots: np.ndarray, starts: np.ndarray, *states: Any) -> None:
            self.repeated += int((starts != self._received[slots]).sum())
            super().add_features(slots, starts, *states)

        def extend(self) -> np.ndarray:
            for row in np.flatnonzero(self._generations).tolist():
                self.steps += 1
                self.behind += self._origins[row] > 1 or self._received[row] != self._known[row] - 1
            return super().extend()

    head, batch = eagle(Reader), requests(10, 1.0)
    bench = Bench({"eagle-0": head}, hosted, draft_wait_s=ANSWERED)
    assert decoded(bench, batch)["accepted_tokens"] and head.steps > 100 and head.behind == head.repeated == 0


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "apart"])
def test_weights_that_come_in_the_middle_of_outputs_change_no_token(hosted: bool) -> None:
    """New versions with every few commits, some of them nonsense."""

    class Pupil(EagleProposer):
        commits = 0

        def _advance(self, *arrays: np.ndarray) -> None:
            self.commits += 1
            if self.commits % 3 == 0:
                weights = {name: torch.randn_like(tensor) for name, tensor in good.items()}
                self.load_weights(self.commits, weights if self.commits % 9 == 0 else good)
            super()._advance(*arrays)

    good = trained_weights(load_head(str(tiny_eagle()), str(tiny_target())))
    heads = {f"eagle-{number}": eagle(Pupil) for number in range(2)}
    counts = decoded(Bench(heads, hosted, draft_wait_s=ANSWERED), requests(10, 1.0))
    assert sum(head.commits for head in heads.values()) > 20 and counts["accepted_tokens"] > 0


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "decoupled"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_lying_or_crashing_drafter_is_only_slow(hosted: bool, raises: bool) -> None:
    batch = requests(8, 1.0)
    drafters = {"liar": (Crasher if raises else Liar)()}
    bench = Bench(drafters, hosted, draft_wait_s=0.05)
    snapshot = decoded(bench, batch)
    assert snapshot["accepted_tokens"] <= 0.1 * snapshot["drafted_tokens"]


def test_drafters_come_and_go_while_requests_run() -> None:
    batch = requests(8, 1.0, max_tokens=64)
    bench = Bench(proposers("all"), False, draft_wait_s=0.02)
    all_links = dict(bench.verifier.drafter_links)
    stop = threading.Event()

    def churn() -> None:
        rng = random.Random(0)
        while not stop.is_set():
            names = [name for name in all_links if rng.random() < 0.6]
            bench.verifier.set_drafters({name: all_links[name] for name in names})
            time.sleep(0.01)

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        decoded(bench, batch)
    finally:
        stop.set()
        thread.join()
