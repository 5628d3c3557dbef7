"""The product under simulated faults: its own controller, dispatcher, actors, loops and training steps."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from specactor_ray.simulation.network import VirtualActor
from tests.faults.__main__ import Campaign, main, replay_line, run_campaign, show
from tests.faults.injector import KINDS, OF_TRAINING, SCHEDULED, FaultPlan, Injector
from tests.faults.run import FaultScenario, Simulation, simulate
from tests.faults.training import STEPS
from tests.unit.simulation.test_mutants import pings_are_taken_for_progress


@pytest.mark.parametrize("mode", ["plain", "coupled", "decoupled"])
def test_a_calm_run_ends_with_every_request_and_nothing_else(mode: str) -> None:
    report = simulate(FaultScenario(1, requests=24, mode=mode))
    assert report.violations == []
    assert (report.finished, report.failed, report.faults) == (48, 0, {})


@pytest.mark.parametrize("kind", [*SCHEDULED, "poison", "close early", "kill controller"])
def test_each_kind_of_fault_alone(kind: str) -> None:
    kinds = (kind,) if kind in SCHEDULED else (kind, "freeze actor")
    report = simulate(FaultScenario(3, requests=12, faults=FaultPlan(kinds, 12, 0.3)))
    assert report.violations == []
    assert kind not in SCHEDULED or report.faults[kind]


def test_all_kinds_of_faults_from_the_start() -> None:
    plan = FaultPlan((*SCHEDULED, "from the start"), 60, 0.3)
    assert simulate(FaultScenario(3, requests=8, faults=plan)).violations == []


def test_actors_that_stand_still_for_less_than_the_timeout_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(self: Injector, actor: VirtualActor) -> None:
        self._kernel.freeze(actor.process)
        self._for(3.0, lambda: self._kernel.thaw(actor.process))  # half of `health_timeout_s`

    monkeypatch.setattr(Injector, "_freeze", freeze)
    simulation = Simulation(FaultScenario(4, requests=24, faults=FaultPlan(("freeze actor",), 8, 1.0)))
    report = simulation.run()
    assert report.violations == [] and report.faults["freeze actor"] == 8
    assert [queue.dispatcher.reissues for queue in simulation.queues] == [0]


@pytest.mark.parametrize("kind", [*OF_TRAINING, "kill controller", "kill verifier", "bad links"])
def test_training_ends_as_without_faults(kind: str) -> None:
    report = simulate(FaultScenario(5, requests=16, training=True, faults=FaultPlan((kind,), 12, 0.8)))
    assert report.violations == []
    assert report.faults
    assert report.restarts if kind in ("kill trainer", "kill controller") else True


def test_weights_come_by_broadcast_and_a_group_that_loses_members_costs_no_step() -> None:
    """Without faults every verifier gets all versions so; with them some."""
    calm = Simulation(FaultScenario(6, requests=16, training=True))
    assert calm.run().violations == [] and calm.models.groups.whole == STEPS * calm.scenario.verifiers
    plan = FaultPlan(("kill verifier", "freeze actor", "bad links"), 12, 0.8)
    rough = Simulation(FaultScenario(6, requests=16, training=True, faults=plan))
    assert rough.run().violations == [] and 0 < rough.models.groups.whole < STEPS * rough.scenario.verifiers


LONG_BLOCKADE = FaultScenario(
    3100091,
    verifiers=1,
    drafters=2,
    nodes=4,
    mode="plain",
    faults=FaultPlan(
        (
            *("kill verifier", "kill drafter", "freeze controller", "freeze driver", "wedge engine", "bad links"),
            *("partition", "malformed messages", "scale", "poison", "close early"),
        ),
        count=100,
        interval_s=1.4084364551458664,
    ),
)
"""Poison requests block the only verifier for more than five minutes, which is no standstill."""

# What these found, in the product or in the simulator, is mended; they stay, whatever they find now.
FOUND = [
    *(FaultScenario.draw(24, 50), FaultScenario.draw(800139, 50), FaultScenario.draw(1300125, 100), LONG_BLOCKADE),
    FaultScenario.draw(9020, 25, 24),
]


@pytest.mark.parametrize("scenario", FOUND, ids=lambda scenario: str(scenario.seed))
def test_seeds_that_found_something(scenario: FaultScenario) -> None:
    assert simulate(replace(scenario, stops=False)).violations == []


@pytest.mark.usefixtures("forked")
def test_a_campaign_strikes_as_often_as_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign()
    run_campaign(campaign, 100, seed=1, requests=16)
    assert campaign.num_faults >= 100 and campaign.totals["finished"] > 50
    assert [report.violations for report in campaign.violations] == []
    assert show(campaign) == 0 and "nothing was found" in capsys.readouterr().out


def test_the_line_of_a_failing_scenario_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the watch over progress, a wedged engine is never noticed."""
    pings_are_taken_for_progress(monkeypatch)
    monkeypatch.setattr("tests.faults.run._STANDSTILL_S", 50.0)
    plan = FaultPlan(("wedge engine", "slow actor"), 4, 0.4)
    scenario = FaultScenario(0, requests=4, drafters=1, faults=plan)
    assert simulate(scenario).violations
    line = shlex.split(replay_line(scenario))
    assert line[0] == "scripts/chaos" and main(line[1:]) == 1
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(line[1:]) == 0


def test_every_kind_can_strike() -> None:
    drawn = {kind for seed in range(300) for kind in FaultScenario.draw(seed, 10).faults.kinds}
    assert drawn == set(KINDS)
    assert replace(FaultScenario.draw(7, 10)) == FaultScenario.draw(7, 10)
