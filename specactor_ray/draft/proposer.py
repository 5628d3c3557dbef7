"""The proposer: a plain class that keeps guessing ahead of the last commit it knows.

A proposer holds one mirror per request. It knows no Ray, no clock and no network; the draft loop
(`draft/loop.py`) feeds it messages and sends off its tails. Requests are slots and arrays here; what goes from request
to request derives from `RowProposer` (`draft/slots.py`). Nothing it does can change a sampled token:
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


class Tails(NamedTuple):
    """What is guessed of `n` requests."""

    bases: np.ndarray
    """int32 `(n,)`: the committed length that the mirror knows."""
    lengths: np.ndarray
    """int32 `(n,)`: tokens guessed after it."""
    tokens: np.ndarray
    """int32, those of all requests one after the other."""

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Base and tokens, one request after the other."""
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
    """What a draft method implements.

    A request has a slot from `open` to `close`: a small number that is used again. Positions are output positions.
    """

    method: str
    """The method's name: `ngram`, `draft_model`, ..."""
    vocab_size: int | None
    """Size of the drafter's vocabulary; None when the method works on token ids of any vocabulary."""
    traits = Traits()

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
            slot: 0 or more, and less than the number of requests that were ever open at once.
            request_id: Unique; one that comes back goes on with the same output.
            prompt_token_ids: The prompt.
            committed_token_ids: Output tokens that are final.
            sampling: How the target chooses tokens.
            window: Most tokens the tail may hold.
        """

    @abc.abstractmethod
    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Output tokens of `n` requests are final: keep the parts of the tails that agree, drop the rest. Repeated and
        late commits are harmless.

        Args:
            slots: int32 `(n,)`.
            starts: int32 `(n,)`: output position of the first token.
            lengths: int32 `(n,)`.
            tokens: int32, those of all requests one after the other.

        Returns:
            bool `(n,)`: False where the slot is not open, tokens before `start` are missing (a gap), or the tokens
            contradict committed ones: the caller then asks for a fresh `open`.
        """

    @abc.abstractmethod
    def extend(self) -> np.ndarray:
        """Extend the tails of requests that have room in their window: autoregressive methods by one token
        each in one batched forward, others by as much as they like.

        Returns:
            int32: slots whose tail changed, or about whose newest commit it is now known that there is no guess.
            Empty when there was nothing to do: the caller may then sleep until a message comes.
        """

    @abc.abstractmethod
    def tails(self, slots: np.ndarray) -> Tails:
        """The guesses of open slots as they are now."""

    @abc.abstractmethod
    def close(self, slot: int, finished: bool) -> None:
        """Forget the request; a slot that is not open is ignored. `finished`: its output is complete and may be learned
        from."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Take new weights (name → tensor). Default: there are none."""

    def add_features(self, slot: int, features: Sequence[Features]) -> None:  # noqa: B027
        """States of consecutive sequence positions came along with the last `open` or `commit`. They may overlap with
        earlier ones or leave gaps; a slot that is not open is ignored. Called where the traits say `reads_features`."""

    def forget_history(self) -> None:  # noqa: B027
        """Forget finished outputs; open requests stay. Does something where the traits say `keeps_history`."""

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        """Make the proposer of a section of `drafters` for this target, on `device` (`cpu` or `cuda`).

        Raises:
            ModelLoadError: Its model cannot be loaded or served.
        """
        return cls(config)  # type: ignore[call-arg]  # the contract of a class that does not override this
