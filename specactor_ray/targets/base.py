"""The target engine: owns the truth of the requests it runs.

One `step` runs one forward over prefill chunks and over the draft tails of all running rows, and commits per
row the longest draft prefix that equals what the target samples plus one token of its own. An engine knows no
Ray and no drafters: tails are handed to `step`. Every engine passes `tests/unit/engine_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specactor_ray.messages import SamplingParams

Tail = Sequence[int]
"""Draft tokens of one request."""


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """A request as the engine takes it. `committed_token_ids` are output tokens an earlier engine committed."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    committed_token_ids: tuple[int, ...] = ()
    attempt: int = 0
    """Grows whenever the request is handed out again; a verifier begins each attempt at most once."""
    weight_version: int = 0
    """Version of the weights that its tokens must come from."""


@dataclass(slots=True)
class RowOutput:
    """What one step committed for one request."""

    request_id: str
    start: int
    """Output position of `token_ids[0]`."""
    token_ids: list[int]
    """Accepted draft tokens, then one recovered (first mismatch) or bonus (all matched) token; cut at a stop."""
    logprobs: list[float]
    """Log-probability of each token under softmax(logits / T), before top-k/top-p (T = 1 when temperature is 0)."""
    num_drafted: int = 0
    """Draft tokens verified, up to an accepted one that ends the output."""
    num_accepted: int = 0
    """Draft tokens that equalled what the target sampled."""
    margins: list[float] | None = None
    """Perturbed top-2 margin of each token, when the engine was asked to record it."""
    hidden_states: Any = None
    """numpy `(n, layers * hidden)` (see `messages.Features`), if exported: the target's states of the sequence
    positions `[hidden_start, hidden_start + n)`, position 0 being the first token of the prompt. The outputs of a
    request hand out every position once, in order, up to the one that predicted the newest token."""
    hidden_start: int = 0
    finish_reason: str | None = None
    """`stop`, `length`, `error`, or None while the request runs."""
    error: str = ""


@dataclass(slots=True)
class StepResult:
    """Outputs and cost of one engine step."""

    outputs: list[RowOutput] = field(default_factory=list)
    forward_s: float = 0.0
    sampling_s: float = 0.0
    num_tokens: int = 0
    """Positions in the forward (prefill and verify)."""
    num_prefill_tokens: int = 0


class TargetEngine(Protocol):
    """What a target backend implements. Not thread-safe: one thread drives it."""

    vocab_size: int
    max_model_len: int
    """Most prompt + output tokens of one request."""
    weight_version: int

    def add(self, request: TargetRequest) -> None:
        """Queue a request for admission.

        Raises:
            InputError: It can never run (token id out of range, prompt longer than the context, more cache
                than the memory budget). Nothing was queued; other requests are unaffected.
        """

    def remove(self, request_id: str) -> None:
        """Drop a request, running or waiting, and free its cache. Unknown ids are ignored."""

    def decoding(self) -> list[str]:
        """Ids of the admitted requests whose next step will sample: the ones worth a tail."""

    def has_work(self) -> bool:
        """True while any request is running or waiting."""

    def step(self, tails: Mapping[str, Tail]) -> StepResult:
        """One forward. `tails[request_id]`: draft tokens for output positions from the committed length on, any
        length including 0; ids that are not decoding are ignored.
        """

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the weights (Hugging Face names → tensors) and forget caches of the old ones.

        Raises:
            InputError: A name or shape does not fit; nothing was changed.
        """

    def sleep(self) -> None:
        """Give up the cache's memory until `wake`; for trainers that share the device.

        Raises:
            InputError: Requests are running.
        """

    def wake(self) -> None:
        """Take the memory back; harmless when awake."""

    def close(self) -> None:
        """Free memory and end helpers. The engine cannot be used afterwards."""
