"""The two loops together, without Ray: real engine, real proposers, real threads, and a channel that may misbehave."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from specactor_ray.config.schema import BreakerConfig, Candidates, RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.drafters.base import Proposer, ReadsFeatures
from specactor_ray.drafters.draft_model import DraftModelProposer
from specactor_ray.drafters.eagle import EagleProposer
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.drafters.suffix import SuffixProposer
from specactor_ray.loops import planner
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.inline_drafters import InlineDrafter, outbox_to
from specactor_ray.loops.speculator import Speculator
from specactor_ray.loops.verify_loop import VerifyLoop
from specactor_ray.messages import Finished, Mode, Progress, SamplingParams
from specactor_ray.modeling.eagle_checkpoint import load_head
from specactor_ray.modeling.eagle_runner import EagleRunner
from specactor_ray.modeling.ragged_model import RaggedModel
from specactor_ray.queues.conflation import for_drafter, for_verifier
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.reconfigure import PLAIN, RequestPlan
from specactor_ray.speculation.tree import DraftTree
from specactor_ray.targets.base import TargetRequest
from specactor_ray.targets.hf import HfEngine
from tests.misbehaving import Crasher, Liar
from tests.tiny import tiny_draft, tiny_eagle, tiny_target
from tests.unit.engine_conformance import requests, run

torch.set_num_threads(1)
EAGLE_LAYERS = (0, 1, 2)


def ragged(folder: Any, hidden_layers: Sequence[int] = ()) -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 16 << 20, hidden_layers)


def engine(hidden_layers: Sequence[int] = ()) -> HfEngine:
    return HfEngine(ragged(tiny_target(), hidden_layers), [eos_id()])


def eagle() -> EagleProposer:
    return EagleProposer(EagleRunner(load_head(str(tiny_eagle()), str(tiny_target())), 4 << 20))


def eos_id() -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(tiny_target()).eos_token_id)


class Channel:
    """Delivers batches in another thread's stead: at once, or with loss, repetition and reordering."""

    def __init__(self, deliver: Callable[[Sequence[Any]], None], faults: random.Random | None) -> None:
        self._deliver, self._faults = deliver, faults
        self._held: list[Any] = []

    def __call__(self, batch: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self._faults is None:
            self._deliver(batch)
        else:
            self._misdeliver(batch, self._faults)
        future.set_result(None)
        return future

    def _misdeliver(self, batch: list[Any], faults: random.Random) -> None:
        messages = [m for m in batch if faults.random() > 0.2]
        messages += [m for m in batch if faults.random() < 0.2]
        self._held += [m for m in batch if faults.random() < 0.2]
        if faults.random() < 0.3:
            messages, self._held = messages + self._held, []
        faults.shuffle(messages)
        self._deliver(messages)


class Bench:
    """One verifier and some drafters, connected; runs until all requests have ended."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        mode: Mode,
        faults: random.Random | None = None,
        window: int = 6,
        inline: bool = False,
        **speculation: Any,
    ) -> None:
        config = SpeculationConfig(window=window, **{"verify": VerifyPolicy.all, **speculation})
        reading = [proposer for proposer in proposers.values() if isinstance(proposer, ReadsFeatures)]
        target = self.engine = engine(EAGLE_LAYERS if reading else ())
        speculator = Speculator("v0", mode, config, target.vocab_size, trees=target.supports_trees)
        self.drafts = {name: DraftLoop(name, proposer) for name, proposer in proposers.items()}
        self._threads: list[threading.Thread] = []
        self._attempt, self._next_event = 0, 0
        if inline:
            hosted = [
                InlineDrafter(
                    loop,
                    DrafterLink(
                        loop.proposer.method,
                        window,
                        outbox_to(loop),
                        reads_features=loop.proposer in reading,
                        on_demand=True,
                    ),
                )
                for loop in self.drafts.values()
            ]
            self.verifier = VerifyLoop(target, speculator, hosted)
        else:
            self.verifier = VerifyLoop(target, speculator)
            self._connect(reading, window, faults)
        self._threads.append(threading.Thread(target=self.verifier.run, daemon=True))

    def _connect(self, reading: Sequence[Proposer], window: int, faults: random.Random | None) -> None:
        links = {}
        for name, loop in self.drafts.items():
            outbox = Outbox(Channel(loop.deliver, faults), for_drafter())
            reads = loop.proposer in reading
            links[name] = DrafterLink(loop.proposer.method, window, outbox, reads_features=reads)
            loop.set_verifiers({"v0": Outbox(Channel(self.verifier.deliver, faults), for_verifier())})
        self.verifier.set_drafters(links)
        self._threads += [threading.Thread(target=loop.run, daemon=True) for loop in self.drafts.values()]

    def run(self, batch: Sequence[TargetRequest], timeout_s: float = 120.0) -> dict[str, list[int]]:
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()
        self.verifier.submit([replace(request, attempt=self._attempt) for request in batch])
        self._attempt += 1
        tokens: dict[str, list[int]] = {request.request_id: [] for request in batch}
        left = set(tokens)
        self.finished: dict[str, Finished] = {}
        deadline = time.monotonic() + timeout_s
        while left and time.monotonic() < deadline:
            first, events = self.verifier.poll(self._next_event, 0.5)
            assert first == self._next_event
            self._next_event += len(events)
            for event in events:
                if isinstance(event, Progress):
                    assert event.start == len(tokens[event.request_id])
                    tokens[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    left.remove(event.request_id)
                    self.finished[event.request_id] = event
        assert self.verifier.error is None
        assert not left, f"unfinished: {left}"
        return tokens

    def close(self) -> None:
        for loop in (self.verifier, *self.drafts.values()):
            loop.stop()
        for thread in self._threads:
            thread.join(10)


def truth_of(batch: Sequence[TargetRequest]) -> dict[str, list[int]]:
    """Plain decoding of requests of the tiny target."""
    return _truth_of(tuple(batch))


@functools.cache  # most tests use the same requests
def _truth_of(batch: tuple[TargetRequest, ...]) -> dict[str, list[int]]:
    target = engine()
    for request in batch:
        target.add(request)
    return run(target).tokens


def proposers(kind: str) -> dict[str, Proposer]:
    if kind == "ngram":
        return {"ngram-0": NgramProposer(2, 6, 4096, 64), "ngram-1": NgramProposer(2, 6, 4096, 64)}
    if kind == "suffix":
        return {"suffix-0": SuffixProposer(1, 6, 400, 64), "suffix-1": SuffixProposer(1, 6, 4096, 64)}
    if kind == "draft_model":
        return {"small-0": DraftModelProposer(ragged(tiny_draft()))}
    if kind == "eagle":
        return {"eagle-0": eagle()}
    return {
        name: one for method in ("ngram", "suffix", "draft_model", "eagle") for name, one in proposers(method).items()
    }


@pytest.mark.parametrize("failing", [False, True])
def test_an_engine_is_closed_when_its_loop_ends(failing: bool) -> None:
    """What it has outside the process would stay behind otherwise."""
    bench = Bench({}, Mode.PLAIN)
    closed = []
    bench.engine.close = lambda: closed.append(bench.verifier.error)  # type: ignore[method-assign]
    if failing:
        bench.engine.step = None  # type: ignore[method-assign, assignment]
        bench._threads[0].start()
        bench.verifier.submit(requests(1, 0.0))
        bench._threads[0].join(10)
    else:
        bench.run(requests(2, 0.0))
        bench.close()
    assert len(closed) == 1 and isinstance(closed[0], TypeError) == failing


@pytest.mark.parametrize(
    ("mode", "inline"), [(Mode.COUPLED, False), (Mode.COUPLED, True), (Mode.DECOUPLED, False)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("ngram", 1.0), ("suffix", 1.0), ("draft_model", 1.0), ("eagle", 1.0), ("all", 1.0), ("all", 0.0)],
)
def test_drafted_equals_plain(kind: str, mode: Mode, inline: bool, temperature: float) -> None:
    batch = requests(10, temperature)
    bench = Bench(proposers(kind), mode, draft_wait_s=0.05, inline=inline)
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    assert snapshot["accepted_tokens"] > 0, "no draft was ever accepted, so nothing was tested"
    assert snapshot["committed_tokens"] == sum(f.num_tokens for f in bench.finished.values())
    by_request = [f.stats for f in bench.finished.values()]
    assert sum(stats.accepted for stats in by_request) == snapshot["accepted_tokens"]
    drafters = [loop.snapshot() for loop in bench.drafts.values()]
    assert all(not drafter["open_requests"] for drafter in drafters)
    if kind == "suffix":
        assert all(drafter["history_bytes"] > drafter["history_tokens"] > 0 for drafter in drafters)


@pytest.mark.parametrize("seed", range(4))
def test_a_faulty_channel_changes_no_token_and_drafts_recover(seed: int) -> None:
    batch = requests(8, 1.0)
    bench = Bench(proposers("eagle" if seed % 2 else "ngram"), Mode.DECOUPLED, random.Random(seed), draft_wait_s=0.01)
    try:
        assert bench.run(batch) == truth_of(batch)
        assert bench.verifier.snapshot()["drafted_tokens"] > 0
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("mode", "verify", "seed"),
    [
        (Mode.COUPLED, VerifyPolicy.all, None),
        (Mode.DECOUPLED, VerifyPolicy.all, 1),
        (Mode.DECOUPLED, VerifyPolicy.all, 2),
        (Mode.DECOUPLED, VerifyPolicy.auto, 3),
    ],
)
def test_racing_drafters_share_a_tree(mode: Mode, verify: VerifyPolicy, seed: int | None) -> None:
    """Drafters that agree, contradict each other or lie, also over faulty channels: all of their guesses at once."""
    batch = requests(8, 1.0)
    faults = None if seed is None else random.Random(seed)
    racers = {**proposers("both"), "liar": Liar()}
    bench = Bench(
        racers,
        mode,
        faults,
        candidates=Candidates.tree,
        race=RaceName.always,
        verify=verify,
        coupled_wait_s=0.03,
        draft_wait_s=0.03,
    )
    handed: list[Any] = []
    step = bench.engine.step
    bench.engine.step = lambda tails: handed.extend(tails.values()) or step(tails)  # type: ignore[method-assign, func-returns-value]
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    trees = [tail for tail in handed if isinstance(tail, DraftTree)]
    assert not any(tree.is_chain for tree in trees)
    assert trees or verify is VerifyPolicy.auto, "no two drafters ever disagreed, so nothing was tested"
    assert snapshot["accepted_tokens"] > 0
    credit = {name: accepted for name, (_, accepted) in snapshot["by_drafter"].items()}
    assert max(credit.values()) <= snapshot["accepted_tokens"] <= sum(credit.values())
    assert sum(drafted for drafted, _ in snapshot["by_drafter"].values()) >= snapshot["drafted_tokens"]


class Whims:
    """Stands in for Algorithm 2: any window and mode for any request, another one at every look."""

    changes = 0

    def __init__(self, modes: Sequence[Mode], **_: bool) -> None:
        self._rng = random.Random(7)
        self._plans: dict[str, RequestPlan] = {}

    def plan(self, request_id: str, base: RequestPlan) -> RequestPlan:
        return self._plans.get(request_id, base)

    def forget(self, request_id: str) -> None:
        self._plans.pop(request_id, None)

    def revise(self, views: Sequence[Any], verify_s: Sequence[float]) -> None:
        for view in views:
            mode, window = self._rng.choice(list(Mode)), self._rng.randint(1, view.base.window)
            self._plans[view.request_id] = PLAIN if mode is Mode.PLAIN else RequestPlan(window, mode)
            self.changes += 1


@pytest.mark.parametrize(
    ("temperature", "mode", "race", "names", "lossy"),
    [
        (0.0, Mode.DECOUPLED, RaceName.tail, "ngram-0 ngram-1 small-0", True),
        (1.0, Mode.DECOUPLED, RaceName.always, "ngram-0 small-0 eagle-0 liar", True),
        (1.0, Mode.DECOUPLED, RaceName.off, "ngram-0 small-0 liar", False),
        (0.0, Mode.COUPLED, RaceName.always, "ngram-0 suffix-0 small-0", True),
        (1.0, Mode.COUPLED, RaceName.tail, "ngram-0 small-0 liar", False),
    ],
)
def test_races_and_reconfigurations_change_no_token(
    temperature: float, mode: Mode, race: RaceName, names: str, lossy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step another assignment, window and mode; the channel loses, repeats and reorders."""
    monkeypatch.setattr(planner, "REVISE_EVERY", 1)
    monkeypatch.setattr(planner, "SWITCH_STEPS", 2)
    monkeypatch.setattr(planner, "SWITCH_GAIN", -0.2)  # restless: whatever it has is never good enough
    monkeypatch.setattr(planner, "Reconfigurator", Whims)
    batch = requests(8, temperature)
    drafters = {name: proposer for name, proposer in {**proposers("all"), "liar": Liar()}.items() if name in names}
    faults = random.Random(len(names)) if lossy else None
    bench = Bench(drafters, mode, faults, race=race, draft_wait_s=0.01, coupled_wait_s=0.02)
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    assert snapshot["drafted_tokens"] > 0 and snapshot["ladder"]["plan_changes"] > 10
    assert sum(snapshot["drafted_by_position"]) == snapshot["drafted_tokens"]
    assert sum(snapshot["accepted_by_position"]) == snapshot["accepted_tokens"]


def test_the_self_drafter_is_always_right() -> None:
    """The target as its own drafter, with the same noise at temperature 1: (nearly) every draft token is accepted."""
    batch = requests(6, 1.0, ignore_eos=True)
    bench = Bench({"twin": DraftModelProposer(ragged(tiny_target()))}, Mode.COUPLED)
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    assert snapshot["accepted_tokens"] / snapshot["drafted_tokens"] > 0.95


@pytest.mark.parametrize("verify", [VerifyPolicy.all, VerifyPolicy.auto])
@pytest.mark.parametrize("kind", ["eagle", "all"])
def test_inline_drafters_close_what_has_ended(kind: str, verify: VerifyPolicy) -> None:
    """Models are driven only where a wait pays; what ended meanwhile must not keep its memory."""
    batch = requests(10, 1.0)
    bench = Bench(proposers(kind), Mode.COUPLED, inline=True, verify=verify)
    try:
        for _ in range(2):
            assert bench.run(batch) == truth_of(batch)
        deadline = time.monotonic() + 10.0
        while any(loop.snapshot()["open_requests"] for loop in bench.drafts.values()):
            assert time.monotonic() < deadline, "open requests are left at an idle verifier's drafters"
            time.sleep(0.01)
        inline = bench.verifier.snapshot()["inline"]
        assert inline.keys() == bench.drafts.keys() and any(counters["tails"] for counters in inline.values())
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("mode", "inline"), [(Mode.COUPLED, False), (Mode.COUPLED, True), (Mode.DECOUPLED, False)], ids=str
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_lying_or_crashing_drafter_is_only_slow(mode: Mode, inline: bool, raises: bool) -> None:
    batch = requests(8, 1.0)
    breaker = BreakerConfig(min_drafted=32, min_acceptance=0.1, cooldown_s=60.0)
    drafters = {"liar": (Crasher if raises else Liar)()}
    bench = Bench(drafters, mode, coupled_wait_s=0.05, draft_wait_s=0.05, breaker=breaker, inline=inline)
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    if not raises:
        assert snapshot["breakers"]["liar"]["openings"] >= 1, "the breaker let a useless drafter go on"


def test_a_silent_drafter_delays_a_bounded_number_of_steps() -> None:
    batch = requests(4, 1.0)
    bench = Bench(proposers("ngram"), Mode.COUPLED, coupled_wait_s=0.05, breaker=BreakerConfig(cooldown_s=60.0))
    for loop in bench.drafts.values():
        loop.deliver = lambda messages: None  # type: ignore[method-assign]
    links = {
        name: DrafterLink("ngram", 6, Outbox(Channel(loop.deliver, None), for_drafter()))
        for name, loop in bench.drafts.items()
    }
    bench.verifier.set_drafters({})
    bench.verifier.set_drafters(links)
    try:
        assert bench.run(batch) == truth_of(batch)
        snapshot = bench.verifier.snapshot()
    finally:
        bench.close()
    assert all(breaker["openings"] >= 1 for breaker in snapshot["breakers"].values())


def test_drafters_come_and_go_while_requests_run() -> None:
    batch = requests(8, 1.0, max_tokens=64)
    bench = Bench(proposers("all"), Mode.DECOUPLED, draft_wait_s=0.02)
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
        assert bench.run(batch) == truth_of(batch)
    finally:
        stop.set()
        thread.join()
        bench.close()


def test_impossible_requests_end_with_their_reason() -> None:
    good = requests(2, 0.0)
    bad = TargetRequest("bad", (10**6,), SamplingParams())
    bench = Bench({}, Mode.PLAIN)
    try:
        bench.run([good[0], bad, good[1]])
    finally:
        bench.close()
    assert bench.finished["bad"].finish_reason == "error" and "vocabulary" in bench.finished["bad"].error
    assert bench.finished["r0"].finish_reason != "error"
