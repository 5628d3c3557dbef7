"""The proposer: a plain class that keeps guessing ahead of the last commit it knows.

A proposer holds one mirror per request. It knows no Ray, no clock and no network; the draft loop
(`draft/loop.py`) feeds it messages and sends off its tails. Nothing it does can change a sampled token:
the target checks every draft token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from specactor_ray.messages import Features, SamplingParams


class Proposer(Protocol):
    """What a draft method implements. Request ids are unique strings; positions are output positions."""

    method: str
    """The method's name: `ngram`, `draft_model`, ..."""
    vocab_size: int | None
    """Size of the drafter's vocabulary; None when the method works on token ids of any vocabulary."""
    weight_version: int
    """Version of the weights the tails were drafted with; 0 for methods without weights."""

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        """Start a mirror of this request, replacing one of the same id."""

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], window: int) -> bool:
        """Output tokens `[start, start + n)` are final: keep the part of the tail that agrees, drop the rest.

        Returns:
            False when the request is unknown or tokens before `start` are missing (a gap): the caller
            then asks for a fresh `open`. Repeated and late commits are harmless.
        """

    def extend(self) -> list[str]:
        """Extend the tails of requests that have room in their window: autoregressive methods by one token
        each in one batched forward, others by as much as they like.

        Returns:
            Ids of the requests whose tail changed, or about whose newest commit it is now known that there
            is no guess. Empty when there was nothing to do: the caller may then sleep until a message comes.
        """

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        """`(base_len, token_ids)`: the committed length the mirror knows, and the guess after it.

        Raises:
            KeyError: The request is not open.
        """

    def pending(self, request_id: str) -> bool:
        """True while a further `extend` would still lengthen this request's tail."""

    def close(self, request_id: str, finished: bool = True) -> None:
        """Forget the request; unknown ids are ignored. `finished`: its output is complete and may be learned from."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Take new weights (name → tensor); methods without weights only note the version."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """A proposer that also works on the target's hidden states."""

    def add_features(self, request_id: str, features: Sequence[Features]) -> None:
        """States of consecutive sequence positions came along with the last `open` or `commit`. They may overlap with
        earlier ones or leave gaps; unknown requests are ignored."""


@runtime_checkable
class KeepsHistory(Protocol):
    """A proposer that learns from finished outputs."""

    def forget_history(self) -> None:
        """Forget all of them; open requests stay."""
