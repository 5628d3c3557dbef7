"""Seats in gangs: all of a start or none is held while another run waits, vacant seats are used again, a gang is
released as a whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.cluster.names import actor_name
from specactor_ray.config.accelerators import KIND_LABEL
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.controller import seating
from specactor_ray.controller.seating import Seat, Seating, bundle_of_verifier
from specactor_ray.simulation.cluster import Machines, VirtualBackend
from specactor_ray.simulation.network import Node
from tests.fakes.virtual import Bench

START = {VERIFIER: 3, "ngram": 3}
"""Three gangs of two CPUs each, where a group has one verifier."""


def make_backend(machines: Machines) -> VirtualBackend:
    bench = Bench()
    never: Callable[..., Any] = lambda _actor: None  # noqa: E731
    return VirtualBackend(bench.network, machines, bench.driver, never, itertools.count())


def make_config(verifiers: int = 2, ngram: int = 2) -> Any:
    drafters = [{"method": "ngram", "replicas": ngram, "hosted": False}]
    return from_mapping({"mode": "decoupled", "target": {"replicas": verifiers}, "drafters": drafters})


class Run:
    """The seating of a run, whose actors occupy their seats at once."""

    def __init__(
        self,
        name: str,
        machines: Machines,
        desired: Mapping[str, int] = START,
        now: float = 0.0,
        config: Config | None = None,
    ) -> None:
        self.machines, self.name, self.desired = machines, name, dict(desired)
        self.backend = make_backend(machines)
        self.seating = Seating(name, config or make_config(*desired.values()), self.backend)
        self.seating.form(desired, now)
        self.settled = list[Seat]()
        self.add([key for key, number in desired.items() for _ in range(number)])

    def add(self, keys: list[str]) -> list[Seat]:
        seats = self.seating.claim(keys)
        for seat in seats:
            seat.occupant = seat.stem
        return seats

    def look(self, now: float) -> int:
        """A round. Returns how many placement groups the run holds."""
        self.seating.look(now)
        waiting = [seat for seat in self.seating.seats if seat.occupant and seat.node is None]
        self.settled += [seat for seat in waiting if self.seating.settle(seat)]
        mine = [group for group in self.machines.groups if group.name.startswith(actor_name(self.name, ""))]
        return sum(not group.homeless for group in mine)

    def leave(self, *seats: Seat) -> None:
        for seat in seats:
            seat.occupant = None


@pytest.fixture
def single_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verifier is a group."""
    monkeypatch.setattr(seating, "VERIFIERS_PER_GROUP", 1)


def machines_of(*cpus: float, seed: int = 0) -> Machines:
    nodes = [Node(f"node-{number}", cpus=size) for number, size in enumerate(cpus)]
    return Machines(nodes, rng=random.Random(seed))


def test_each_group_of_verifiers_is_a_gang_with_its_share_of_draft_actors() -> None:
    run = Run("a", machines_of(64.0), {VERIFIER: 9, "ngram": 3})
    stems = [[seat.stem for seat in gang.seats] for gang in run.seating.gangs]
    assert stems == [
        [*(f"verifier-{n}" for n in range(5)), "ngram-0", "ngram-2"],
        [*(f"verifier-{n}" for n in range(5, 9)), "ngram-1"],
    ]
    assert [group.name for group in run.machines.groups] == [actor_name("a", "gang-0"), actor_name("a", "gang-1")]
    run.look(0.1)
    assert len(run.settled) == 12


def test_ranks_of_the_trainer_are_guests_of_the_first_verifiers() -> None:
    config = make_config(9, 3)
    config.trainer.colocate, config.trainer.ranks, config.trainer.cores = True, 6, 2
    config.target.gpus, config.target.cores = 1, 4
    seats = Seating("a", config, make_backend(machines_of(64.0)))
    seats.form({VERIFIER: 9, "ngram": 3}, 0.0)
    for index in range(6):
        name, bundle = bundle_of_verifier(index, config, "a")
        (gang,) = [gang for gang in seats.gangs if gang.name == name]
        seat = gang.seats[bundle]
        assert seat.stem == f"verifier-{index}" and seat.demand.own_gpus == 0.5
        assert seat.demand.bundle() == {"CPU": 6.0, "GPU": 1.0} and seat.demand.cpus == 4
    others = [seat.demand for seat in seats.seats if seat.key != VERIFIER or seat.index >= 6]
    assert len(others) == 6 and all(demand.own_gpus == demand.gpus for demand in others)


@pytest.mark.usefixtures("single_groups")
@pytest.mark.parametrize("seed", range(6))
def test_of_two_runs_in_a_cluster_for_one_and_a_half_one_starts_and_then_the_other(seed: int) -> None:
    machines = machines_of(9.0, seed=seed)
    a, b = Run("a", machines), Run("b", machines)
    halves, times = 0, (number / 10 for number in itertools.count(1))
    for now in times:
        held = [run.look(now) for run in (a, b)]
        assert all(not run.settled or run.seating.is_complete for run in (a, b)), "no actor starts before all have room"
        halves = halves + 1 if held == [2, 2] else 0
        assert halves < 25, "each holds a half for more than two seconds"
        if 3 in held and now > 10.0:
            break
        assert now < 60.0
    first, second = (a, b) if a.seating.is_complete else (b, a)
    assert len(first.settled) == 6 and not second.settled
    first.seating.close()
    ended = now
    while not second.seating.is_complete:
        now = next(times)
        assert now < ended + 20.0
        second.look(now)
    assert len(second.settled) == 6


@pytest.mark.usefixtures("single_groups")
def test_a_run_keeps_what_it_has_while_no_other_waits() -> None:
    """A growing cluster counts what waits as demand."""
    machines = machines_of(5.0)
    run = Run("a", machines)
    assert [run.look(now) for now in (0.1, 3.0, 30.0)] == [2, 2, 2] and not run.settled
    other = make_backend(machines)
    waiting = other.request("other", [seat.demand for seat in run.seating.seats])
    assert run.look(31.0) == 0, "another waits"
    other.remove(waiting)
    machines.nodes.append(Node("new", cpus=4.0))
    run.look(40.0)
    assert run.look(40.1) == 3 and len(run.settled) == 6


def test_vacant_seats_of_a_gang_are_used_again_and_others_are_released() -> None:
    run = Run("a", machines_of(8.0), {VERIFIER: 1, "ngram": 2})
    run.look(0.1)
    placed = list(run.machines.groups)
    (dead,) = [seat for seat in run.seating.seats if seat.stem == "ngram-1"]
    cores, node = dead.cores, dead.node
    run.leave(dead)
    run.seating.trim({VERIFIER: 1, "ngram": 2})
    assert run.add(["ngram"]) == [dead] and dead.node is None, "its bundle is looked up again"
    run.look(0.2)
    assert (dead.node, dead.cores) == (node, cores) and run.machines.groups == placed, "a replacement in its seat"

    run.leave(dead)
    run.seating.trim({VERIFIER: 1, "ngram": 1})
    assert run.machines.groups == placed, "a placement group cannot give back one bundle"
    again, joined = run.add(["ngram", "ngram"])
    assert again is dead and joined.stem == "ngram-2" and joined.gang.number is None
    assert run.machines.groups[1:] and run.machines.groups[1].name == actor_name("a", "ngram-2")
    run.leave(joined)
    run.seating.trim({VERIFIER: 1, "ngram": 2})
    assert run.machines.groups == placed
    run.seating.close()
    assert not run.machines.groups


@pytest.mark.usefixtures("single_groups")
def test_a_gang_without_occupants_stays_while_its_seats_are_wanted() -> None:
    run = Run("a", machines_of(8.0))
    run.look(0.1)
    gang = run.seating.gangs[1]
    run.leave(*gang.seats)
    run.seating.trim(START)
    assert gang in run.seating.gangs, "replacements may wait for a back-off"
    run.seating.trim({VERIFIER: 2, "ngram": 2})
    assert gang not in run.seating.gangs and len(run.machines.groups) == 2


KINDS = {"a": "H100", "b": "L4", "c": "H100", "d": "L4"}


def make_run_on_kinds(*names: str) -> Run:
    """A verifier on H100 and two draft models on L4."""
    nodes = [Node(name, cpus=8.0, gpus=2.0, labels={KIND_LABEL: KINDS[name]}) for name in names]
    drafter = {"method": "draft_model", "model": "m", "gpus": 1, "accelerator": "L4", "replicas": 2}
    target = {"gpus": 1, "cores": 1, "accelerator": "H100"}
    config = from_mapping({"mode": "decoupled", "target": target, "drafters": [drafter]})
    return Run("a", Machines(nodes), {VERIFIER: 1, "draft_model": 2}, config=config)


def kinds_of(run: Run) -> dict[str, tuple[str, str]]:
    return {seat.stem: (seat.node.node_id, seat.node.kind) for seat in run.seating.seats if seat.node}


def test_actors_sit_on_their_kinds_at_the_start_after_scaling_and_after_the_loss_of_a_node() -> None:
    run = make_run_on_kinds("a", "b", "c")
    run.look(0.1)
    drafters = {"draft_model-0": ("b", "L4"), "draft_model-1": ("b", "L4")}
    verifier = kinds_of(run).pop("verifier-0")
    assert verifier in (("a", "H100"), ("c", "H100")) and kinds_of(run) == {"verifier-0": verifier, **drafters}

    (third,) = run.add(["draft_model"])
    run.look(1.0)
    assert third.node is None, "GPUs of verifiers are free, but of another kind"
    assert "Missing: 0 CPU, 1 GPU (L4)" in run.seating.shortage()
    run.machines.nodes.append(Node("d", cpus=8.0, gpus=3.0, labels={KIND_LABEL: "L4"}))
    run.look(2.0)
    assert kinds_of(run) == {"verifier-0": verifier, **drafters, "draft_model-2": ("d", "L4")}, "a node that joined"

    run.machines.nodes[1].alive = False
    run.leave(*(seat for seat in run.seating.seats if seat.stem in drafters))
    run.add(["draft_model", "draft_model"])
    run.look(3.0)
    moved = dict.fromkeys((*drafters, "draft_model-2"), ("d", "L4"))
    assert kinds_of(run) == {"verifier-0": verifier, **moved}


def test_a_run_of_kinds_waits_for_a_node_of_each() -> None:
    run = make_run_on_kinds("a", "c")
    run.look(0.1)
    assert not run.settled and not run.seating.is_complete
    run.machines.nodes.append(Node("b", cpus=8.0, gpus=2.0, labels={KIND_LABEL: "L4"}))
    run.look(0.2)
    assert len(run.settled) == 3


def test_a_shortage_names_what_is_missing_and_the_runs_that_hold_it() -> None:
    machines = machines_of(8.0)
    evening = Run("evening", machines, {VERIFIER: 3, "ngram": 2})
    evening.look(0.1)
    make_backend(machines).request("", [evening.seating.seats[0].demand])
    run = Run("a", machines, {VERIFIER: 2, "ngram": 2})
    run.look(0.2)
    table = run.seating.shortage()
    for line in ("in all                   4 CPU", "free 3 CPU", "Missing: 1 CPU, 0 GPU"):
        assert line in table
    assert "Held by: other placement groups: 1 CPU, 0 GPU; run evening: 5 CPU, 0 GPU" in table
