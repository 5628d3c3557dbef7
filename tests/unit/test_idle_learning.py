"""Draft loops that learn in their idle time: with a real target, a real head and its real training."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from specactor_ray.config.online import OnlineConfig
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.drafter_training.eagle import new_head
from specactor_ray.drafter_training.online import EagleLearner
from specactor_ray.drafter_training.recording import RolloutRecorder
from specactor_ray.drafters.eagle import EagleProposer
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.loops.idle_learning import IdleLearning
from specactor_ray.messages import DraftOpen, Features, SamplingParams
from specactor_ray.modeling.eagle_checkpoint import load_head, trained_weights
from specactor_ray.modeling.eagle_head import EagleHead
from specactor_ray.modeling.eagle_runner import EagleRunner
from specactor_ray.modeling.loading import load_model
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.targets.base import TargetRequest
from tests.batches import news, opening
from tests.tiny import tiny_eagle, tiny_prompt_ids, tiny_target
from tests.unit.test_loops import Bench, eagle, truth_of

ONLINE = OnlineConfig(learning_rate=3e-3, passes=8, steps_per_version=8, depths=2)


@functools.cache
def _new_head() -> EagleHead:
    model = load_model(str(tiny_target()))
    counts = torch.zeros(512)
    for prompt in tiny_prompt_ids(60, seed=3):
        counts += torch.bincount(torch.tensor(prompt), minlength=512)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return new_head(model, "tiny-target", counts, 400)


def batch_of(number: int, size: int = 16) -> list[TargetRequest]:
    return [
        TargetRequest(f"{number}-{i}", ids, SamplingParams(1.0, max_tokens=40, seed=100 * number + i))
        for i, ids in enumerate(tiny_prompt_ids(size, seed=10 + number))
    ]


class School:
    """Stands in for the controller: one draft loop learns, and all get each version it announces."""

    def __init__(self, bench: Bench, teacher: str) -> None:
        self.versions: list[int] = []
        self._loaded: list[Future[None]] = []
        learner = EagleLearner(copy.deepcopy(_new_head()), ONLINE)

        def announce(version: int, weights: Mapping[str, Any]) -> None:
            taken = {name: tensor.clone() for name, tensor in weights.items()}
            self._loaded += [loop.load_weights(version, taken) for loop in bench.drafts.values()]
            self.versions.append(version)

        loop = bench.drafts[teacher]
        self._begun = loop.learn(lambda: IdleLearning(learner, RolloutRecorder(ONLINE.buffer_tokens), announce))
        self._teacher = loop

    def await_end(self) -> None:
        """Until there is nothing left to learn from, and all have every version."""
        self._begun.result(30)
        deadline = time.monotonic() + 60
        while not self._is_over():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for loaded in self._loaded:
            loaded.result(30)

    def _is_over(self) -> bool:
        counters = self._teacher.snapshot()
        learning = counters["learning"]
        announced = learning["steps"] // ONLINE.steps_per_version == learning["version"] == len(self.versions)
        return announced and not learning["tokens"] and not counters["open_requests"]


def drafter() -> EagleProposer:
    return EagleProposer(EagleRunner(copy.deepcopy(_new_head()), 4 << 20))


def test_later_versions_are_right_more_often_and_no_token_changes() -> None:
    bench = Bench({"eagle-0": drafter(), "eagle-1": drafter()}, True, draft_wait_s=1.0)
    school = School(bench, "eagle-0")
    try:
        for number in range(3):
            batch = batch_of(number)
            assert bench.run(batch) == truth_of(batch)
            school.await_end()
        versions = bench.verifier.snapshot()["by_version"]["eagle"]
        learning = bench.drafts["eagle-0"].snapshot()["learning"]
    finally:
        bench.close()
    assert school.versions == list(range(1, len(school.versions) + 1)) and learning["skipped"] == 0
    assert learning["version"] == len(school.versions) and learning["steps"] // 8 == len(school.versions)
    assert bench.drafts["eagle-1"].proposer.weight_version == len(school.versions), "those that do not learn get it too"
    rates = {version: accepted / drafted for version, (drafted, accepted) in sorted(versions.items()) if drafted > 100}
    assert len(rates) >= 2 and next(iter(rates)) == 0
    assert rates[max(rates)] > 2 * rates[0] + 0.02, rates


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "apart"])
def test_weights_that_come_in_the_middle_of_outputs_change_no_token(inline: bool) -> None:
    """New versions every few milliseconds, some of them nonsense, while requests run."""
    heads = {"eagle-0": eagle(), "eagle-1": eagle()}
    bench = Bench(heads, True, draft_wait_s=0.05, coupled_wait_s=0.1, inline=inline)  # they are waited for
    stop, version = threading.Event(), 0
    good = trained_weights(load_head(str(tiny_eagle()), str(tiny_target())))

    def push() -> None:
        nonlocal version
        while not stop.wait(0.01):
            version += 1
            bad = version % 3 == 0
            weights = {name: torch.randn_like(tensor) for name, tensor in good.items()} if bad else good
            for loop in bench.drafts.values():
                loop.load_weights(version, weights)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    batch = batch_of(9, 10)
    try:
        assert bench.run(batch) == truth_of(batch)
        counts = bench.verifier.snapshot()
    finally:
        stop.set()
        thread.join()
        bench.close()
    table = counts["by_version"]["eagle"]
    assert len(table) > 3, "no version came while requests ran, so nothing was tested"
    assert [sum(pair[place] for pair in table.values()) for place in (0, 1)] == [
        sum(pair[place] for pair in counts["by_drafter"].values()) for place in (0, 1)
    ]
    assert counts["accepted_tokens"] > 0


class Pupil:
    """A learner with a fixed number of steps, which notes what happens during one."""

    skipped = tokens = 0

    def __init__(self, steps: int = 1000, during: Any = None) -> None:
        self.steps, self._left, self._during = 0, steps, during
        self.examples: list[Any] = []

    @property
    def version(self) -> int:
        return self.steps

    def add(self, example: Any) -> None:
        self.examples.append(example)

    def step(self) -> Mapping[str, float] | None:
        if not self._left:
            return None
        self._left -= 1
        self.steps += 1
        if self._during is not None:
            self._during()
        return {"loss": 1.0}

    def weights(self) -> Mapping[str, Any]:
        return {"step": self.steps}


class Notes:
    """A recorder whose examples are what it was told."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def open(self, message: DraftOpen) -> None:
        self.seen[message.request_id] = [message]

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], features: Sequence[Features]) -> None:
        self.seen[request_id].append((start, tuple(token_ids), tuple(features)))

    def close(self, request_id: str) -> Any:
        return self.seen.pop(request_id)

    def forget(self, request_id: str) -> None:
        self.seen.pop(request_id, None)


def learning_loop(pupil: Pupil) -> tuple[DraftLoop, list[int], Notes]:
    loop, announced, notes = DraftLoop("d", NgramProposer(1, 4, 100, 8)), list[int](), Notes()
    loop.learn(lambda: IdleLearning(pupil, notes, lambda version, weights: announced.append(weights["step"])))
    return loop, announced, notes


def test_a_message_interrupts_learning_after_one_step_and_it_rests_while_a_request_is_open() -> None:
    loop: DraftLoop

    def during() -> None:
        if pupil.steps == 3:
            loop.deliver(news([opening(0)]))

    pupil = Pupil(during=during)
    loop, announced, notes = learning_loop(pupil)
    for _ in range(3):
        assert loop.run_once()
    assert pupil.steps == 3 and announced == [1, 2, 3]
    for _ in range(5):  # the message that came during the third step is taken first, and no step follows
        loop.run_once()
    assert pupil.steps == 3 and loop.snapshot()["open_requests"] == 1
    assert loop.proposer.tail("r0")[1], "it drafts meanwhile"
    loop.deliver(news(commits=[(0, 0, [2], 4)]))
    loop.run_once()
    loop.deliver(news(closed=[(0, True)]))
    loop.run_once()
    ((opened, committed),) = pupil.examples
    assert opened.request_id == "r0" and committed == (0, (2,), ()) and not notes.seen
    assert loop.run_once() and pupil.steps > 3


def test_only_finished_outputs_are_learned_from() -> None:
    pupil = Pupil(0)
    loop, announced, notes = learning_loop(pupil)
    for row in range(4):
        loop.deliver(news([opening(row)]))
        loop.run_once()
    assert set(notes.seen) == {"r0", "r1", "r2", "r3"}
    loop.deliver(news(commits=[(0, 7, [2], 4)]))
    loop.deliver(news(closed=[(1, True)], verifier_id="v1"))
    loop.run_once()
    assert len(notes.seen["r0"]) == 1, "a commit that the proposer did not take is not recorded"
    loop.deliver(news(closed=[(0, False)]))
    loop.deliver(news([opening(2, "another")]))
    loop.run_once()
    assert set(notes.seen) == {"r1", "another", "r3"}, "it has moved away; its row is used again"
    loop.set_verifiers({"v0": Link(direct_sender(lambda tails: None))})
    loop.set_verifiers({})
    assert not loop.run_once() and not notes.seen and not pupil.examples and not announced


def test_learning_that_fails_ends_and_drafting_goes_on() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    loop, _, _ = learning_loop(Pupil(during=fail))
    assert not loop.run_once()
    assert loop.snapshot()["failures"] == 1 and "learning" not in loop.snapshot()
    loop.deliver(news([opening(0)]))
    assert loop.run_once() and loop.proposer.tail("r0")[1]


def test_a_learner_that_cannot_be_made_leaves_the_loop_as_it_is() -> None:
    loop = DraftLoop("d", NgramProposer(1, 4, 100, 8))

    def fail() -> IdleLearning:
        raise ValueError("no such head")

    future = loop.learn(fail)
    assert not loop.run_once() and "learning" not in loop.snapshot()
    with pytest.raises(ValueError, match="no such head"):
        future.result(0)
