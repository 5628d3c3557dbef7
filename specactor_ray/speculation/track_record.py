"""What each request has seen of each draft method, with the draft ladder's averages as its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specactor_ray.speculation.acceptance import Acceptance, expected_accepted
from specactor_ray.speculation.ladder import DraftLadder, Estimate, bucket_of

_MEMORY = 0.9
"""Weight of the past in the moving share of guesses."""
NEW_RANGE_WEIGHT = 0.25
"""What evidence from an earlier range of output positions counts."""


@dataclass(slots=True)
class _Own:
    """One request's record."""

    bucket: int = 0
    verified: int = 0
    by_method: dict[str, Acceptance] = field(default_factory=dict)
    guessing: dict[str, float] = field(default_factory=dict)
    """Method → moving share of the steps at which it had a guess, of those at which it had answered."""


class TrackRecord:
    """Acceptance per (request, draft method). Drafters of one method are alike, so what was learnt survives when a
    request moves to another of them, and when it comes back to a method it has left.

    Ids of drafters that `set_drafters` did not name stand for a method of their own.

    Args:
        ladder: The averages, and where observations are counted too.
    """

    def __init__(self, ladder: DraftLadder | None = None) -> None:
        self.ladder = ladder if ladder is not None else DraftLadder()
        self._methods: dict[str, str] = {}
        self._requests: dict[str, _Own] = {}

    def set_drafters(self, methods: Mapping[str, str]) -> None:
        """Drafter id → method."""
        self._methods = dict(methods)

    def reach(self, request_id: str, position: int) -> None:
        """The request's output has come to this position; evidence from an earlier range counts less from now on."""
        own, bucket = self._own(request_id), bucket_of(position)
        if bucket != own.bucket:
            own.bucket = bucket
            for acceptance in own.by_method.values():
                acceptance.discount(NEW_RANGE_WEIGHT)

    def record(self, request_id: str, drafter_id: str, drafted: int, accepted: int) -> None:
        """`accepted` of the `drafted` tokens that this drafter guessed next for the request were right."""
        if drafted <= 0:
            return
        method, own = self._method(drafter_id), self._own(request_id)
        own.verified += drafted
        acceptance = own.by_method.get(method)
        if acceptance is None:
            acceptance = own.by_method[method] = Acceptance()
        acceptance.record(drafted, accepted)
        self.ladder.record(method, own.bucket, drafted, accepted)

    def probability(self, request_id: str, drafter_id: str) -> float:
        """Chance that a token of this drafter, or of this method, is right given that those before it are."""
        method, own = self._method(drafter_id), self._requests.get(request_id)
        average = self.ladder.probability(method, own.bucket if own is not None else 0)
        acceptance = own.by_method.get(method) if own is not None else None
        return average if acceptance is None else acceptance.probability_given(average)

    def record_answer(self, request_id: str, drafter_id: str, guessed: bool) -> None:
        """At a step this drafter had a guess for the request, or it had said that it has none."""
        method, own = self._method(drafter_id), self._own(request_id)
        before = own.guessing.get(method)
        if before is None:
            before = self.ladder.guessing(method, own.bucket)
        own.guessing[method] = _MEMORY * before + (1.0 - _MEMORY) * guessed
        self.ladder.record_answer(method, own.bucket, guessed)

    def guessing(self, request_id: str, drafter_id: str) -> float:
        """Chance that this drafter, or this method, has a guess at all for the request."""
        method, own = self._method(drafter_id), self._requests.get(request_id)
        if own is not None and method in own.guessing:
            return own.guessing[method]
        return self.ladder.guessing(method, own.bucket if own is not None else 0)

    def estimate(self, request_id: str, drafter_id: str) -> Estimate:
        """Both as one."""
        return Estimate(self.probability(request_id, drafter_id), self.guessing(request_id, drafter_id))

    def expected_accepted(self, request_id: str, drafter_id: str, length: int) -> float:
        """Expected accepted tokens of a tail of this length; the score for choosing among tails."""
        return expected_accepted(self.probability(request_id, drafter_id), length)

    def bucket(self, request_id: str) -> int:
        """Range of output positions the request is in."""
        own = self._requests.get(request_id)
        return own.bucket if own is not None else 0

    def verified(self, request_id: str) -> int:
        """Draft tokens of the request that were put to the test."""
        own = self._requests.get(request_id)
        return own.verified if own is not None else 0

    def forget_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _own(self, request_id: str) -> _Own:
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = _Own()
        return own

    def _method(self, drafter_id: str) -> str:
        return self._methods.get(drafter_id, drafter_id)
