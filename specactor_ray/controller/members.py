"""The controller's record of an actor's incarnation, and the lists of peers that it sends to the members."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.actors.specs import (
    VERIFIER,
    ClusterView,
    Departure,
    DraftActorSpec,
    DraftEndpoint,
    Phase,
    VerifierSpec,
)
from specactor_ray.cluster.supervised import SupervisedActor
from specactor_ray.config.methods import DrafterSpec, inline_drafters
from specactor_ray.config.schema import Config
from specactor_ray.controller.groups import Service, assign_drafters, group_of
from specactor_ray.controller.reconcile import FailureRecord, ObservedActor
from specactor_ray.controller.seats import Seat
from specactor_ray.core.errors import SpecActorError


@dataclass(frozen=True)
class ActorClasses:
    """The plain classes of the actors; `None` stands for those of `specactor_ray.actors`."""

    verifier: type | None = None
    draft: type | None = None

    def resolved(self) -> ActorClasses:
        """The classes with the defaults imported. They load torch, so they are imported only where they are needed."""
        if self.verifier and self.draft:
            return self
        from specactor_ray.actors.draft import DraftActor
        from specactor_ray.actors.verifier import VerifierActor

        return ActorClasses(self.verifier or VerifierActor, self.draft or DraftActor)


@dataclass(eq=False)
class Member:
    """One incarnation of an actor, from its request to its removal."""

    actor_id: str
    key: str
    """`VERIFIER` or the draft method."""
    seat: Seat
    created_at: float
    since: float
    """Time at which the phase began."""
    phase: Phase = Phase.PENDING
    actor: SupervisedActor | None = None
    was_ready: bool = False
    note: str = ""
    """Readable reason why it is not ready."""
    serves: bool = False
    """Whether other processes may use it: a verifier has the current weights, a draft actor has had current ones."""

    @property
    def error(self) -> SpecActorError | None:
        return self.actor.error if self.actor is not None else None

    @property
    def weight_version(self) -> int:
        """Version of the weights that it has loaded: the policy's, or those taught to its method."""
        return self.actor.weights.acked if self.actor is not None else 0

    def enter(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now

    def look(self, now: float, health_interval_s: float) -> bool:
        """Take its actor's answers. Returns True when it became ready just now."""
        if self.actor is None:
            return False
        self.actor.poll(now, health_interval_s)
        if self.actor.error is not None:
            if self.phase in (Phase.STARTING, Phase.READY):
                self.enter(Phase.DEAD, now)
            return False
        if self.phase is not Phase.STARTING or self.actor.started is None or self.actor.facts is None:
            return False
        self.enter(Phase.READY, now)
        self.was_ready = True
        return True

    def observed(self, now: float) -> ObservedActor:
        """Its state as an argument of `decide`."""
        actor = self.actor
        return ObservedActor(
            self.actor_id,
            self.key,
            self.phase,
            phase_age_s=now - self.since,
            created_at=self.created_at,
            was_ready=self.was_ready,
            silent_s=actor.silent_s(now) if actor is not None else 0.0,
            stalled_s=actor.stalled_s if actor is not None else 0.0,
            drained=self.phase is Phase.DRAINING and actor is not None and (actor.drained() or actor.error is not None),
            error=str(self.error or ""),
        )

    def endpoint(self, drafter: DrafterSpec) -> DraftEndpoint:
        """A draft actor as verifiers and the rollout see it."""
        handle = self.actor.handle if self.actor is not None else None
        phase = Phase.STARTING if self.phase is Phase.READY and not self.serves else self.phase
        return DraftEndpoint(self.actor_id, drafter, handle, phase, self.note)

    def row(self, now: float) -> dict[str, Any]:
        """One row of the status table."""
        actor, where = self.actor, self.seat.placement
        facts = actor.facts if actor is not None else None
        return {
            "id": self.actor_id,
            "kind": "verifier" if self.key == VERIFIER else "drafter",
            "method": "" if self.key == VERIFIER else self.key,
            "phase": self.phase.value,
            "node": where.node_ip if where else "",
            "node_id": where.node_id if where else "",
            "pid": facts.pid if facts else None,
            "cores": self.seat.cores,
            "gpus": facts.gpus if facts else (),
            "silent_s": round(actor.silent_s(now), 1) if actor is not None else 0.0,
            "note": (self.note or str(self.error or "") or self._doing()).partition("\n")[0],
            "weight_version": self.weight_version,
            "counters": actor.counters if actor is not None else {},
        }

    def _doing(self) -> str:
        if self.phase is Phase.STARTING and self.actor is not None:
            return "its process starts" if self.actor.facts is None else "it loads"
        inline = self.actor.counters.get("inline") if self.actor is not None else None
        return f"drafts itself: {', '.join(inline)}" if inline else ""


def build_spec(
    config: Config, drafters: Mapping[str, DrafterSpec], member: Member, priors: Mapping[str, float]
) -> VerifierSpec | DraftActorSpec:
    """The specification of this member's actor."""
    level, cores, target = config.run.log_level, member.seat.cores, config.target
    if member.key != VERIFIER:
        return DraftActorSpec(member.actor_id, drafters[member.key], target, cores, level)
    return VerifierSpec(
        member.actor_id,
        target,
        config.speculation,
        config.mode,
        cores,
        level,
        priors,
        max_drafts=max((drafter.window for drafter in drafters.values()), default=0),
        max_branches=max((drafter.branches for drafter in drafters.values()), default=0),
        inline=tuple(drafters[drafter.method] for drafter in inline_drafters(config)),
    )


def next_view(
    last: ClusterView,
    members: Sequence[Member],
    drafters: Mapping[str, DrafterSpec],
    failures: Mapping[str, FailureRecord],
    departed: Mapping[str, Departure],
) -> ClusterView:
    """The view of these members: `last` if nothing changed, else a new view with the next version."""
    handles = {
        member.actor_id: member.actor.handle
        for member in members
        if member.key == VERIFIER and member.phase is Phase.READY and member.serves and member.actor is not None
    }
    endpoints = tuple(member.endpoint(drafters[member.key]) for member in members if member.key != VERIFIER)
    errors = tuple(f"{key}: {record.error}" for key, record in failures.items())
    view = ClusterView(last.version + 1, handles, endpoints, errors, dict(departed))
    return last if _shown(view) == _shown(last) else view


def _shown(view: ClusterView) -> tuple[Any, ...]:
    """The compared parts of a view; actors are identified by their ids."""
    drafters = tuple((e.actor_id, e.phase, e.note, e.handle is None) for e in view.drafters)
    return tuple(view.verifiers), drafters, view.errors, tuple(view.departed)


_NEWS_TIMEOUT_S = 30.0


class PeerNews:
    """Sends every ready member its peers: draft actors of the group to verifiers, and verifiers to draft actors.

    One call per member is in flight; a stuck member does not delay others, and a failed call is repeated.
    """

    def __init__(self, config: Config) -> None:
        self._retry_s = config.cluster.health_interval_s
        self._replicas, self._most = config.target.replicas, config.speculation.verifiers_per_group
        self._peers: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._version = 0
        self._served: dict[str, Service] = {}
        """Method → its draft actors and the groups they serve."""

    def tell(self, members: Iterable[Member], view: ClusterView, now: float) -> None:
        """Send the current lists to actors that have not acknowledged them. Never blocks."""
        members = list(members)
        endpoints = [endpoint for endpoint in view.drafters if endpoint.phase is Phase.READY]
        peers = (tuple(view.verifiers), tuple(endpoint.actor_id for endpoint in endpoints))
        group = {m.actor_id: group_of(m.seat.index, self._replicas, self._most) for m in members if m.key == VERIFIER}
        if peers != self._peers:
            self._peers, self._version = peers, self._version + 1
            self._assign(endpoints, {group[name] for name in view.verifiers})
        for member in members:
            actor = member.actor
            if member.phase is not Phase.READY or actor is None:
                continue
            if actor.news.state() == "failed":
                actor.news.retry_at = now + self._retry_s
            if not actor.news.is_due(self._version, now):
                continue
            peers_of: Any
            if member.key == VERIFIER:
                method, mine = "set_drafters", group[member.actor_id]
                peers_of = [one for one in endpoints if (one.actor_id, mine) in self._served[one.drafter.method]]
            else:
                method, served = "set_verifiers", self._served.get(member.key, ())
                peers_of = {id_: at for id_, at in view.verifiers.items() if (member.actor_id, group[id_]) in served}
            call = actor.call(method, self._version, peers_of, deadline_s=_NEWS_TIMEOUT_S)
            actor.news.send(call, self._version)

    def _assign(self, endpoints: Sequence[DraftEndpoint], groups: Collection[int]) -> None:
        of_method: dict[str, list[str]] = {}
        for one in endpoints:
            of_method.setdefault(one.drafter.method, []).append(one.actor_id)
        self._served = {
            method: assign_drafters(drafters, groups, self._served.get(method, frozenset()))
            for method, drafters in of_method.items()
        }
