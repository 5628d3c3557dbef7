"""The proposer: a plain class that keeps guessing ahead of the last commit it knows.

A proposer holds one mirror per request. It knows no Ray, no clock and no network; the draft loop
(`draft/loop.py`) feeds it messages and sends off its tails. Nothing it does can change a sampled token:
the target checks every draft token.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from specactor_ray.messages import Features, SamplingParams


class Commits(NamedTuple):
    """Output tokens of `n` requests that are final."""

    request_ids: Sequence[str]
    starts: np.ndarray
    """int32 `(n,)`, as `lengths`: output position of the first token."""
    lengths: np.ndarray
    tokens: np.ndarray
    """int32, those of all requests one after the other."""

    def rows(self) -> Iterator[tuple[str, int, list[int]]]:
        """Request, start and tokens, one request after the other."""
        end, tokens = 0, self.tokens.tolist()
        for request_id, start, length in zip(
            self.request_ids, self.starts.tolist(), self.lengths.tolist(), strict=True
        ):
            begin, end = end, end + length
            yield request_id, start, tokens[begin:end]

    def split(self) -> Iterator[Commits]:
        """Each request alone."""
        for n, (request_id, _, tokens) in enumerate(self.rows()):
            one = slice(n, n + 1)
            yield Commits([request_id], self.starts[one], self.lengths[one], np.array(tokens, np.int32))


class Tails(NamedTuple):
    """What is guessed of `n` requests."""

    bases: np.ndarray
    """int32 `(n,)`: the committed length that the mirror knows."""
    lengths: np.ndarray
    """int32 `(n,)`: tokens guessed after it."""
    tokens: np.ndarray
    """int32, those of all requests one after the other."""


class Proposer(Protocol):
    """What a draft method implements. Request ids are unique strings; positions are output positions."""

    method: str
    """The method's name: `ngram`, `draft_model`, ..."""
    vocab_size: int | None
    """Size of the drafter's vocabulary; None when the method works on token ids of any vocabulary."""

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        """Start a mirror of this request, replacing one of the same id."""

    def commit_batch(self, commits: Commits) -> np.ndarray:
        """Keep the parts of the tails that agree, drop the rest. Repeated and late commits are harmless.

        Returns:
            bool `(n,)`: False where the request is unknown or tokens before `start` are missing (a gap): the caller
            then asks for a fresh `open`.
        """

    def extend(self) -> list[str]:
        """Extend the tails of requests that have room in their window: autoregressive methods by one token
        each in one batched forward, others by as much as they like.

        Returns:
            Ids of the requests whose tail changed, or about whose newest commit it is now known that there
            is no guess. Empty when there was nothing to do: the caller may then sleep until a message comes.
        """

    def tails(self, request_ids: Sequence[str]) -> Tails:
        """The guesses as they are now.

        Raises:
            KeyError: A request is not open.
        """

    def close(self, request_id: str, finished: bool = True) -> None:
        """Forget the request; unknown ids are ignored. `finished`: its output is complete and may be learned from."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Take new weights (name → tensor); methods without weights ignore them."""


class RowProposer(Proposer, Protocol):
    """A proposer that goes from request to request; the base class of most."""

    @abc.abstractmethod
    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        """`commit_batch` for one request."""

    @abc.abstractmethod
    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        """`(base_len, token_ids)`: the committed length the mirror knows, and the guess after it.

        Raises:
            KeyError: The request is not open.
        """

    @abc.abstractmethod
    def pending(self, request_id: str) -> bool:
        """True while a further `extend` would still lengthen this request's tail."""

    def commit_batch(self, commits: Commits) -> np.ndarray:
        return np.array([self.commit(*row) for row in commits.rows()], np.bool_)

    def tails(self, request_ids: Sequence[str]) -> Tails:
        bases, tails = zip(*map(self.tail, request_ids), strict=True) if request_ids else ((), ())
        return Tails(
            np.array(bases, np.int32),
            np.array(list(map(len, tails)), np.int32),
            np.array([token for tail in tails for token in tail], np.int32),
        )


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
