"""Messages between the parts: one frozen dataclass per message.

Drafts are predictions for absolute output positions. Output position 0 is the first generated token of a request;
"committed length" counts output tokens, never prompt tokens. Every message may be lost, repeated, reordered or late;
the receiver checks it against its own state (`table/table.py`, `draft/chains.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.core.types import Probe, SamplingParams, TopTokens


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The target's hidden states of consecutive sequence positions of `n` requests, for drafters that read them."""

    rows: np.ndarray
    """int32 `(n,)`: numbers of the rows, each once."""
    starts: np.ndarray
    """int32 `(n,)`: sequence position of each row's first state, 0 for the first token of the prompt."""
    lengths: np.ndarray
    """int32 `(n,)`: number of states of each row, at least 1."""
    states: Any
    """`(sum(lengths), layers * hidden)`, row by row: a tensor on the engine's device; between processes an array
    (`models/weight_buckets.py`)."""

    def split(self) -> Iterator[tuple[int, int, Any]]:
        """Row, first position and states, a view, row by row."""
        end = 0
        for row, start, length in zip(self.rows.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield row, start, self.states[begin:end]


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Start (or start again) the replica of this request."""

    row: int
    generation: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    sampling: SamplingParams
    window: int
    """Most draft tokens past the last commit that the drafter has received."""


@dataclass(frozen=True, slots=True, eq=False)
class CommitBatch:
    """Verifier → drafter: tokens of all requests that became final since the last batch.

    A handle names a request: `rows[i]`, its place in the verifier's table, and `generations[i]`, which is used once in
    the life of a verifier. Commits come before closes, and closes before opens.

    A verifier numbers its seats from 1; `session` is the number. On a newer session the drafter closes all requests of
    the verifier; it ignores batches of older ones. The first batch of a seat is sent even if it is empty, so requests
    that a seat leaves open end with the next seat. Tails have no session: a late tail is a draft like any other, a late
    `lost` costs one opening, and a tail of a request that the seat does not draft for is answered with a close.
    """

    verifier_id: str
    rows: np.ndarray
    """int32 `(n,)`: rows of the verifier's table."""
    generations: np.ndarray
    """int32 `(n,)`: their generations."""
    starts: np.ndarray
    """int32 `(n,)`: output position of each row's first token."""
    lengths: np.ndarray
    """int32 `(n,)`: number of tokens of each row."""
    tokens: np.ndarray
    """int32: tokens of all rows one after the other."""
    opened: tuple[DraftOpen, ...] = ()
    closed: tuple[tuple[int, int, bool], ...] = ()
    """Row, generation, and whether the output ended by itself (it may be used for training) or moved away."""
    states: States | None = None
    """Hidden states of rows in `rows` or `opened`: those of further positions, up to the one that predicted the row's
    last token; only for drafters that read them. Many arrive in parts, with commits of no tokens."""
    session: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TailBatch:
    """Drafter → verifier: draft tokens for request `rows[i]` after the committed prefix of length `bases[i]`.

    A tail is always the whole unverified tail. Several tails of a request follow one another, the one to verify first;
    the others replace it where committed tokens refute it. They replace earlier tails, unless these have a newer base,
    or the same base and a longer first tail. An empty tail means that the drafter has the prefix up to its base, and no
    draft.
    """

    drafter_id: str
    rows: np.ndarray
    """int32 `(n,)`: rows of the verifier's table."""
    generations: np.ndarray
    """int32 `(n,)`: their generations."""
    bases: np.ndarray
    """int32 `(n,)`: number of committed tokens before each tail."""
    lengths: np.ndarray
    """int32 `(n,)`: number of tokens of each tail."""
    tokens: np.ndarray
    """int32: tokens of all tails one after the other."""
    token_s: float = 0.0
    """Seconds in which a model drafts one token for each of its requests, at its present load; 0 if unknown."""
    lost: tuple[tuple[int, int], ...] = ()
    """Handles of requests that the drafter does not have, or of which it missed a commit: they must be opened again."""


class Verified(NamedTuple):
    """Draft tokens that a step verified, for the `n` requests of a `Progress`."""

    names: tuple[str, ...]
    """Draft methods."""
    methods: np.ndarray
    """int8 `(n,)`: index of the tail's method in `names`; without a tail any."""
    drafted: np.ndarray
    """int16 `(n,)`: number of verified draft tokens."""
    accepted: np.ndarray
    """int16 `(n,)`: number of right draft tokens among these."""


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Verifier → rollout: commits of one step (the journal)."""

    requests: tuple[tuple[str, int], ...]
    """Request and attempt, as in `TargetRequest.attempt`."""
    starts: np.ndarray
    """int32 `(n,)`: output position of each request's first token."""
    lengths: np.ndarray
    """int32 `(n,)`: number of tokens of each request."""
    tokens: np.ndarray
    """int32: tokens of all requests one after the other."""
    logprobs: np.ndarray
    """float32, as `tokens`."""
    margins: np.ndarray | None = None
    """float32, as `tokens`: perturbed top-2 margins, if the engine records them."""
    tops: TopTokens | None = None
    """Most probable tokens; None if no request needs any."""
    verified: Verified | None = None
    """Verified drafts; None if the step verified none."""

    def rows(self) -> Iterator[tuple[str, list[int], list[float], list[float]]]:
        """Yield request, tokens, log-probabilities and margins (empty without any)."""
        end, tokens, logprobs = 0, self.tokens.tolist(), self.logprobs.tolist()
        margins = self.margins.tolist() if self.margins is not None else []
        for (request_id, _), length in zip(self.requests, self.lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield request_id, tokens[begin:end], logprobs[begin:end], margins[begin:end]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counters of one request over all its attempts: of every step with tokens that the rollout received.

    Each step commits its right draft tokens and one token of the target, up to an end of the output. So with `n` output
    tokens `n + discarded` is `steps + accepted`, or less where an accepted token ended the output."""

    steps: int = 0
    """Steps that committed tokens."""
    drafted: int = 0
    """Verified draft tokens."""
    accepted: int = 0
    """Right ones among them."""
    discarded: int = 0
    """Received tokens behind a stop text, which the output does not have; `steps` to `by_method` count their steps."""
    by_method: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Draft method → (drafted, accepted)."""

    @classmethod
    def total(cls, parts: Iterable[RequestStats]) -> RequestStats:
        """Sum of the counters of several requests."""
        steps, drafted, accepted, discarded, methods = 0, 0, 0, 0, dict[str, tuple[int, int]]()
        for one in parts:
            steps, discarded = steps + one.steps, discarded + one.discarded
            drafted, accepted = drafted + one.drafted, accepted + one.accepted
            for method, pair in one.by_method.items():
                before = methods.get(method, (0, 0))
                methods[method] = before[0] + pair[0], before[1] + pair[1]
        return cls(steps, drafted, accepted, discarded, methods)


@dataclass(frozen=True, slots=True)
class Finished:
    """Verifier → rollout: the request ended; sent exactly once, after its last `Progress`."""

    request_id: str
    finish_reason: str
    """`stop` (end-of-sequence or stop id), `length` (max_tokens or context full) or `error`."""
    error: str = ""
    num_tokens: int = 0
    """Total number of output tokens; the journal must hold as many."""
    attempt: int = 0
    """Attempt of the request, as in `TargetRequest.attempt`."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Verifier → rollout: log-probabilities of a prompt's tokens, with `SamplingParams.prompt_logprobs`; sent before
    the first `Progress` of the attempt."""

    request_id: str
    attempt: int
    scores: np.ndarray
    """float32 `(prompt - 1, 3)`: at each position from the second on the log-probability of the prompt's token, the id
    of the most probable token, and its log-probability."""


class FinishedOutput(NamedTuple):
    """Rollout → verifier: an int32 output that another verifier finished, for the histories of hosted lookups."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Refused:
    """Verifier → rollout: this attempt was not begun, because the weights have another version than it requires."""

    request_id: str
    attempt: int
    reason: str


JOIN_S, SLOWEST_S = 30.0, 10.0
"""Longest time in seconds until all members of a broadcast have met; and of its transfers beside that for their
size."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A process group of the trainer's rank 0 and verifiers that brings a version, which the object store has, too."""

    sender: Any
    """Handle of rank 0, which sends."""
    address: str
    port: int
    """Where the members meet."""
    heads: tuple[Any, ...] = ()
    """The `WeightBucket`s without their data."""
    on_gpus: bool = False
    """NCCL in place of gloo."""
    group: str = ""
    """Name of the group, which no other one has; set with the plan, like rank and size."""
    rank: int = 0
    """Rank of the process that gets this message."""
    size: int = 0
    """Number of members; 0: not planned yet."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One version of the target's weights, or of those taught to a draft method, from 1 (0 is the configured model):
    references of `WeightBucket`s."""

    version: int
    buckets: tuple[Any, ...]
    num_bytes: int = 0
    method: str = ""
    """The draft method; empty: the target."""
    probe: Probe | None = field(default=None, compare=False)
    """What an engine computes with these weights; None where none is made, as for draft methods."""
    broadcast: Broadcast | None = field(default=None, compare=False)
    """A way to get them beside the object store."""

    @property
    def transfer_s(self) -> float:
        """Seconds that limits of their transfer have for their size."""
        return transfer_s(self.num_bytes)

    @property
    def load_s(self) -> float:
        """Seconds that limits of arrival and load have beside a fixed time; with a broadcast that fails before."""
        return 2.0 * self.transfer_s + (broadcast_s(self.num_bytes) if self.broadcast is not None else 0.0)


def transfer_s(num_bytes: int) -> float:
    """Longest transfer of this many bytes, in seconds: 100 MB/s, less than any network of a cluster has."""
    return num_bytes / 1e8


def broadcast_s(num_bytes: int) -> float:
    """Longest broadcast of this many bytes, in seconds; one that is still on its way after them is given up."""
    return JOIN_S + 2.0 * SLOWEST_S + transfer_s(num_bytes)


ToRollout = Progress | PromptScores | Finished | Refused
