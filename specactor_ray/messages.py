"""What the parts say to each other: one frozen dataclass per message.

Drafts are claims about absolute output positions. Output position 0 is the first generated token of a
request; "committed length" counts output tokens, never prompt tokens. Every message may be lost, repeated,
reordered or late; the receiver checks it against what it knows (`speculation/tails.py`, `drafters/mirror.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specactor_ray.errors import InputError


class Mode(StrEnum):
    """How a request is drafted for."""

    PLAIN = "plain"
    """No drafts: ordinary decoding."""
    COUPLED = "coupled"
    """The verifier waits, bounded, for a tail drafted from its latest commit."""
    DECOUPLED = "decoupled"
    """The verifier takes the tail that is there; the drafter runs ahead up to its window."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen (see `sampling.py` for the exact rule).

    Raises:
        InputError: A value is out of range; the message names the field and the allowed range.
    """

    temperature: float = 1.0
    """0 takes the argmax; above 0 the logits are divided by it."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    max_tokens: int = 128
    """Most output tokens, at least 1."""
    seed: int = 0
    """Key of the noise, an unsigned 64-bit number. The same seed gives the same tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output (and stay in it), beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence ids (for benchmarks)."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number, 0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("seed", 0 <= self.seed < 2**64, "between 0 and 2**64 - 1"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InputError(f"sampling.{name} is {getattr(self, name)!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class Features:
    """The target's hidden states of consecutive sequence positions, for drafters that work on them (EAGLE)."""

    begin: int
    """Sequence position of the first one; 0 is the first token of the prompt."""
    states: Any
    """numpy `(n, layers * hidden)`: float32 or float16; bfloat16 travels as int16 (`modeling/wire.py`)."""

    @property
    def end(self) -> int:
        return self.begin + len(self.states)


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Verifier → drafter: start (or start again) a mirror of this request."""

    request_id: str
    verifier_id: str
    prompt_token_ids: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    sampling: SamplingParams
    window: int
    """Most draft tokens past the last commit that the drafter knows of."""
    mode: Mode = Mode.DECOUPLED
    features: tuple[Features, ...] = ()
    """What the verifier still has of the positions so far; only for drafters that ask for it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Verifier → drafter: output tokens `[start, start + len(token_ids))` are final."""

    request_id: str
    verifier_id: str
    start: int
    token_ids: tuple[int, ...]
    window: int
    mode: Mode = Mode.DECOUPLED
    features: tuple[Features, ...] = ()
    """States of the positions that became known since the last commit (with the first one, of the prompt), up to the
    one that predicted the last of `token_ids`; only for drafters that ask for it."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DraftClose:
    """Verifier → drafter: forget this request."""

    request_id: str
    verifier_id: str
    finished: bool = True
    """The output ended by itself; False when the request moved away or was cancelled."""


@dataclass(frozen=True, slots=True)
class DraftTail:
    """Drafter → verifier: after the committed prefix of length `base_len` I guess all of `token_ids`.

    Always the whole unverified tail, so a newer one replaces an older one of the same (request, drafter).
    An empty tail says "I know the prefix up to `base_len` and have no guess".
    """

    request_id: str
    drafter_id: str
    base_len: int
    token_ids: tuple[int, ...]
    weight_version: int = 0
    complete: bool = False
    """No more will come before the next commit: the window is full, or there is no better guess."""
    token_s: float = 0.0
    """The drafter's moving seconds per drafted token for one request, at the load it has now; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class DraftResync:
    """Drafter → verifier: I do not know this request or missed a commit of it; open it again."""

    request_id: str
    drafter_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Verifier → rollout: these output tokens were committed (the journal)."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...] | None = None
    attempt: int = 0
    """Of the request, as `TargetRequest.attempt`."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counters of one finished request."""

    steps: int = 0
    """Decode steps (forwards that committed at least one token)."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Draft tokens that were right."""
    supplied_steps: int = 0
    """Decode steps at which at least one draft token was there."""
    accepted_by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Drafter id → (drafted, accepted)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Verifier → rollout: the request ended; sent exactly once, after its last `Progress`."""

    request_id: str
    finish_reason: str
    """`stop` (end-of-sequence or stop id), `length` (max_tokens or context full) or `error`."""
    stats: RequestStats
    error: str = ""
    num_tokens: int = 0
    """Output tokens in all; what the journal must hold."""
    attempt: int = 0
    """Of the request, as `TargetRequest.attempt`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Verifier → rollout: this attempt was not begun, because the weights are of another version than it asks for."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One version of the policy's weights, for everyone who follows the policy."""

    version: int
    """From 1; version 0 is what the configuration names."""
    buckets: tuple[Any, ...]
    """Object references of `WeightBucket`s."""
    num_bytes: int = 0


ToDrafter = DraftOpen | Commit | DraftClose
ToVerifier = DraftTail | DraftResync
ToRollout = Progress | Finished | Refused
