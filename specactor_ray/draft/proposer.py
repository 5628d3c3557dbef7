"""The proposer: a plain class that drafts ahead of the last known commits of its requests.

It uses no Ray, no clock and no network; the draft loop (`draft/loop.py`) calls it and sends its tails. Requests are
slots and arrays; a proposer that drafts for one request at a time derives from `RowProposer` (`draft/slots.py`). Drafts
never change a sampled token: the target checks every one.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from specactor_ray.config.methods import NO_TRAITS
from specactor_ray.core.types import SamplingParams
from specactor_ray.transport.messages import NO_BRANCHES, Branches, Features, FinishedOutput

if TYPE_CHECKING:
    from specactor_ray.config.methods import DrafterSpec
    from specactor_ray.config.schema import TargetConfig


class Tails(NamedTuple):
    """Tails of `n` requests."""

    bases: np.ndarray
    """int32 `(n,)`: committed output tokens of the mirror."""
    lengths: np.ndarray
    """int32 `(n,)`: draft tokens after them."""
    tokens: np.ndarray
    """int32 `(sum of lengths,)`: draft tokens, request by request."""
    branches: Branches = NO_BRANCHES

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Yield base and tokens of each request."""
        end, tokens = 0, self.tokens.tolist()
        for base, length in zip(self.bases.tolist(), self.lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield base, tokens[begin:end]


def packed(commits: Sequence[tuple[int, int, Sequence[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of `Proposer.commit` for commits of (slot, start, tokens)."""
    columns = np.array([(slot, start, len(tokens)) for slot, start, tokens in commits], np.int32).reshape(-1, 3)
    slots, starts, lengths = np.ascontiguousarray(columns.T)
    return slots, starts, lengths, np.array([token for _, _, tokens in commits for token in tokens], np.int32)


class Proposer(abc.ABC):
    """Interface of a draft method.

    A request has a slot, a small number that is reused, from `open` to `close`. Positions are output positions.
    """

    method: str
    """Name of the method: `ngram`, `draft_model`, ..."""
    vocab_size: int | None
    """Number of tokens of the drafter's vocabulary; None: any vocabulary."""
    traits = NO_TRAITS
    budget: int = 0
    """Most rows of a forward, set before `extend`; 0: unknown, without branches."""
    forward_s: np.ndarray = np.zeros(0)
    """float64 `(budget + 1,)`: seconds of a forward with 0, 1, ... rows, set before `extend`; empty: unknown."""
    burst: int = 1
    """Most tokens that models draft for each chain in one `extend`, set before it: 1 where the first tokens may be
    needed before the last ones are drafted."""
    drafted: int = 1
    """Tokens that the newest `extend` drafted for each chain."""
    rows_drafted: int = 0
    """Mean rows of a forward of the newest `extend`, if each row read one token; 0 if a row read more, or a forward
    changed no tail."""
    judged: np.ndarray = np.zeros(2, np.int64)
    """int64 `(2,)`: draft tokens of main chains that commits confirmed or refuted, each after right ones, and how many
    of them were right."""
    required: tuple[str, ...] = ("method", "vocab_size")
    """Attributes that a proposer must have."""

    @abc.abstractmethod
    def open(
        self,
        slot: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        """Start a mirror of this request, replacing one in the same slot.

        Args:
            slot: 0 or more, and below the largest number of requests ever open at once.
            request_id: Unique; one that returns continues the same output.
            prompt_token_ids: The prompt.
            committed_token_ids: Final output tokens.
            sampling: Sampling parameters of the target.
            window: Most tokens of the tail.
        """

    @abc.abstractmethod
    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take final output tokens of `n` requests: keep the parts of the tails that agree, drop the rest. Idempotent.

        Args:
            slots: int32 `(n,)`.
            starts: int32 `(n,)`: output position of the first token.
            lengths: int32 `(n,)`.
            tokens: int32 `(sum of lengths,)`, request by request.

        Returns:
            bool `(n,)`: False where the slot is not open, tokens before `start` are missing (a gap), or the tokens
            contradict committed tokens; the request is then opened again.
        """

    @abc.abstractmethod
    def extend(self) -> np.ndarray:
        """Extend tails that have room in their windows: models by up to `burst` tokens each, lookups to the end.

        Returns:
            int32: slots whose tail changed, or whose newest commit has no guess. Empty: there is nothing to do until
            the next message.
        """

    @abc.abstractmethod
    def tails(self, slots: np.ndarray) -> Tails:
        """Current tails of open slots."""

    @abc.abstractmethod
    def close(self, slot: int, finished: bool) -> None:
        """Close the request; a slot that is not open is ignored. `finished`: whether its output is complete."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Replace the weights (name → tensor). Default: nothing."""

    def add_features(self, slot: int, features: Sequence[Features]) -> None:  # noqa: B027
        """Take hidden states of consecutive sequence positions, after an `open` or `commit`. They may overlap or leave
        gaps; a slot that is not open is ignored. Called with the trait `reads_features`."""

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:  # noqa: B027
        """Take outputs that other verifiers finished. Default: nothing."""

    def forget_history(self) -> None:  # noqa: B027
        """Clear the history; open requests stay. Overridden with the trait `keeps_history`."""

    @classmethod
    def from_config(cls, config: DrafterSpec, target: TargetConfig, device: str) -> Self:
        """Build the proposer of a section of `drafters` for this target, on `device` (`cpu` or `cuda`).

        Raises:
            ModelLoadError: Its model cannot be loaded or served.
        """
        return cls(config)  # type: ignore[call-arg]  # the constructor of a class that does not override this
