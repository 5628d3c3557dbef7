"""Requests of a target engine, the ends of their outputs, and names of counters; without kernels, for commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from specactor_ray.core.errors import InputError, RangeError
from specactor_ray.core.types import SamplingParams

COUNTS = (
    "row_steps", "committed_tokens", "supplied_tokens", "supplied_row_steps", "drafted_tokens", "accepted_tokens",
    "refuted_tails", "rescued_tails",
)  # fmt: skip
"""Indices of `RequestTable.counts`; `verify.metrics.StepMetrics` documents them."""


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """A request for an engine. `committed_token_ids` are output tokens that an earlier engine committed."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    committed_token_ids: tuple[int, ...] = ()
    attempt: int = 0
    """Number of the attempt, which grows when the request is sent again; a verifier begins each attempt at most
    once."""
    weight_version: int = 0
    """Version of the weights that must generate its tokens."""


class Finish(IntEnum):
    """End of a row's output."""

    RUNNING = 0
    STOP = 1
    """The output ended with an end-of-sequence or stop id."""
    LENGTH = 2
    """The output reached max_tokens, or the context is full."""
    ERROR = 3
    """The row's logits cannot be sampled from."""

    @property
    def reason(self) -> str:
        """`stop`, `length` or `error`."""
        return self.name.lower()


def refuse_unknown(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for a token id that is not in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        position, token = next(one for one in enumerate(token_ids) if not 0 <= one[1] < vocab_size)
        raise InputError(f"token id {token} at position {position} is outside the vocabulary (0 to {vocab_size - 1})")


def refuse_impossible(request: TargetRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise InputError for a request that can never run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InputError("the prompt has no tokens")
    refuse_unknown((*prompt, *request.committed_token_ids), vocab_size)
    if (stop := max(request.sampling.stop_token_ids, default=0)) >= vocab_size:
        raise RangeError("sampling.stop_token_ids", str(stop), f"hold token ids of the model, at most {vocab_size - 1}")
    if (logprobs := request.sampling.logprobs) > vocab_size:
        raise RangeError("sampling.logprobs", str(logprobs), f"be at most {vocab_size}, the size of the vocabulary")
    if len(prompt) >= max_model_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; with at least one output token it must stay within "
            f"{max_model_len} (the smallest of target.max_model_len, the model's context and the cache budget)"
        )
