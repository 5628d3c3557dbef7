"""Seats: a placement group and its cores, which outlive their actors.

A replaced actor leaves its seat to the next incarnation, so a replacement needs no new room. Surplus seats are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.cluster.backend import Backend
from specactor_ray.cluster.cores import CoreLedger
from specactor_ray.cluster.names import actor_name
from specactor_ray.cluster.placement import Demand, Placement
from specactor_ray.config.methods import draft_actors
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Seat:
    """Resources for one actor at a time."""

    stem: str
    """Name such as `ngram-1`; the incarnations in this seat have ids such as `ngram-1#9c0d`."""
    key: str
    index: int
    demand: Demand
    group: Any
    placement: Placement | None = None
    cores: tuple[int, ...] = ()
    occupant: str | None = None
    """Actor id; None once the actor has left: the seat then stays for the next one until `Seating.trim`."""


class Seating:
    """All seats of a run. Nothing here blocks for long."""

    def __init__(self, run: str, config: Config, backend: Backend) -> None:
        self._run, self._config, self._backend = run, config, backend
        self._drafters = {drafter.method: drafter for drafter in config.drafters}
        self._ledger = CoreLedger()
        self.seats: list[Seat] = []

    def claim(self, key: str) -> Seat:
        """A vacant seat for an actor of `key`, else a new one whose placement group is requested now."""
        for seat in self.seats:
            if seat.key == key and seat.occupant is None:
                seat.placement = None  # the group may have moved, so it is resolved again
                return seat
        seat = self._new_seat(key)
        self.seats.append(seat)
        return seat

    def settle(self, seat: Seat) -> bool:
        """Resolve the placement of the seat's group, and take its cores.

        Returns:
            False while the group waits for room, or its node has not answered.

        Raises:
            ClusterError: The node has too few free cores.
        """
        where = self._backend.resolve(seat.group)
        if where is None:
            return False
        if self._config.cluster.pin_cores and not self._take_cores(seat, where.node_id):
            return False
        seat.placement = where
        return True

    def trim(self, wanted: Mapping[str, int]) -> None:
        """Remove the vacant seats beyond the wanted number of each key."""
        for seat in [seat for seat in self.seats if seat.occupant is None]:
            if sum(other.key == seat.key for other in self.seats) > wanted.get(seat.key, 0):
                self._discard(seat)

    def close(self) -> None:
        """Remove all seats."""
        for seat in list(self.seats):
            self._discard(seat)

    def demands(self) -> list[Demand]:
        """Resource demands of all seats."""
        return [seat.demand for seat in self.seats]

    def _new_seat(self, key: str) -> Seat:
        taken = {seat.index for seat in self.seats if seat.key == key}
        index = next(number for number in range(len(taken) + 1) if number not in taken)
        stem = f"{key}-{index}"
        size = self._config.target if key == VERIFIER else self._drafters[key]
        demand = Demand(stem, size.cores, size.gpus)
        group = self._backend.request(actor_name(self._run, stem), demand)
        return Seat(stem, key, index, demand, group)

    def _take_cores(self, seat: Seat, node_id: str) -> bool:
        if not self._ledger.knows(node_id):
            answer = self._backend.cores(node_id)
            if answer is None:
                return False
            machine, cores = answer
            self._ledger.add_node(node_id, cores, machine)
        if seat.cores and self._ledger.holders(node_id).get(seat.stem) == seat.cores:
            return True  # a replacement on the same machine keeps the cores
        self._ledger.release(seat.stem)
        seat.cores = self._ledger.take(node_id, seat.demand.cpus, seat.stem)
        return True

    def _discard(self, seat: Seat) -> None:
        self.seats.remove(seat)
        self._backend.remove(seat.group)
        self._ledger.release(seat.stem)


def scale_refusal(config: Config, method: str, number: int | None) -> ConfigError | ClusterError | None:
    """Why there cannot be `number` draft actors of `method` (None: as many as pay); None when it is possible."""
    known = [drafter.method for drafter in config.drafters]
    if config.mode is ModeName.plain:
        return ConfigError("mode", "'plain' uses no drafters.", "start the run with mode=decoupled.")
    if config.mode is ModeName.coupled:
        problem = "'coupled' has no draft actors to scale: the verifiers draft themselves."
        return ConfigError("mode", problem, "start the run with mode=decoupled.")
    if method not in known:
        fix = f"use one of {', '.join(known)}."
        return ConfigError("drafters", f"method {method!r} is not configured for this run.", fix)
    if method not in draft_actors(config):
        problem = f"verifiers draft by {method} themselves, so it has no draft actors to scale."
        key = f"drafters.{known.index(method)}.hosted"
        return ConfigError(key, problem, f"start the run with {key}=false.")
    if number is None:
        key = f"drafters.{known.index(method)}.max_replicas"
        if config.drafters[known.index(method)].max_replicas is None:
            return ConfigError(key, "is not set, so there is no number to scale up to.", f"start the run with {key}=4.")
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        return ConfigError(f"drafters.{method}", f"{number!r} is not a number of draft actors.", "use 0 or more.")
    return None
