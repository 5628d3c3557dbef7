"""A drafter's picture of one request: what is committed, and the guess after it.

Commits may come twice, late or overlapping; what matters is only which output positions they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specactor_ray.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What a commit did to a mirror."""

    ok: bool
    """False: tokens before it are missing, or it contradicts committed ones. Nothing was changed; open afresh."""
    advanced: int = 0
    """Output tokens that are newly committed."""
    matched: int = 0
    """How many of those the tail had guessed, counted from the first: `min(advanced, len(tail))` if all agreed."""
    survived: int = 0
    """Tail tokens left."""


class RequestMirror:
    """Prompt, committed output, and the unverified tail of one request.

    Args:
        prompt_token_ids: The prompt.
        committed_token_ids: Output tokens that are final.
        sampling: How the target chooses tokens.
        window: Most tokens the tail may hold.
    """

    __slots__ = ("committed", "prompt", "sampling", "tail", "window")

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self.prompt: tuple[int, ...] = tuple(prompt_token_ids)
        self.committed: list[int] = list(committed_token_ids)
        self.tail: list[int] = []
        self.sampling = sampling
        self.window = window

    @property
    def base_len(self) -> int:
        """Committed output tokens this mirror knows of."""
        return len(self.committed)

    @property
    def room(self) -> int:
        """Tokens the tail may still grow by; never below 0."""
        return max(0, self.window - len(self.tail))

    def commit(self, start: int, token_ids: Sequence[int]) -> CommitOutcome:
        """Output tokens `[start, start + n)` are final.

        A commit that reaches less far than the mirror is late and changes nothing. A contradiction to committed tokens
        cannot come from one truth (a request has moved, or a message was garbled): it is treated as a gap, so that
        opening afresh repairs it.
        """
        known = self.base_len
        overlap = known - start
        if start < 0 or overlap < 0 or self.committed[start : start + len(token_ids)] != list(token_ids[:overlap]):
            return CommitOutcome(ok=False, survived=len(self.tail))
        return self._advance(list(token_ids[overlap:]))

    def _advance(self, fresh: list[int]) -> CommitOutcome:
        matched = common_prefix(self.tail, fresh)
        if matched < len(fresh) and matched < len(self.tail):
            self.tail.clear()
        else:
            del self.tail[:matched]
        self.committed.extend(fresh)
        return CommitOutcome(True, len(fresh), matched, survived=len(self.tail))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
