"""Updates of all members: which draft actors serve which verifiers, and the current weights.

Verifiers of neighbouring seats form a group, and a draft actor serves whole groups, so that the messages between
verifiers and draft actors grow with the verifiers instead of with their square. Each update has a version, and a member
is sent what it has not acknowledged (`Channel`); a stuck member does not delay others.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from specactor_ray.actors.specs import VERIFIER, ClusterView, Phase
from specactor_ray.cluster.calls import Call
from specactor_ray.config.methods import hosted_drafters, online_drafter
from specactor_ray.config.schema import Config
from specactor_ray.controller.broadcasts import Broadcasts
from specactor_ray.controller.members import UPDATE_TIMEOUT_S, Channel, Member
from specactor_ray.controller.seating import group_of
from specactor_ray.core.clock import Clock
from specactor_ray.core.errors import ActorLostError, FetchError, InputError, SpecActorError, WeightsError
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

Service = frozenset[tuple[str, int]]
"""Pairs of a draft actor and a group that it serves."""
_PEERS_TIMEOUT_S = 30.0
_MOST_FAILED, _MOST_LOST = 2, 4
"""Verifiers that fail to load a version, and that each seat loses meanwhile, before the version is given up."""


def assign_drafters(homes: Mapping[str, int], groups: int) -> Service:
    """Assign the ready draft actors of one method, each with its home, to the groups of verifiers. Each serves its
    home, and other groups are shared out over all. So a loss, and the return to the seat, moves none from its home."""
    served = set(homes.items())
    names, others = sorted(homes), set(range(groups)) - set(homes.values())
    return frozenset(served | {(names[group % len(names)], group) for group in others if names})


class PeerSync:
    """Sends every ready member its peers: draft actors of the group to verifiers, and verifiers to draft actors."""

    def __init__(self, config: Config) -> None:
        self._replicas = config.target.replicas
        self._groups = group_of(self._replicas - 1, self._replicas) + 1
        self._peers: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._version = 0
        self._served: dict[str, Service] = {}
        """Method → its draft actors and the groups they serve."""

    def update(self, members: Iterable[Member], view: ClusterView, now: float) -> None:
        """Send the current lists to members that have not acknowledged them. Never blocks."""
        members = list(members)
        peers = (tuple(view.verifiers), tuple(endpoint.actor_id for endpoint in view.drafters))
        group = {m.actor_id: group_of(m.seat.index, self._replicas) for m in members if m.key == VERIFIER}
        if peers != self._peers:
            self._peers, self._version = peers, self._version + 1
            homes = defaultdict[str, dict[str, int]](dict)
            for member in members:
                if member.actor_id in peers[1]:
                    gang = member.seat.gang.number
                    homes[member.key][member.actor_id] = member.seat.index % self._groups if gang is None else gang
            self._served = {method: assign_drafters(found, self._groups) for method, found in homes.items()}
        for member in members:
            if member.phase is Phase.READY:
                send = functools.partial(self._send, member, view, group)
                member.peers.update(self._version, now, send)

    def _send(self, member: Member, view: ClusterView, group: Mapping[str, int]) -> Call:
        peers: Any
        if member.key == VERIFIER:
            method, mine = "set_drafters", group[member.actor_id]
            peers = [one for one in view.drafters if (one.actor_id, mine) in self._served[one.drafter.method]]
        else:
            method, served = "set_verifiers", self._served.get(member.key, ())
            peers = {id_: at for id_, at in view.verifiers.items() if (member.actor_id, group[id_]) in served}
        return member.call(method, self._version, peers, deadline_s=_PEERS_TIMEOUT_S)


class Trials:
    """The verifiers that try to load a version of the policy's weights.

    Attributes:
        refusal: Why the version is given up: it is sent to no verifier any more.
        problem: The last error of a verifier.
    """

    def __init__(self, version: int, replicas: int) -> None:
        self.refusal: WeightsError | None = None
        self.problem = ""
        self._version, self._most_lost = version, _MOST_LOST * replicas
        self._tried, self._failed = set[str](), set[str]()
        self._loaded = False
        """Whether a verifier has loaded the version: losses are not its fault then."""

    def judge(self, verifiers: Mapping[str, Channel]) -> None:
        """Give the version up if a verifier's error is final, two failed, or `_MOST_LOST` per seat were lost before
        one had loaded it. A `FetchError` is not the version's fault. `verifiers`: the present ones, with their
        updates."""
        for name, channel in verifiers.items():
            self.problem = str(channel.error or self.problem)
            if channel.has_failed and not isinstance(channel.error, FetchError):
                self._failed.add(name)
                if channel.is_final or len(self._failed) >= _MOST_FAILED:
                    self._refuse(str(channel.error))
        self._tried |= verifiers.keys()
        self._tried -= {name for name, channel in verifiers.items() if isinstance(channel.error, FetchError)}
        self._loaded |= any(channel.acked == self._version for channel in verifiers.values())
        lost = len(self._tried - verifiers.keys() - self._failed)
        if lost >= self._most_lost and not self._loaded:
            self._refuse(f"{lost} verifiers in a row were lost meanwhile. {self.problem}")

    def _refuse(self, reason: str) -> None:
        if self.refusal is None:
            self.refusal = WeightsError(f"weights of version {self._version} cannot be loaded: {reason}")
            logger.error("%s", self.refusal)


class WeightSync:
    """Sends the newest weights to members that lack them. One that repeatedly fails to load its own is marked dead, but
    a version that verifiers cannot load is given up (`Trials`): they wait for the next one.

    A method that the trainer teaches has its own weights and versions; no call waits for them. Verifiers that host the
    method get them, too.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._receivers = {VERIFIER: VERIFIER}
        """`VERIFIER` for the target's weights, or the taught method → key of the members that load them."""
        if (taught := online_drafter(config)) is not None:
            hosted = [one.method for one in hosted_drafters(config)]
            self._receivers[taught.method] = VERIFIER if taught.method in hosted else taught.method
        self._newest: dict[str, WeightSet] = {}
        """The newest weights, by the same keys; where there are none, all actors have those of the configuration."""
        self._replicas = config.target.replicas
        self._trials = Trials(0, self._replicas)
        self._broadcasts = Broadcasts()
        self._sending: Call | None = None
        """Call of a broadcast's sender."""
        self._in_place = 0
        """Version of the policy that all verifiers have."""
        self._changed = clock.condition()
        """Guards all weights; notified when every verifier has the policy's newest ones, or they are given up."""

    def set_current(self, weights: WeightSet) -> None:
        """Set new weights of the policy. InputError if they are not newer than the current ones: a version is never
        used for two sets of weights."""
        with self._changed:
            current = self._newest.get(VERIFIER)
            if current is None or weights.version > current.version:
                self._newest[VERIFIER] = weights
                self._trials = Trials(weights.version, self._replicas)
            elif weights.version < current.version or weights.buckets != current.buckets:
                raise InputError(f"weights of version {weights.version} come after version {current.version}")

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until all ready verifiers, at least one, have this version. Returns whether they have. WeightsError: it
        cannot be loaded."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_place >= version or self.is_refused, timeout_s)
            if self._in_place < version and self._trials.refusal is not None:
                raise self._trials.refusal
            return self._in_place >= version

    @property
    def problem(self) -> str:
        """The last error of a verifier with the newest weights, after a colon; empty without one."""
        return f": {self._trials.problem}" if self._trials.problem else ""

    def offer(self, weights: WeightSet) -> None:
        """Take new weights of a draft method. They count if it is taught and the version is newer."""
        with self._changed:
            newest = self._newest.get(weights.method)
            if weights.method in self._receivers and (newest is None or weights.version > newest.version):
                self._newest[weights.method] = weights
            else:
                logger.info("weights %d of %s are not needed", weights.version, weights.method)

    def is_settled(self) -> bool:
        """Whether no policy weights are in flight to verifiers."""
        current = self._newest.get(VERIFIER)
        return current is None or self._in_place >= current.version or self.is_refused

    def update(self, members: Iterable[Member], now: float) -> None:
        """Send missing weights and take the answers that have arrived. Never blocks."""
        with self._changed:
            ready = [member for member in members if member.phase is Phase.READY and member.error is None]
            current, verifiers = self._newest.get(VERIFIER), [one for one in ready if one.key == VERIFIER]
            self._plan(current, verifiers, now)
            for member in ready:
                self._update_one(member, now)
            served = any(map(self._is_current, verifiers))
            # Once it is in place, one that fails is replaced while another one serves.
            if current is not None and not (served and self._in_place == current.version):
                self._trials.judge({member.actor_id: member.weights[VERIFIER] for member in verifiers})
                if not self.is_refused and verifiers and all(map(self._is_current, verifiers)):
                    self._in_place = current.version
                self._changed.notify_all()
            for member in ready:
                self._mark(member)

    def _plan(self, current: WeightSet | None, verifiers: list[Member], now: float) -> None:
        """Take the answer of a broadcast's sender, and let it begin the next one."""
        if self._sending is not None and self._sending.poll():
            self._broadcasts.end(str(self._sending.error or ""))
            self._sending = None
        if current is None or current.broadcast is None or self.is_refused:
            return
        for one in verifiers:
            one.weights[VERIFIER].poll(now)
        first = [one for one in verifiers if one.weights[VERIFIER].is_new(current.version)]
        if (planned := self._broadcasts.plan(current, [one.actor_id for one in first])) is not None:
            sender, limit_s = current.broadcast.sender, UPDATE_TIMEOUT_S + current.load_s
            self._sending = first[0].calls.start(sender, "send_weights", planned, deadline_s=limit_s, retry=False)

    def _update_one(self, member: Member, now: float) -> None:
        for key, weights in self._newest.items():
            if self._receivers[key] != member.key:
                continue
            if key == VERIFIER and self.is_refused:
                member.weights[key].poll(now)
            else:
                member.weights[key].update(weights.version, now, functools.partial(self._send, member, weights))

    def _send(self, member: Member, weights: WeightSet) -> Call:
        limit_s, weights = UPDATE_TIMEOUT_S + weights.load_s, self._broadcasts.of(weights, member.actor_id)
        return member.call("load_weights", weights, deadline_s=limit_s)

    def _mark(self, member: Member) -> None:
        """Mark a member that serves, or that must be replaced."""
        own = member.weights[member.key]
        member.serves = self._is_current(member) or (member.serves and member.key != VERIFIER)
        if isinstance(own.error, ActorLostError):
            member.error = own.error
        elif own.has_failed and member.key == VERIFIER and self.is_refused:
            member.note = str(own.error)
        elif own.has_failed:
            member.error = SpecActorError(f"weights: {own.error}")

    @property
    def is_refused(self) -> bool:
        """Whether the policy's newest weights are given up."""
        return self._trials.refusal is not None

    def _is_current(self, member: Member) -> bool:
        newest = self._newest.get(member.key)
        return newest is None or member.weights[member.key].acked == newest.version
