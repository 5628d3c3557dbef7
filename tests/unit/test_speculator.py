"""Which drafters the verifier's speculator goes on asking, by a clock of the test's own."""

from __future__ import annotations

import pytest

from specactor_ray.config.schema import BreakerConfig, SpeculationConfig, VerifyPolicy
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.speculator import Speculator
from specactor_ray.messages import DraftTail, Mode, SamplingParams
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.outbox import Outbox
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
