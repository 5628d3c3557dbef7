"""How good a drafter's guesses are: moving acceptance, and the breaker that stops asking a useless drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specactor_ray.config.schema import BreakerConfig

HALF_LIFE_TOKENS = 256.0
"""Draft tokens after which an observation counts half. Acceptance drifts along an output and between policies."""
PRIOR_TOKENS = 8.0
"""Weight of the prior, in tokens: about one window."""


def expected_accepted(probability: float, length: int) -> float:
    """Expected accepted tokens of a tail: `sum_{i=1..length} p^i`, each token being right with `p` given that those
    before it are (the model behind τ(w) of SpecActor, arXiv 2511.16193, section 4)."""
    p = min(max(probability, 0.0), 1.0)
    if p == 1.0:
        return float(max(0, length))
    return p * (1.0 - p ** max(0, length)) / (1.0 - p)


@dataclass(slots=True)
class Acceptance:
    """Exponentially forgetting acceptance of one stream of verified tails.

    Two numbers, which differ: `rate`, accepted / drafted, the one that is reported; and `probability`, the chance that
    a token is right *given that those before it are*. Tokens behind the first wrong one were never put to the test,
    so they count for the first and not for the second, and `expected_accepted` needs the second.
    """

    prior: float = 0.5
    """What both numbers are before anything was observed."""
    prior_tokens: float = PRIOR_TOKENS
    """Weight of the prior, in tokens."""
    half_life_tokens: float = HALF_LIFE_TOKENS
    """Draft tokens after which an observation counts half."""
    drafted: float = 0.0
    """Moving count of draft tokens verified."""
    tried: float = 0.0
    """Moving count of draft tokens whose predecessors were all right."""
    accepted: float = 0.0
    """Moving count of draft tokens that were right."""

    def record(self, drafted: int, accepted: int) -> None:
        """One verified tail: `accepted` of its `drafted` tokens were right, counted from the first."""
        if drafted <= 0:
            return
        accepted = min(max(accepted, 0), drafted)
        fade = 0.5 ** (drafted / self.half_life_tokens)
        self.drafted = self.drafted * fade + drafted
        self.tried = self.tried * fade + min(accepted + 1, drafted)
        self.accepted = self.accepted * fade + accepted

    def discount(self, share: float) -> None:
        """What was observed so far counts only this share from now on."""
        self.drafted, self.tried, self.accepted = share * self.drafted, share * self.tried, share * self.accepted

    @property
    def rate(self) -> float:
        """Accepted / drafted, drawn to the prior."""
        return self._ratio(self.drafted, self.prior)

    @property
    def probability(self) -> float:
        """Chance that a token is right given that those before it are, drawn to the prior."""
        return self.probability_given(self.prior)

    def probability_given(self, prior: float) -> float:
        """`probability` with another prior."""
        return self._ratio(self.tried, prior)

    def expected_accepted(self, length: int) -> float:
        """Expected accepted tokens of a tail of this length."""
        return expected_accepted(self.probability, length)

    def _ratio(self, trials: float, prior: float) -> float:
        weight = trials + self.prior_tokens
        return (self.accepted + prior * self.prior_tokens) / weight if weight > 0 else prior


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """The drafter is asked."""
    OPEN = "open"
    """The drafter is left alone until the cooldown is over."""
    HALF_OPEN = "half_open"
    """The drafter is on probation."""


_MAX_BACKOFF = 16


@dataclass(slots=True)
class CircuitBreaker:
    """Stops asking a drafter that does not help; one per (verifier, drafter).

    Closed → open: the moving acceptance rate fell below `min_acceptance` over at least `min_drafted` tokens, or
    `max_silent_waits` waits in a row went unanswered. Open → half open: `cooldown_s` after the first `allows` that said
    no. Half open → closed: the first verified tails reach `min_acceptance`; → open: they do not, or a quarter of
    `max_silent_waits` go unanswered. Every failed probe doubles the cooldown, up to 16-fold; a good one resets it.

    Call `record` once per step with sums over the requests: then a probe is one step, not the luck of one request.
    """

    config: BreakerConfig = field(default_factory=BreakerConfig)
    state: BreakerState = BreakerState.CLOSED
    openings: int = 0
    """How often it opened, failed probes included."""
    reason: str = ""
    """Why it opened last."""
    _seen: Acceptance = field(default_factory=lambda: Acceptance(prior_tokens=0.0))
    _drafted: int = 0
    _silent: int = 0
    _backoff: int = 1
    _retry_at: float | None = None

    def __post_init__(self) -> None:
        self._reset()

    def record(self, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` verified tokens of this drafter were right. While open: a late one, ignored."""
        if drafted <= 0 or self.state is BreakerState.OPEN:
            return
        self._drafted += drafted
        self._seen.record(drafted, accepted)
        enough = self._drafted >= self.config.min_drafted or self.state is BreakerState.HALF_OPEN
        if not enough:
            return
        if self._seen.rate < self.config.min_acceptance:
            rate, limit = self._seen.rate, self.config.min_acceptance
            self._open(f"acceptance {rate:.3f} below {limit:.3f} over {self._drafted} draft tokens")
        elif self.state is BreakerState.HALF_OPEN:
            self._close()

    def record_silence(self) -> None:
        """A wait ended without an answer of this drafter."""
        if self.state is BreakerState.OPEN:
            return
        self._silent += 1
        limit = self.config.max_silent_waits
        # A probe is shorter, or a stopped drafter would cost a coupled verifier many full waits again and again; but
        # longer than one wait, since the drafter has to open its mirrors first.
        if self.state is BreakerState.HALF_OPEN:
            limit = max(1, limit // 4)
        if self._silent >= limit:
            self._open(f"{self._silent} waits in a row without an answer")

    def record_answer(self) -> None:
        """The drafter answered, be it only that it has no guess."""
        self._silent = 0

    def allows(self, now: float) -> bool:
        """May the drafter be asked and waited for? `now`: seconds of any steady clock."""
        if self.state is not BreakerState.OPEN:
            return True
        if self._retry_at is None:
            self._retry_at = now + self.cooldown_s
        if now < self._retry_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._reset()
        return True

    @property
    def cooldown_s(self) -> float:
        """Seconds the breaker stays open, if it is or were open now."""
        return self.config.cooldown_s * self._backoff

    def _open(self, reason: str) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self.state, self.reason, self._retry_at = BreakerState.OPEN, reason, None
        self.openings += 1

    def _close(self) -> None:
        self.state, self._backoff = BreakerState.CLOSED, 1
        self._reset()

    def _reset(self) -> None:
        half_life = 4.0 * max(1, self.config.min_drafted)
        self._seen = Acceptance(prior_tokens=0.0, half_life_tokens=half_life)
        self._drafted = self._silent = 0
