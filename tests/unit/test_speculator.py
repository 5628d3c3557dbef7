"""What the verifier's speculator asks of drafters and hands to the engine, by a clock of the test's own."""

from __future__ import annotations

import pytest

from specactor_ray.config.schema import BreakerConfig, Candidates, SpeculationConfig, VerifyPolicy
from specactor_ray.loops.speculator import DrafterLink, Speculator
from specactor_ray.messages import DraftTail, Mode, SamplingParams
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.tree import DraftTree
from specactor_ray.targets.base import RowOutput, TargetRequest

SILENT_WAITS = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def speculator(mode: Mode) -> Speculator:
    breaker = BreakerConfig(max_silent_waits=SILENT_WAITS, cooldown_s=60.0)
    config = SpeculationConfig(verify=VerifyPolicy.all, breaker=breaker)
    made = Speculator("v0", mode, config, vocab_size=100, clock=Clock())
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({"slow": DrafterLink("draft_model", 4, outbox)})
    made.open(TargetRequest("r", (1, 2), SamplingParams()))
    return made


def step(spec: Speculator, position: int, message: DraftTail | None) -> None:
    """One step of the verifier that waits in vain; whatever arrives does so too late for it."""
    spec.plan_waits(["r"])
    spec.record_wait(["r"], spec.all_answered(["r"]))
    spec.choose_tails(["r"])
    spec.commit(RowOutput("r", position, [7], [0.0]))
    if message is not None:
        spec.inbox.put([message])
    spec.take_messages()


def openings(spec: Speculator) -> int:
    return int(spec.snapshot()["breakers"]["slow"]["openings"])


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_a_drafter_that_sends_nothing_is_left_alone(mode: Mode) -> None:
    spec = speculator(mode)
    for position in range(SILENT_WAITS + 1):
        step(spec, position, None)
    assert openings(spec) == 1


def test_a_drafter_that_is_always_one_step_late_is_not_silent_in_decoupled_mode() -> None:
    spec = speculator(Mode.DECOUPLED)
    for position in range(5 * SILENT_WAITS):
        step(spec, position, DraftTail("r", "slow", position, (7,)))
    assert spec.snapshot()["tails"]["stale"] > SILENT_WAITS
    assert openings(spec) == 0


def racing(candidates: Candidates, trees: bool) -> Speculator:
    """Three drafters of one request, of different methods; each has said something."""
    config = SpeculationConfig(verify=VerifyPolicy.all, candidates=candidates)
    made = Speculator("v0", Mode.DECOUPLED, config, vocab_size=100, clock=Clock(), trees=trees)
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({name: DrafterLink(name, 4, outbox) for name in "abc"})
    made.open(TargetRequest("r", (1, 2), SamplingParams()))
    guesses = {"a": (5, 6, 7, 8), "b": (5, 9), "c": (5, 6)}
    made.inbox.put([DraftTail("r", drafter, 0, tokens) for drafter, tokens in guesses.items()])
    made.take_messages()
    return made


def test_all_guesses_go_into_one_tree_and_each_is_credited_for_its_own() -> None:
    spec = racing(Candidates.tree, trees=True)
    assert spec.choose_tails(["r"]) == {"r": DraftTree((5, 6, 7, 8, 9), (-1, 0, 1, 2, 0))}
    assert spec.supplied("r") == 4
    spec.commit(RowOutput("r", 0, [5, 9, 3], [0.0] * 3, num_drafted=5, num_accepted=2))
    assert spec.accepted_by_drafter("r") == {"a": (4, 1), "b": (2, 2), "c": (2, 1)}
    assert spec.choose_tails(["r"]) == {}, "every guess was used up or refuted"
    spec.inbox.put([DraftTail("r", "a", 3, (4, 4)), DraftTail("r", "c", 3, (4,))])
    spec.take_messages()
    assert spec.choose_tails(["r"]) == {"r": (4, 4)}, "one branch is an ordinary tail"


def test_what_the_engine_had_no_room_for_is_credited_to_nobody() -> None:
    spec = racing(Candidates.tree, trees=True)
    spec.choose_tails(["r"])
    spec.commit(RowOutput("r", 0, [5, 6], [0.0] * 2, num_drafted=1, num_accepted=1, finish_reason="length"))
    assert spec.accepted_by_drafter("r") == {"a": (1, 1), "b": (1, 1), "c": (1, 1)}


@pytest.mark.parametrize(("candidates", "trees"), [(Candidates.best_tail, True), (Candidates.tree, False)])
def test_the_best_tail_alone_is_verified_without_trees(candidates: Candidates, trees: bool) -> None:
    spec = racing(candidates, trees)
    assert spec.choose_tails(["r"]) == {"r": (5, 6, 7, 8)}
    spec.commit(RowOutput("r", 0, [5, 9], [0.0] * 2, num_drafted=4, num_accepted=1))
    assert spec.accepted_by_drafter("r") == {"a": (4, 1)}
