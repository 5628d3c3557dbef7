"""Messages between the parts: one frozen dataclass per message.

Drafts are predictions for absolute output positions. Output position 0 is the first generated token of a request;
"committed length" counts output tokens, never prompt tokens. Every message may be lost, repeated, reordered or late;
the receiver checks it against its own state (`verify/table.py`, `draft/mirror.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.errors import RangeError, clipped


class Mode(StrEnum):
    """Way of drafting for a request."""

    PLAIN = "plain"
    """No drafts: ordinary decoding."""
    COUPLED = "coupled"
    """The verifier hosts its drafters and runs them between two steps, as far as that pays."""
    DECOUPLED = "decoupled"
    """The verifier uses the present tail; draft actors run ahead up to their windows. Lookups are hosted."""


MAX_TEMPERATURE = 1.0e30
"""Largest temperature, far above the one at which all tokens of any model are equally likely."""
_MOST_STOPS = 65_536
_MOST_STOP_TEXTS, _LONGEST_STOP_TEXT = 64, 256
_NUMBERS: Mapping[str, tuple[type, type, Callable[[Any], bool], str]] = {
    "temperature": (Real, float, lambda value: 0.0 <= value <= MAX_TEMPERATURE, "a number from 0 to 1e30"),
    "top_k": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 (off) to 2**31 - 1"),
    "top_p": (Real, float, lambda value: 0.0 < value <= 1.0, "a number above 0 and at most 1"),
    "max_tokens": (Integral, int, lambda value: 1 <= value < 2**31, "a whole number from 1 to 2**31 - 1"),
    "seed": (Integral, int, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2**64 - 1"),
    "first_position": (Integral, int, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1"),
    "logprobs": (Integral, int, lambda value: 0 <= value <= 20, "a whole number from 0 to 20"),
}
"""Field of `SamplingParams` → its required type, the type it is converted to, its range, and both in words."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the tokens of a request (`specactor_ray.sampling.keyed` has the exact rule).

    The configuration, the API and messages share this class and its bounds.

    Raises:
        RangeError: A value is of the wrong type or out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 selects the argmax."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    max_tokens: int = 128
    """Most output tokens of a request, at least 1."""
    seed: int = 0
    """Key of the noise, an unsigned 64-bit number; the same seed gives the same tokens. In a configuration: seed of the
    run; the seed of every sample is derived from it, its prompt and its number."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an output (and stay in it), besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Continue past the model's own end-of-sequence ids (for benchmarks)."""
    first_position: int = 0
    """Position in the noise of the first output token. A request whose prompt ends with n tokens of an earlier output
    with the same seed sets it to n and gets the tokens that would have followed."""
    stop: tuple[str, ...] = ()
    """Texts that end an output: at the first token with which its text contains one. The token stays, the text is cut
    before the stop text."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop text."""
    logprobs: int = 0
    """Number of most probable tokens at each output position whose log-probabilities are kept, at most 20."""
    prompt_logprobs: bool = False
    """Compute the log-probabilities of the prompt's tokens, under softmax(logits) at any temperature."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RangeError if a value is out of bounds. Unpickled values are not checked before.

        Numbers of numpy become Python's, a list becomes a tuple.
        """
        for name, (kind, plain, is_in_range, allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) is plain and is_in_range(value):
                continue
            try:
                fits = type(value) is plain or (isinstance(value, kind) and not isinstance(value, bool))
                number = plain(value) if fits else None
            except OverflowError:  # a whole number that no float can represent
                number = None
            if number is None or not is_in_range(number):
                raise RangeError(f"sampling.{name}", clipped(value), f"be {allowed}")
            object.__setattr__(self, name, number)
        if type(self.stop_token_ids) is not tuple or self.stop_token_ids:
            self._check_stop_token_ids()
        if type(self.stop) is not tuple or self.stop:
            self._check_stop()
        for name in ("ignore_eos", "include_stop_str_in_output", "prompt_logprobs"):
            if type(getattr(self, name)) is not bool:
                raise RangeError(f"sampling.{name}", clipped(getattr(self, name)), "be true or false")

    def _check_stop_token_ids(self) -> None:
        stops = self.stop_token_ids
        if (
            not isinstance(stops, list | tuple)
            or len(stops) > _MOST_STOPS
            or not all(type(one) is int and 0 <= one < 2**31 for one in stops)
        ):
            allowed = f"hold at most {_MOST_STOPS} token ids, each from 0 to 2**31 - 1"
            raise RangeError("sampling.stop_token_ids", clipped(stops), allowed)
        object.__setattr__(self, "stop_token_ids", tuple(stops))

    def _check_stop(self) -> None:
        texts = self.stop
        if (
            not isinstance(texts, list | tuple)
            or len(texts) > _MOST_STOP_TEXTS
            or not all(type(one) is str and 0 < len(one) <= _LONGEST_STOP_TEXT for one in texts)
        ):
            allowed = f"hold at most {_MOST_STOP_TEXTS} texts, each of 1 to {_LONGEST_STOP_TEXT} characters"
            raise RangeError("sampling.stop", clipped(texts), allowed)
        object.__setattr__(self, "stop", tuple(texts))


@dataclass(frozen=True, slots=True)
class Features:
    """The target's hidden states of consecutive sequence positions, for drafters that read them (EAGLE)."""

    begin: int
    """Sequence position of the first one; 0 is the first token of the prompt."""
    states: Any
    """numpy `(n, layers * hidden)`: float32 or float16; bfloat16 is sent as int16 (`models/wire.py`)."""

    @property
    def end(self) -> int:
        return self.begin + len(self.states)


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Start (or start again) a mirror of this request."""

    row: int
    generation: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    sampling: SamplingParams
    window: int
    """Most draft tokens past the last commit that the drafter has received."""
    features: tuple[Features, ...] = ()
    """States that the verifier still has of the positions so far; only for drafters that request them."""


@dataclass(frozen=True, slots=True, eq=False)
class CommitBatch:
    """Verifier → drafter: tokens of all requests that became final since the last batch.

    A handle names a request: `rows[i]`, its place in the verifier's table, and `generations[i]`, which is used once in
    the life of a verifier. Commits come before closes, and closes before opens.

    A verifier numbers its seats; `session` is the number. On a newer session the drafter closes all requests of the
    verifier; it ignores batches of older ones. The first batch of a seat is sent even if it is empty, so requests that
    a seat leaves open end with the next seat. Tails have no session: a handle names the same request in all of them, so
    a late tail is a draft like any other, a late `lost` costs one opening, and a tail of a request that the seat does
    not draft for is answered with a close.
    """

    verifier_id: str
    rows: np.ndarray
    """int32 `(n,)`, like `generations`, `starts` and `lengths`."""
    generations: np.ndarray
    starts: np.ndarray
    """Output position of the first token."""
    lengths: np.ndarray
    tokens: np.ndarray
    """int32, the tokens of all rows one after the other."""
    opened: tuple[DraftOpen, ...] = ()
    closed: tuple[tuple[int, int, bool], ...] = ()
    """Row, generation, and whether the output ended by itself (it may be used for training) or moved away."""
    features: tuple[tuple[int, tuple[Features, ...]], ...] = ()
    """Row and the states of its positions that were computed since the last commit, up to the one that predicted the
    last of its tokens; only for drafters that request them."""
    session: int = 0
    """Number of the seat's session, from 1; a newer one replaces all requests of older ones."""


class Branches(NamedTuple):
    """Alternatives to the ends of `n` tails: after the first `ats[j]` tokens of tail `tails[j]`, then these tokens.

    The first token of a branch differs from the tail's token at `ats[j]`.
    """

    tails: np.ndarray
    """int32 `(m,)`, ascending: index of the tail."""
    ats: np.ndarray
    """int32 `(m,)`: 0 to the tail's length."""
    lengths: np.ndarray
    """int32 `(m,)`, at least 1."""
    tokens: np.ndarray
    """int32 `(sum of lengths,)`, branch by branch."""


NO_BRANCHES = Branches(*[np.frombuffer(b"", np.int32)] * 4)
"""Read-only, like the arrays of messages that an inbox has accepted."""


@dataclass(frozen=True, slots=True, eq=False)
class TailBatch:
    """Drafter → verifier: draft tokens for request `rows[i]` after the committed prefix of length `bases[i]`.

    A tail is always the whole unverified tail, with its branches. It replaces an earlier one, unless that has a newer
    base, or the same base and more tokens. An empty tail means that the drafter has the prefix up to its base, and no
    draft.
    """

    drafter_id: str
    rows: np.ndarray
    """int32 `(n,)`, like `generations`, `bases` and `lengths`."""
    generations: np.ndarray
    bases: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    """int32, the tokens of all tails one after the other."""
    branches: Branches = NO_BRANCHES
    token_s: float = 0.0
    """Seconds in which a model drafts one token for each of its requests, at its present load; 0 if unknown."""
    lost: tuple[tuple[int, int], ...] = ()
    """Handles of requests that the drafter does not have, or of which it missed a commit: they must be opened again."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable tokens at the committed positions of `n` requests."""

    counts: np.ndarray
    """int32 `(n,)`: number of tokens per position; 0 for a request without `logprobs`."""
    tokens: np.ndarray
    """int32, tokens of all positions one after the other, the most probable first; `logprobs` (float32) likewise."""
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Verifier → rollout: commits of one step (the journal)."""

    requests: tuple[tuple[str, int], ...]
    """Request and attempt, as in `TargetRequest.attempt`."""
    starts: np.ndarray
    """int32 `(n,)`: output position of the first token."""
    lengths: np.ndarray
    tokens: np.ndarray
    """int32, the tokens of all requests one after the other; `logprobs` (float32) and `margins` likewise."""
    logprobs: np.ndarray
    margins: np.ndarray | None = None
    tops: TopTokens | None = None
    """Most probable tokens; None if no request needs any."""

    def rows(self) -> Iterator[tuple[str, list[int], list[float], list[float]]]:
        """Yield request, tokens, log-probabilities and margins (empty without any), one request after the other."""
        end, tokens, logprobs = 0, self.tokens.tolist(), self.logprobs.tolist()
        margins = self.margins.tolist() if self.margins is not None else []
        for (request_id, _), length in zip(self.requests, self.lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield request_id, tokens[begin:end], logprobs[begin:end], margins[begin:end]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counters of one finished request."""

    steps: int = 0
    """Number of decode steps (forwards that committed at least one token)."""
    drafted: int = 0
    """Number of verified draft tokens."""
    accepted: int = 0
    """Number of right draft tokens."""
    by_method: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Draft method → (drafted, accepted)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Verifier → rollout: the request ended; sent exactly once, after its last `Progress`."""

    request_id: str
    finish_reason: str
    """`stop` (end-of-sequence or stop id), `length` (max_tokens or context full) or `error`."""
    stats: RequestStats
    error: str = ""
    num_tokens: int = 0
    """Total number of output tokens; the journal must hold as many."""
    attempt: int = 0
    """Attempt of the request, as in `TargetRequest.attempt`."""
    prompt_logprobs: Any = None
    """float32 `(prompt - 1,)`: log-probabilities of the prompt's tokens from the second on, with
    `SamplingParams.prompt_logprobs`."""


class FinishedOutput(NamedTuple):
    """Rollout → verifier: an output that another verifier finished, for the histories of hosted lookups."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: np.ndarray
    """int32 `(n,)`: output tokens."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Verifier → rollout: this attempt was not begun, because the weights have another version than it requires."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One version of the policy's weights."""

    version: int
    """Version number, from 1; version 0 is the configured model."""
    buckets: tuple[Any, ...]
    """Object references of `WeightBucket`s."""
    num_bytes: int = 0


ToRollout = Progress | Finished | Refused
