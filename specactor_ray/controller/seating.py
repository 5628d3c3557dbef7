"""Seats of a run's actors. A seat is a bundle of a placement group, with its cores, for one actor at a time; it
outlives its actors, so a replacement needs no new room.

The actors of the start sit in gangs: a gang is one placement group for a group of verifiers and its draft actors. An
actor that joins later without a vacant seat gets a placement group of its own. All gangs of a start are placed, or
none is held while another run waits (`docs/design/controller.md`).
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.cluster.backend import Backend, GroupFacts
from specactor_ray.cluster.cores import CoreLedger
from specactor_ray.cluster.names import actor_name, run_and_actor
from specactor_ray.cluster.supply import Demand, NodeSupply, Place, demand_against_supply
from specactor_ray.config.schema import VERIFIERS_PER_GROUP, Config

logger = logging.getLogger(__name__)

_HOLD_S = 2.0
"""Seconds for which a start may hold some of its gangs without the others while another run waits."""
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 16.0
"""Longest wait before the second request of the gangs; doubles with every further one."""


@dataclass(eq=False)
class Gang:
    """A placement group with one bundle for each of its seats."""

    name: str
    number: int | None = None
    """The group of verifiers that it has; None for that of an actor that joined later."""
    seats: list[Seat] = field(default_factory=list)
    group: Any = None
    """Handle of the placement group; None while none is requested."""


@dataclass(eq=False)
class Seat:
    """The place of one actor."""

    stem: str
    """Name such as `ngram-1`; the incarnations in this seat have ids such as `ngram-1#9c0d`."""
    key: str
    index: int
    demand: Demand
    gang: Gang
    bundle: int = 0
    """Number of its bundle in the gang's placement group."""
    node: Place | None = None
    """Its node; None while it waits for room."""
    cores: tuple[int, ...] = ()
    occupant: str | None = None
    """Actor id; None once the actor has left."""


def group_of(seat: int, replicas: int) -> int:
    """The group of the verifier on this seat, from 0. Groups are of about equal size."""
    groups = math.ceil(replicas / VERIFIERS_PER_GROUP)
    return seat // math.ceil(replicas / groups)


def bundle_of_verifier(index: int, config: Config, run: str) -> tuple[str, int]:
    """Name of the placement group, and number of the bundle, of the verifier on this seat."""
    group = group_of(index, config.target.replicas)
    first = next(seat for seat in range(index + 1) if group_of(seat, config.target.replicas) == group)
    return _gang_name(run, group), index - first


def _gang_name(run: str, group: int) -> str:
    return actor_name(run, f"gang-{group}")


class Seating:
    """All seats of a run. Nothing here blocks for long.

    Attributes:
        gangs: Those of the start, then the placement groups of actors that joined later.
        supply: Resources just before the newest placement groups were requested.
        is_complete: Whether all gangs of the start have had room at the same time. No actor starts before.
    """

    def __init__(self, run: str, config: Config, backend: Backend) -> None:
        self._run, self._config, self._backend = run, config, backend
        self._drafters = {drafter.method: drafter for drafter in config.drafters}
        self._ledger = CoreLedger()
        self._rng = random.Random(run)  # two runs may have the same seed, but not the same name
        self.gangs: list[Gang] = []
        self.supply: Sequence[NodeSupply] = ()
        self.is_complete = False
        self._groups: Mapping[str, GroupFacts] = {}
        self._requested_at, self._again_at = 0.0, math.inf
        """Times of the last and of the next request of the gangs of the start."""
        self._attempts = 0

    @property
    def seats(self) -> list[Seat]:
        return [seat for gang in self.gangs for seat in gang.seats]

    def form(self, desired: Mapping[str, int], now: float) -> None:
        """Make and request the gangs of the start: one for each group of verifiers, with the draft actors shared out
        over them evenly."""
        replicas = desired[VERIFIER]
        numbers = range(group_of(replicas - 1, replicas) + 1)
        self.gangs = [Gang(_gang_name(self._run, number), number) for number in numbers]
        for index in range(replicas):
            self._add(self.gangs[group_of(index, replicas)], VERIFIER, index)
        turns = itertools.cycle(self.gangs)
        for key, number in desired.items():
            for index in range(number if key != VERIFIER else 0):
                self._add(next(turns), key, index)
        self._request(self.gangs)
        self._requested_at = now

    def claim(self, keys: Iterable[str]) -> list[Seat]:
        """For each key a vacant seat, else a new one with a placement group of its own that is requested now."""
        vacant = [seat for seat in self.seats if seat.occupant is None]
        claimed, added = list[Seat](), list[Gang]()
        for key in keys:
            seat = next((seat for seat in vacant if seat.key == key), None)
            if seat is not None:
                vacant.remove(seat)
            else:
                taken = {seat.index for seat in self.seats if seat.key == key}
                index = next(number for number in range(len(taken) + 1) if number not in taken)
                added.append(Gang(actor_name(self._run, f"{key}-{index}")))
                self.gangs.append(added[-1])
                seat = self._add(added[-1], key, index)
            seat.node = None  # its bundle may have moved, so it is looked up again
            claimed.append(seat)
        self._request(added)
        return claimed

    def look(self, now: float) -> None:
        """Read the state of all placement groups, in one query, and try again to gather the gangs of the start."""
        self._groups = self._backend.groups()
        if not self.is_complete:
            self._gather(now)

    def settle(self, seat: Seat) -> bool:
        """Take the node of the seat's bundle, as last read, and its cores. False while it waits for room, or its node
        has not answered; ClusterError if the node has too few free cores."""
        facts = self._groups.get(seat.gang.name)
        node = facts.nodes[seat.bundle] if facts is not None and self.is_complete else None
        if node is None or (self._config.cluster.pin_cores and not self._take_cores(seat, node.node_id)):
            return False
        seat.node = node
        return True

    def trim(self, wanted: Mapping[str, int]) -> None:
        """Release the gangs without an occupant that are not needed for the wanted number of each key. Other vacant
        seats stay for later actors: a placement group is released as a whole."""
        total = Counter(seat.key for seat in self.seats)
        for gang in [gang for gang in self.gangs if not any(seat.occupant for seat in gang.seats)]:
            mine = Counter(seat.key for seat in gang.seats)
            if all(total[key] - mine[key] >= wanted.get(key, 0) for key in mine):
                self._discard(gang)
                total -= mine

    def close(self) -> None:
        """Release all gangs."""
        for gang in list(self.gangs):
            self._discard(gang)

    def waiting_demands(self) -> list[Demand]:
        """Those of the actors without room."""
        return [seat.demand for seat in self.seats if seat.occupant and seat.node is None]

    def shortage(self) -> str:
        """A table of what waits for room, what there is, what is missing, and which runs hold it."""
        held: dict[str, Counter[str]] = {}
        for name, facts in self._groups.items():
            run, _ = run_and_actor(name)
            if facts.is_placed and run != self._run:
                held.setdefault(f"run {run}" if run else "other placement groups", Counter()).update(facts.resources)
        return demand_against_supply(self.waiting_demands(), self.supply, held)

    def _add(self, gang: Gang, key: str, index: int) -> Seat:
        size, trainer, stem = self._drafters.get(key, self._config.target), self._config.trainer, f"{key}-{index}"
        guest_cpus = float(trainer.cores or 1) if key == VERIFIER and index < trainer.ranks else 0.0
        demand = Demand(stem, size.cores, size.gpus, guest_cpus if trainer.colocate else 0.0, size.accelerator)
        gang.seats.append(Seat(stem, key, index, demand, gang, len(gang.seats)))
        return gang.seats[-1]

    def _request(self, gangs: Sequence[Gang]) -> None:
        if gangs:
            self.supply = self._backend.supply()
        for gang in gangs:
            gang.group = self._backend.request(gang.name, [seat.demand for seat in gang.seats])

    def _gather(self, now: float) -> None:
        """Wait until all gangs have room. If only some have and another run waits, release them, since that run may
        need no more, and request all again after a random time."""
        if now >= self._again_at:
            self._request(self.gangs)
            self._requested_at, self._again_at = now, math.inf
        if self._again_at < math.inf:
            return
        facts = [self._groups.get(gang.name) for gang in self.gangs]
        placed = sum(one is not None and one.is_placed for one in facts)
        self.is_complete = placed == len(facts)
        if self.is_complete or not placed or now - self._requested_at < _HOLD_S or not self._others_wait():
            return
        for gang in self.gangs:
            self._backend.remove(gang.group)
            gang.group = None
        longest_s = min(_BACKOFF_S * 2.0**self._attempts, _BACKOFF_MAX_S)
        self._attempts += 1
        self._again_at = now + self._rng.uniform(0.1, longest_s)
        many = f"{placed} of {len(facts)} placement groups of the start have room, and another run waits"
        logger.info("%s: released, next attempt in %.1f s", many, self._again_at - now)

    def _others_wait(self) -> bool:
        return any(not facts.is_placed and run_and_actor(name)[0] != self._run for name, facts in self._groups.items())

    def _take_cores(self, seat: Seat, node_id: str) -> bool:
        found = self._backend.cores(node_id)
        if found is None:
            return False
        machine, cores = found
        self._ledger.add_node(node_id, cores, machine)
        if self._ledger.holders(node_id).get(seat.stem, ()) != seat.cores or not seat.cores:
            self._ledger.release(seat.stem)
            seat.cores = self._ledger.take(node_id, seat.demand.cpus, seat.stem)
        return True  # a replacement on the same machine keeps the cores

    def _discard(self, gang: Gang) -> None:
        self.gangs.remove(gang)
        if gang.group is not None:
            self._backend.remove(gang.group)
        for seat in gang.seats:
            self._ledger.release(seat.stem)
