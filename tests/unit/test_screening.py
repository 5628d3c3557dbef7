"""Whatever arrives at a loop: what is malformed is dropped and counted, and changes neither tokens nor requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.errors import ActorUnavailableError
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.speculator import Speculator
from specactor_ray.loops.verify_loop import VerifyLoop
from specactor_ray.messages import (
    Commit,
    DraftClose,
    DraftOpen,
    DraftResync,
    DraftTail,
    Features,
    Mode,
    Progress,
    SamplingParams,
)
from specactor_ray.queues.conflation import for_drafter, for_verifier
from specactor_ray.queues.outbox import Outbox, direct_sender
from specactor_ray.queues.screening import MOST_MALFORMED, UNKNOWN, drafter_screen, verifier_screen
from specactor_ray.targets.base import TargetRequest
from specactor_ray.targets.hf import HfEngine
from tests.clocks import HandClock
from tests.tiny import tiny_target
from tests.unit.engine_conformance import requests
from tests.unit.test_loops import eos_id, ragged, truth_of

torch.set_num_threads(1)

TAIL = DraftTail("r", "d", 3, (1, 2, 3), 4, True, 0.01)
COMMIT = Commit("r", "v", 0, (1, 2), 4, Mode.COUPLED, (Features(0, np.zeros((2, 8), np.float32)),))
OPENING = DraftOpen("r", "v", (1, 2, 3), (4,), SamplingParams(), 4)
CLOSE = DraftClose("r", "v")


def with_value(message: Any, name: str, value: object) -> Any:
    """A copy with one field set to anything, past the checks of its class."""
    copy = object.__new__(type(message))
    for field in dataclasses.fields(message):
        object.__setattr__(copy, field.name, value if field.name == name else getattr(message, field.name))
    return copy


BAD_NUMBERS: tuple[object, ...] = (None, True, -1, 1.0, "3", 1 << 70, np.int64(3), (), float("nan"))
BAD_TOKENS: tuple[object, ...] = (
    None,
    7,
    "12",
    [1, 2],
    (1, -1),
    (1, 100),
    (1, True),
    (1, 2.0),
    (1, None),
    (np.int64(1),),
)
BAD_IDS: tuple[object, ...] = (None, 3, ("r",), ["r"], b"r", "r" * 5000)
BAD_FEATURES: tuple[object, ...] = (
    None,
    ((),),
    (Features(0, [[0.0]]),),
    (Features(-1, np.zeros((1, 8))),),
    (Features(0, np.zeros(8)),),
    (Features(0, np.array([["x"]])),),
)
BAD_SAMPLING: tuple[object, ...] = (
    None,
    with_value(SamplingParams(), "temperature", "hot"),
    with_value(SamplingParams(), "temperature", float("nan")),
    with_value(SamplingParams(), "top_p", 7.0),
    with_value(SamplingParams(), "seed", -1),
    with_value(SamplingParams(), "seed", 0.5),
    with_value(SamplingParams(), "stop_token_ids", (None,)),
    with_value(SamplingParams(), "max_tokens", 0),
)


def malformed(message: Any, **bad: Sequence[object]) -> Iterator[Any]:
    for name, values in bad.items():
        for value in values:
            yield pytest.param(with_value(message, name, value), id=f"{type(message).__name__}.{name}={value!r:.40}")


FOR_VERIFIER = [
    *malformed(TAIL, request_id=BAD_IDS, drafter_id=BAD_IDS, base_len=BAD_NUMBERS, weight_version=BAD_NUMBERS),
    *malformed(TAIL, token_ids=(*BAD_TOKENS, (1,) * 70_000), complete=(None, 1, "yes")),
    *malformed(TAIL, token_s=(None, True, "1", float("nan"), float("inf"), -1.0, 10**400, 1.0e300)),
    *malformed(DraftResync("r", "d"), request_id=BAD_IDS, drafter_id=BAD_IDS),
    *(pytest.param(thing, id=f"{thing!r:.16}") for thing in (None, 3, "tail", {}, DraftTail, COMMIT, object())),
    pytest.param(object.__new__(DraftTail), id="never filled"),
]
FOR_DRAFTER = [
    *malformed(COMMIT, request_id=BAD_IDS, verifier_id=BAD_IDS, start=BAD_NUMBERS, token_ids=BAD_TOKENS),
    *malformed(COMMIT, window=BAD_NUMBERS, mode=(None, "coupled", 1), features=BAD_FEATURES),
    *malformed(OPENING, prompt_token_ids=BAD_TOKENS, committed_token_ids=BAD_TOKENS, sampling=BAD_SAMPLING),
    *malformed(OPENING, window=BAD_NUMBERS, mode=(None, "coupled", 1), features=BAD_FEATURES),
    *malformed(CLOSE, request_id=BAD_IDS, verifier_id=BAD_IDS, finished=(None, 1, "yes")),
    *(pytest.param(thing, id=f"{thing!r:.16}") for thing in (None, 3, "commit", {}, Commit, TAIL, object())),
    pytest.param(object.__new__(DraftOpen), id="never filled"),
]


def kind_of(value: object) -> str:
    """A name that is the same in each process."""
    return type(value).__name__


@pytest.mark.parametrize("message", FOR_VERIFIER)
def test_a_verifier_drops_what_is_malformed_and_keeps_the_rest(message: object) -> None:
    screen = verifier_screen(100)
    resync = DraftResync("r", "d")
    assert screen.sift([TAIL, message, resync]) == [TAIL, resync]
    assert list(screen.snapshot()["malformed"].values()) == [1]


@pytest.mark.parametrize("message", FOR_DRAFTER)
def test_a_drafter_drops_what_is_malformed_and_keeps_the_rest(message: object) -> None:
    screen = drafter_screen(100, on_cut=lambda sender: None)
    assert screen.sift([OPENING, message, COMMIT, CLOSE]) == [OPENING, COMMIT, CLOSE]
    assert list(screen.snapshot()["malformed"].values()) == [1]


@pytest.mark.parametrize("messages", [None, 3, "abc", TAIL, {"a": 1}, object()], ids=kind_of)
def test_what_is_no_list_is_dropped_as_a_whole(messages: object) -> None:
    screen = verifier_screen(100)
    assert screen.sift(messages) == []
    assert screen.snapshot() == {"malformed": {UNKNOWN: 1}, "cut_off": []}


def test_a_sender_of_nonsense_is_cut_off_alone_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []
    screen = drafter_screen(100, on_cut=left.append)
    bad, mine = dataclasses.replace(COMMIT, start=-1), dataclasses.replace(COMMIT, verifier_id="w")
    screen.sift([bad] * MOST_MALFORMED + [None] * 3 * MOST_MALFORMED)
    assert screen.sift([COMMIT]) == [COMMIT] and not left
    screen.sift([bad] * 50)
    assert left == ["v"] and list(screen.cut_off) == ["v"]
    assert screen.sift([COMMIT, mine]) == [mine]
    assert sum("is cut off" in record.message for record in caplog.records) == 1
    assert screen.snapshot()["malformed"] == {"v": MOST_MALFORMED + 50, UNKNOWN: 3 * MOST_MALFORMED}


def test_what_is_counted_is_bounded_whatever_senders_call_themselves() -> None:
    screen = verifier_screen(100)
    screen.sift([DraftTail("r", f"d{number}", -1, ()) for number in range(5000)])
    counts = screen.snapshot()["malformed"]
    assert len(counts) < 2000 and sum(counts.values()) == 5000 and not screen.cut_off


# ---- the loops ----


@pytest.fixture(scope="module")
def model() -> Any:
    return ragged(tiny_target())


BATCH = requests(3, 1.0, max_tokens=12)


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    return truth_of(BATCH)


class Pair:
    """A verifier and an n-gram drafter, stepped by hand; the test may slip anything into either inbox."""

    def __init__(self, model: Any) -> None:
        self.clock, engine = HandClock(), HfEngine(model, [eos_id()])
        config = SpeculationConfig(verify=VerifyPolicy.all, draft_wait_s=0.0)
        speculator = Speculator("v", Mode.DECOUPLED, config, engine.vocab_size, self.clock)
        self.verifier = VerifyLoop(engine, speculator, clock=self.clock)
        self.drafter = DraftLoop("d", NgramProposer(1, 4, 0, 8), self.clock)
        self.sent: list[Any] = []
        outbox: Outbox[Any] = Outbox(self._to_drafter, for_drafter(), clock=self.clock)
        self.verifier.set_drafters({"d": DrafterLink("ngram", 4, outbox)})
        self.drafter.set_verifiers(
            {"v": Outbox(direct_sender(self.verifier.deliver), for_verifier(), clock=self.clock)}
        )
        self.away = False
        self.tokens: dict[str, list[int]] = {}
        self._next = 0

    def _to_drafter(self, batch: list[Any]) -> Any:
        if self.away:
            raise ActorUnavailableError("away")
        self.sent += batch
        return direct_sender(self.drafter.deliver)(batch)

    def submit(self, batch: Sequence[TargetRequest]) -> None:
        self.verifier.submit(batch)

    def step(self) -> bool:
        self.clock.seconds += 0.01
        working = self.verifier.run_once()
        self.drafter.run_once()
        first, events = self.verifier.poll(self._next, 0.0)
        assert first == self._next
        self._next += len(events)
        for event in events:
            if isinstance(event, Progress):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
        return working

    def run(self) -> dict[str, list[int]]:
        for _ in range(200):
            if not self.step():
                return self.tokens
        raise AssertionError("it did not finish")

    def free(self) -> None:
        self.verifier.cancel([(request.request_id, 10**6) for request in BATCH])
        self.verifier.run_once()


@pytest.fixture
def pair(model: Any) -> Iterator[Pair]:
    made = Pair(model)
    yield made
    made.free()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
IDS = st.sampled_from([request.request_id for request in BATCH] + ["d", "v"]) | ANYTHING
TOKENS = st.lists(st.integers(-2, 600), max_size=6).map(tuple) | ANYTHING


def filled(kind: type, **likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of a message class whose fields hold anything, and often what nearly fits."""
    names = [field.name for field in dataclasses.fields(kind)]

    def fill(values: Sequence[object]) -> Any:
        made = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return st.tuples(*(likely.get(name, ANYTHING) for name in names)).map(fill)


COUNT = st.integers(-1, 14) | ANYTHING
MODE = st.sampled_from(list(Mode)) | ANYTHING
FLAG = st.booleans() | ANYTHING
FEATURES = st.just(()) | filled(Features).map(lambda one: (one,)) | ANYTHING
MESSAGES = st.one_of(
    ANYTHING,
    filled(DraftTail, request_id=IDS, drafter_id=IDS, base_len=COUNT, token_ids=TOKENS, weight_version=COUNT,
           complete=FLAG, token_s=st.floats() | ANYTHING),
    filled(DraftResync, request_id=IDS, drafter_id=IDS),
    filled(DraftOpen, request_id=IDS, verifier_id=IDS, prompt_token_ids=TOKENS, committed_token_ids=TOKENS,
           sampling=st.just(SamplingParams()) | filled(SamplingParams), window=COUNT, mode=MODE, features=FEATURES),
    filled(Commit, request_id=IDS, verifier_id=IDS, start=COUNT, token_ids=TOKENS, window=COUNT, mode=MODE,
           features=FEATURES),
    filled(DraftClose, request_id=IDS, verifier_id=IDS, finished=FLAG),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=st.lists(st.lists(MESSAGES, max_size=8) | ANYTHING, min_size=1, max_size=8), seed=st.integers(0, 9))
def test_nothing_that_arrives_raises_or_changes_a_token(
    model: Any, truth: dict[str, list[int]], batches: list[Any], seed: int
) -> None:
    pair, rng = Pair(model), random.Random(seed)
    try:
        pair.submit(BATCH)
        for batch in batches:
            pair.step()
            for inbox in rng.sample([pair.verifier, pair.drafter], rng.randint(1, 2)):
                inbox.deliver(batch)
        assert pair.run() == truth
    finally:
        pair.free()
    assert pair.verifier.error is None and not pair.drafter.counters.failures


def test_a_drafter_that_is_cut_off_counts_as_out_of_reach(pair: Pair, truth: dict[str, list[int]]) -> None:
    pair.submit(BATCH[:2])
    while not pair.verifier.snapshot()["drafted_tokens"]:
        pair.step()
    before = pair.verifier.snapshot()
    assert before["ladder"]["loads"] == {"d": 2} and before["tails"]["taken"] > 0
    assert len(pair.verifier._speculator.inbox), "a good tail is on its way"
    pair.verifier.deliver([dataclasses.replace(TAIL, drafter_id="d", base_len=-1)] * (MOST_MALFORMED + 1))
    pair.submit(BATCH[2:])
    assert pair.run() == truth
    after = pair.verifier.snapshot()
    assert after["drafted_tokens"] == before["drafted_tokens"], "what it had said before is of no use either"
    assert not [m for m in pair.sent if isinstance(m, DraftOpen) and m.request_id == BATCH[2].request_id]
    assert after["cut_off"] == ["d"] and after["malformed"] == {"d": MOST_MALFORMED + 1}


def test_a_verifier_that_is_cut_off_has_no_requests_left_there(pair: Pair, truth: dict[str, list[int]]) -> None:
    pair.submit(BATCH)
    pair.step()
    pair.drafter.deliver([dataclasses.replace(OPENING, request_id="theirs", verifier_id="w")])
    pair.step()
    assert pair.drafter.snapshot()["open_requests"] == 4
    pair.drafter.deliver([dataclasses.replace(COMMIT, start=-1)] * (MOST_MALFORMED + 1))
    pair.step()
    snapshot = pair.drafter.snapshot()
    assert snapshot["open_requests"] == 1 and snapshot["cut_off"] == ["v"]
    assert pair.run() == truth


def test_a_message_that_the_proposer_cannot_take_costs_one_request(pair: Pair, truth: dict[str, list[int]]) -> None:
    """Well-formed, and still a surprise: only its own request is opened again."""
    proposer = pair.drafter.proposer
    commit = proposer.commit

    def surprised(request_id: str, *rest: Any) -> bool:
        if request_id == "r1" and pair.drafter.counters.failures < 2:
            raise RuntimeError("what is that?")
        return commit(request_id, *rest)

    proposer.commit = surprised  # type: ignore[method-assign]
    close = proposer.close
    proposer.close = lambda *args, **named: 1 / 0 if pair.drafter.counters.failures == 1 else close(*args, **named)  # type: ignore[method-assign, assignment, func-returns-value]
    pair.submit(BATCH)
    assert pair.run() == truth
    assert pair.drafter.counters.failures == 2, "of the commit, and of the close that followed"
    opened = [message.request_id for message in pair.sent if isinstance(message, DraftOpen)]
    assert sorted(opened) == ["r0", "r1", "r1", "r2"]
    assert not pair.drafter.snapshot()["open_requests"]


def test_what_could_not_be_delivered_goes_out_while_the_verifier_is_idle(pair: Pair) -> None:
    pair.submit(BATCH)
    pair.step()
    pair.away = True
    while pair.step():
        pass
    assert pair.drafter.snapshot()["open_requests"], "it has not heard that they have ended"
    retries = pair.verifier.snapshot()["links"]["d"]["retries"]
    assert retries > 0 and not pair.verifier.snapshot()["links"]["d"]["failed"]
    pair.away = False
    pair.clock.seconds += 5.0
    assert not pair.step() and not pair.drafter.snapshot()["open_requests"]


def test_what_could_not_be_delivered_goes_out_while_the_drafter_is_idle(pair: Pair) -> None:
    taken: list[Any] = []

    def to_verifier(batch: list[Any]) -> Any:
        if pair.away:
            raise ActorUnavailableError("away")
        return direct_sender(taken.extend)(batch)

    pair.drafter.set_verifiers({"v": Outbox(to_verifier, for_verifier(), clock=pair.clock)})
    pair.away = True
    pair.drafter.deliver([DraftOpen("x", "v", (1, 2, 1, 2, 1), (), SamplingParams(), 4)])
    while pair.drafter.run_once():
        pass
    assert not taken and pair.drafter.snapshot()["links"]["v"]["retries"] == 1
    pair.away = False
    pair.clock.seconds += 0.1
    assert not pair.drafter.run_once(), "nothing to draft"
    assert [type(message) for message in taken] == [DraftTail]
