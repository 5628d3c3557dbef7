"""The rollout's side of lending: verifiers without requests are offered to the controller, and asked for back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from specactor_ray.controller.state import Offer

logger = logging.getLogger(__name__)

_OFFER_INTERVAL_S = 1.0
"""Time between two offers: what is not worth lending now may be in a while."""
_ANSWER_TIMEOUT_S = 15.0
"""Longest wait for the answer to an offer."""


class Spares:
    """Which verifiers must not be given requests, because they are lent or were offered.

    One call to the controller is in flight at a time, so an offer and a request to have them back keep their order.

    Args:
        controller: Handle of the controller; None: nothing is ever offered.
        back_timeout_s: Longest wait until verifiers that are asked for serve.
    """

    def __init__(self, controller: Any = None, back_timeout_s: float = 60.0) -> None:
        self.away: set[str] = set()
        self._controller, self._back_timeout_s = controller, back_timeout_s
        self._resting: set[str] = set()
        self._offering: Any = None
        self._asking: Any = None
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
        self.away = self._resting | set(verifiers)
        offer = Offer(tuple(sorted(self.away)), requests, remaining_s)
        self._offering = self._controller.release_verifiers.remote(offer)

    def ask_back(self) -> None:
        """Begin to take all back; waits only for the answer to an offer that is on its way."""
        if self._offering is not None:
            ray.wait([self._offering], timeout=_ANSWER_TIMEOUT_S)
            self.poll()
        if self.away and self._asking is None and self._offering is None:
            self._asking = self._controller.take_back_verifiers.remote(self._back_timeout_s)

    def poll(self) -> bool:
        """Take an answer that came. Returns True when verifiers have just come back: they are in views from now on."""
        if self._offering is not None and is_done(self._offering):
            call, self._offering = self._offering, None
            self._resting = set(_result(call, ()))
            self.away = set(self._resting)
        if self._asking is not None and is_done(self._asking):
            call, self._asking = self._asking, None
            self._are_back = bool(_result(call, False))
            self._resting, self.away = set(), set()
            return True
        return False

    def settle(self) -> bool:
        """Have all back and wait for them. Returns False when some do not serve in time."""
        self.ask_back()
        if self._asking is None:
            return not self.away
        ray.wait([self._asking], timeout=self._back_timeout_s + _ANSWER_TIMEOUT_S)
        return self.poll() and self._are_back


def is_done(call: Any) -> bool:
    """Whether a call has returned or failed."""
    return bool(ray.wait([call], timeout=0)[0])


def _result(call: Any, otherwise: Any) -> Any:
    try:
        return ray.get(call)
    except RayError as error:  # the controller is gone, and soon all its actors are
        logger.warning("the controller does not answer about verifiers that are lent: %s", error)
        return otherwise
