"""The proposer: a plain class that keeps guessing ahead of the last commit it knows.

A proposer holds one mirror per request. It knows no Ray, no clock and no network; the draft loop
(`draft/loop.py`) feeds it messages and sends off its tails. Nothing it does can change a sampled token:
the target checks every draft token.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from specactor_ray.messages import Features, SamplingParams

if TYPE_CHECKING:
    from specactor_ray.config.schema import DrafterConfig, TargetConfig


class Checkpoint(Enum):
    """What `drafters.N.model` has to name."""

    NONE = "nothing"
    MODEL = "a local directory or a Hugging Face id of the same vocabulary"
    HEAD = "the directory of a head that was trained for this target"
    """EAGLE; it can be taught online."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a proposer is: everything that its drivers have to know about it."""

    looks_up: bool = False
    """Guesses are found in microseconds, whole windows at once: it follows every request it has room for, and its
    seconds per token are not measured."""
    keeps_history: bool = False
    """It learns from finished outputs and is sent their last tokens; it implements `forget_history`."""
    reads_features: bool = False
    """It is sent the target's hidden states of committed positions; it implements `add_features`."""
    draws_noise: bool = False
    """It samples, so `drafters.N.shared_noise` changes its guesses."""
    checkpoint: Checkpoint = Checkpoint.NONE


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


class Proposer(abc.ABC):
    """What a draft method implements. Request ids are unique strings; positions are output positions."""

    method: str
    """The method's name: `ngram`, `draft_model`, ..."""
    vocab_size: int | None
    """Size of the drafter's vocabulary; None when the method works on token ids of any vocabulary."""
    traits = Traits()

    @abc.abstractmethod
    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        """Start a mirror of this request, replacing one of the same id."""

    @abc.abstractmethod
    def commit_batch(self, commits: Commits) -> np.ndarray:
        """Keep the parts of the tails that agree, drop the rest. Repeated and late commits are harmless.

        Returns:
            bool `(n,)`: False where the request is unknown or tokens before `start` are missing (a gap): the caller
            then asks for a fresh `open`.
        """

    @abc.abstractmethod
    def extend(self) -> list[str]:
        """Extend the tails of requests that have room in their window: autoregressive methods by one token
        each in one batched forward, others by as much as they like.

        Returns:
            Ids of the requests whose tail changed, or about whose newest commit it is now known that there
            is no guess. Empty when there was nothing to do: the caller may then sleep until a message comes.
        """

    @abc.abstractmethod
    def tails(self, request_ids: Sequence[str]) -> Tails:
        """The guesses as they are now.

        Raises:
            KeyError: A request is not open.
        """

    @abc.abstractmethod
    def close(self, request_id: str, finished: bool = True) -> None:
        """Forget the request; unknown ids are ignored. `finished`: its output is complete and may be learned from."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Take new weights (name → tensor). Default: there are none."""

    def add_features(self, request_id: str, features: Sequence[Features]) -> None:  # noqa: B027
        """States of consecutive sequence positions came along with the last `open` or `commit`. They may overlap with
        earlier ones or leave gaps; unknown requests are ignored. Called where the traits say `reads_features`."""

    def forget_history(self) -> None:  # noqa: B027
        """Forget finished outputs; open requests stay. Does something where the traits say `keeps_history`."""

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        """Make the proposer of a section of `drafters` for this target, on `device` (`cpu` or `cuda`).

        Raises:
            ModelLoadError: Its model cannot be loaded or served.
        """
        return cls(config)  # type: ignore[call-arg]  # the contract of a class that does not override this


class RowProposer(Proposer):
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
