"""The rollout's side of lending: verifiers without requests are offered to the controller, and asked for back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.controller.state import Offer
from specactor_ray.errors import SpecActorError

logger = logging.getLogger(__name__)

_OFFER_INTERVAL_S = 1.0
"""Time between two offers: what is not worth lending now may be in a while."""
_ANSWER_TIMEOUT_S = 15.0
"""Longest wait for the answer to an offer; more than the controller takes to decide."""


class Spares:
    """Which verifiers must not be given requests, because they are lent or were offered.

    One call to the controller is in flight at a time, so an offer and a request to have them back keep their order.

    Args:
        controller: Handle of the controller; None: nothing is ever offered.
        calls: What calls are made with.
        back_timeout_s: Longest wait until verifiers that are asked for serve.
    """

    def __init__(self, controller: Any, calls: Calls, back_timeout_s: float = 60.0) -> None:
        self.away: dict[str, None] = {}
        """Ids, in order."""
        self._controller, self._calls, self._back_timeout_s = controller, calls, back_timeout_s
        self._resting: tuple[str, ...] = ()
        self._offering: Call | None = None
        self._asking: Call | None = None
        self._are_back = True
        self._offered_at = float("-inf")

    def offer(self, verifiers: Sequence[str], requests: int, remaining_s: float, now: float) -> None:
        """Offer these verifiers in addition to those that rest already. Does nothing while an answer is awaited.

        Args:
            verifiers: Have no requests and are not away.
            requests: Requests that are running.
            remaining_s: Expected seconds until the last of them ends.
            now: Monotonic seconds.
        """
        busy = self._offering is not None or self._asking is not None
        if self._controller is None or busy or now - self._offered_at < _OFFER_INTERVAL_S:
            return
        self._offered_at = now
        self.away = dict.fromkeys(sorted({*self._resting, *verifiers}))
        offer = Offer(tuple(self.away), requests, remaining_s)
        self._offering = self._start("release_verifiers", offer, _ANSWER_TIMEOUT_S)

    def ask_back(self) -> None:
        """Begin to take all back; waits only for the answer to an offer that is on its way."""
        if self._offering is not None:
            self._calls.wait([self._offering], _ANSWER_TIMEOUT_S)
            self.poll()
        if self.away and self._asking is None and self._offering is None:
            limit_s = self._back_timeout_s
            self._asking = self._start("take_back_verifiers", limit_s, limit_s + _ANSWER_TIMEOUT_S)

    def poll(self) -> bool:
        """Take an answer that came. Returns True when verifiers have just come back: they are in views from now on."""
        if self._offering is not None and self._offering.poll():
            call, self._offering = self._offering, None
            # Without an answer any of them may rest by now: all are asked back in time.
            self._resting = tuple(_result(call, tuple(self.away)))
            self.away = dict.fromkeys(self._resting)
        if self._asking is not None and self._asking.poll():
            call, self._asking = self._asking, None
            answer = _result(call, None)
            self._are_back = bool(answer)
            if answer is not None:  # else some may still rest: they are asked back again when they are missed
                self._resting, self.away = (), {}
                return True
        return False

    def settle(self) -> bool:
        """Have all back and wait for them. Returns False when some do not serve in time."""
        self.ask_back()
        if self._asking is None:
            return not self.away
        self._calls.wait([self._asking], self._back_timeout_s + _ANSWER_TIMEOUT_S)
        return self.poll() and self._are_back

    def _start(self, method: str, argument: Any, deadline_s: float) -> Call:
        return self._calls.start(self._controller, method, argument, deadline_s=deadline_s)


def _result(call: Call, otherwise: Any) -> Any:
    try:
        return call.result()
    except SpecActorError as error:
        logger.warning("the controller does not answer about verifiers that are lent: %s", error)
        return otherwise
