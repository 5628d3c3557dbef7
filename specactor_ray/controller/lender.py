"""Lends the seats of verifiers that have no requests to draft actors: what `lending.decide_lending` needs and does.

The rollout says which verifiers it can do without (`offer`) and asks for them back (`take_back`), from threads of their
own; everything else is called by the one thread that works on the members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from specactor_ray.clock import Clock
from specactor_ray.cluster.backend import Reaper
from specactor_ray.cluster.processes import ProcessFacts
from specactor_ray.config.lending import lendable_methods
from specactor_ray.config.schema import Config
from specactor_ray.controller.lending import decide_lending, ladder_order
from specactor_ray.controller.members import Member
from specactor_ray.controller.seats import Seat
from specactor_ray.controller.state import (
    VERIFIER,
    Action,
    DesiredState,
    FailureRecord,
    ObservedState,
    Offer,
    Phase,
    Policy,
)
from specactor_ray.errors import SpecActorError

logger = logging.getLogger(__name__)

_RESTING = (Phase.ASLEEP, Phase.WAKING)
OFFER_TIMEOUT_S = 10.0


class Lender:
    """Which verifiers are offered and asleep, and what is known about lending.

    Args:
        config: Which methods fit the seat of a verifier.
        policy: When lending pays.
        reaper: Knows whether the process of a draft actor that was removed is gone.
        clock: Time.
        hurry: Wakes the thread that works on the members.
    """

    def __init__(self, config: Config, policy: Policy, reaper: Reaper, clock: Clock, hurry: Callable[[], None]) -> None:
        self._methods, self._policy, self._reaper = lendable_methods(config), policy, reaper
        self._clock, self._hurry = clock, hurry
        self._start_s: dict[str, float] = {}
        """Method → seconds that its last draft actor took from the launch until it was ready."""
        self._left: dict[Seat, ProcessFacts] = {}
        """Verifier's seat → the last draft actor that was removed from it."""
        self._news = clock.condition()
        """Guards what follows; notified when an offer was dealt with."""
        self._offer, self._offered_at, self._number = Offer(), 0.0, 0
        self._seen = self._answered = 0
        """Number of the last offer that a decision was based on, and of the last one that was told to all."""
        self._resting: tuple[str, ...] = ()
        """Verifiers that do not serve: asleep, waking, or awake without the current weights."""
        self._closed = False

    # ---- called by the rollout, from other threads ----

    def offer(self, offer: Offer) -> tuple[str, ...]:
        """Offer these verifiers, and no others. Returns those that were taken and left the view.

        The others serve on: they will not be taken later, unless they are offered again. Without a decision within
        `OFFER_TIMEOUT_S` the offer is withdrawn, and the answer names those that rest by then.
        """
        with self._news:
            number = self._take(offer)
            self._news.wait_for(lambda: self._closed or self._answered >= number, OFFER_TIMEOUT_S)
            if self._answered < number and self._number == number:
                self._take(replace(offer, verifiers=tuple(v for v in offer.verifiers if v in self._resting)))
            return tuple(name for name in offer.verifiers if name in self._resting)

    def take_back(self, timeout_s: float) -> bool:
        """Ask for all verifiers back and wait until they serve. False when some do not within the time."""
        with self._news:
            number = self._take(Offer())
            return self._news.wait_for(
                lambda: self._closed or (self._answered >= number and not self._resting), timeout_s
            )

    def close(self) -> None:
        """Nobody decides any more: let those go who wait."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _take(self, offer: Offer) -> int:
        self._offer, self._offered_at = offer, self._clock.now()
        self._number += 1
        self._hurry()
        return self._number

    # ---- called by the thread that works on the members ----

    def look(self, members: Iterable[Member], now: float) -> None:
        """Take the answers to `sleep` and `wake`."""
        for member in members:
            if member.phase not in _RESTING or member.actor is None or member.actor.error is not None:
                continue
            state = member.actor.rest.state()
            if state == "done" and member.phase is Phase.ASLEEP:
                member.slept = True
            elif state == "done":
                member.enter(Phase.READY, now)
            elif state == "failed" and member.phase is Phase.ASLEEP:
                logger.warning("%s does not sleep and is to serve again", member.actor_id)
                self._withdraw(member.actor_id)
                self.wake(member, now)  # what it did of the sleep, if anything, is unknown
            elif state == "failed":
                member.actor.error = SpecActorError(f"it did not wake: {member.actor.rest.error}")

    def decide(
        self,
        members: Sequence[Member],
        failures: dict[str, FailureRecord],
        desired: DesiredState,
        now: float,
    ) -> list[Action]:
        """What to do about verifiers that are offered, asleep or wanted back."""
        with self._news:
            self._seen = self._number
            offer, offered_at = self._offer, self._offered_at
        if not self._methods:
            return []
        for member in members:
            if member.start_s and member.key != VERIFIER:
                self._start_s[member.key] = member.start_s
        offer = replace(offer, remaining_s=offer.remaining_s - (now - offered_at))
        actors = [replace(m.observed(now), seat_free=m.slept and self.is_free(m.seat, members)) for m in members]
        counters = [m.actor.counters for m in members if m.key == VERIFIER and m.actor is not None]
        methods = ladder_order(self._methods, counters)
        observed = ObservedState(tuple(actors), failures)
        return decide_lending(offer, observed, desired, methods, self._start_s, now, self._policy)

    def send_to_sleep(self, member: Member, now: float) -> None:
        """The verifier leaves the view and gives up its memory."""
        assert member.actor is not None  # it was ready
        member.enter(Phase.ASLEEP, now)
        member.serves, member.slept, member.note = False, False, "asleep"
        member.actor.rest.send(member.actor.call("sleep"))

    def wake(self, member: Member, now: float) -> None:
        """The verifier takes its memory back; `WeightNews` shows it again once it has the current weights."""
        assert member.actor is not None  # it was asleep
        member.enter(Phase.WAKING, now)
        member.slept, member.note = False, ""
        member.actor.rest.send(member.actor.call("wake"))

    def left(self, guest: Member) -> None:
        """A draft actor was removed from the seat of its host."""
        host = guest.seat.host
        if guest.host_id and host is not None and guest.actor is not None and guest.actor.facts is not None:
            self._left[host] = guest.actor.facts

    def is_free(self, seat: Seat, members: Iterable[Member]) -> bool:
        """Whether no draft actor sits on this verifier's seat, and no process of one is left there."""
        if any(member.host_id and member.seat.host is seat for member in members):
            return False
        facts = self._left.get(seat)
        if facts is not None and not self._reaper.follows(facts):
            del self._left[seat]
        return seat not in self._left

    def answer(self, members: Iterable[Member]) -> bool:
        """After all were told: let those go on who wait for it. Returns whether lending is still in motion."""
        members = list(members)
        arriving = any(member.host_id and member.phase is not Phase.READY for member in members)
        with self._news:
            resting = [member for member in members if _rests(member)]
            settled = all(member.slept and member.actor_id in self._offer.verifiers for member in resting)
            self._answered, self._resting = self._seen, tuple(member.actor_id for member in resting)
            if self._number == self._seen:  # what was not taken by now is not on offer any more
                taken = tuple(name for name in self._offer.verifiers if name in self._resting)
                self._offer = replace(self._offer, verifiers=taken)
            self._news.notify_all()
            return arriving or not settled or self._number > self._seen

    def _withdraw(self, actor_id: str) -> None:
        with self._news:
            self._offer = replace(self._offer, verifiers=tuple(v for v in self._offer.verifiers if v != actor_id))


def _rests(member: Member) -> bool:
    """A verifier that has served and does not now: asleep, waking, or awake without the current weights."""
    unseen = member.phase is Phase.READY and not member.serves
    return member.key == VERIFIER and (member.phase in _RESTING or unseen)
