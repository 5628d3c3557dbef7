"""A bounded log of many texts that grow at once, and drafts from what followed the same context before.

The index of the `suffix` method. It answers what a suffix trie with counts answers (SuffixDecoding, arXiv 2411.04975),
the longest match of a context, how often each token followed it, and the most frequent path from there, but it holds
no trie: it finds the occurrences of the context and walks along all of them at once. `docs/design/suffix-drafter.md`
says why. Pure: numpy and numba, no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.draft.lookup import _token_log_numba as kernels

_SMALLEST = 64


@dataclass(slots=True)
class Text:
    """A text of a log, grown at its end."""

    group: int = 0
    """Which prompt it answers."""
    last: int = -1
    """Number of its last row; -1 while it is empty."""


class Noise(NamedTuple):
    """The target's noise of a request from an output position on (`specactor_ray.sampling`)."""

    seed: int
    position: int


@dataclass(slots=True)
class Draft:
    """A guess, and how much it is worth."""

    matched: int = 0
    """Length of the longest match; the guess is what followed it."""
    tokens: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    """Of each token: its share of the votes, given the tokens before it."""
    score: float = 0.0
    """Sum over the tokens of the probability of the path up to there: the accepted length to be expected."""
    cut_short: bool = False
    """The texts it follows ended, or there was none; nothing else kept it from going on."""


class TokenLog:
    """Texts of token ids, interleaved in the order they were written.

    An *occurrence* of a context is a token of some text such that the `n` tokens before it, in its text, equal the
    last `n` of the context, `min_match <= n <= max_match`. Contexts are hashed at the lengths `min_match`, twice that,
    and so on up to `max_match` ("levels"). Of the longest level that has occurrences the `MAX_VOTES` latest are
    compared, and those with the longest match vote for the next token. The winner is drafted, the occurrences that
    agree with it go on to their next token and vote again: the counts of a trie, without one.

    Args:
        capacity: Most tokens kept, at least 1. Beyond them each new token overwrites the oldest, unless `growing`.
        min_match: Shortest match, at least 1.
        max_match: Longest match that is told apart from longer ones.
        scopes: 1: look-ups stay within a group. 2: they may also go over all groups.
        growing: Double the capacity instead of overwriting.
    """

    def __init__(
        self, capacity: int, min_match: int, max_match: int, scopes: int = 1, *, growing: bool = False
    ) -> None:
        levels = [min_match]
        while 2 * levels[-1] <= max_match:
            levels.append(2 * levels[-1])
        self._levels = np.array(levels, np.int32)
        self._scopes, self._max, self._growing = scopes, max_match, growing
        self._count = 0
        self._allocate(capacity)

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return min(self._count, len(self._rows))

    @property
    def count(self) -> int:
        """Tokens ever written."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes set aside for the log; those not used yet are untouched memory."""
        return int(self._rows.nbytes + self._heads.nbytes)

    def remembers(self, number: int) -> bool:
        """Whether row `number`, counted from the first ever written, is still kept."""
        return 0 <= self._count - 1 - number < len(self._rows)

    def append(self, text: Text, token_ids: Sequence[int] | np.ndarray, *, guess: bool = True) -> None:
        """Lengthen a text; what is written is found from now on.

        Args:
            text: Belongs to this log; other texts may have grown since.
            token_ids: Each in [0, 2**31).
            guess: False: they are context for what follows, and never drafted.
        """
        if not len(token_ids):
            return
        if self._growing and self._count + len(token_ids) > len(self._rows):
            self._grow(self._count + len(token_ids))
        text.last = self._write(text.last, np.array(token_ids, np.int32), text.group, guess)

    def draft(
        self,
        context: Sequence[int] | Any,
        limit: int,
        factor: float = 0.0,
        drafted: int = 0,
        min_probability: float = 0.0,
        path: float = 1.0,
        noise: Noise | None = None,
        group: int = 0,
        scope: int = 0,
    ) -> Draft:
        """What followed the longest match of the end of `context`.

        Args:
            context: End of a text, a sequence or an int32 array; its last `max_match` tokens count.
            limit: Most tokens.
            factor: At most this many tokens per matched token, `drafted` included; 0 sets no such limit.
            drafted: So many tokens at the end of `context` are guesses; they do not count as matched.
            min_probability: Stop before the product of the odds falls below this.
            path: Product of the odds of the guesses in `context`.
            noise: Choose with the target's noise (see `_elect` in `_token_log_numba.py`); None takes the majority.
            group: Look among the texts of this group.
            scope: 0: the group. 1: all of them.
        """
        if limit < 1:
            return Draft()
        tokens, odds = np.empty(limit, np.int32), np.empty(limit, np.float64)
        # An int where a float is meant would compile the kernel once more, in the middle of drafting.
        matched, length, score, cut_short = kernels.draft(
            self._rows, self._heads, self._levels, scope, group, self._count,
            np.asarray(context[-self._max :], np.int32), limit, float(factor), drafted, float(min_probability),
            float(path), _NO_NOISE if noise is None else _words(noise), tokens, odds,
        )  # fmt: skip
        return Draft(matched, tokens[:length].tolist(), odds[:length].tolist(), score, bool(cut_short))

    def _write(self, last: int, token_ids: Any, group: int, guess: bool) -> int:
        number = kernels.append(
            self._rows, self._heads, self._levels, self._scopes, self._count, last, token_ids, group, guess
        )
        self._count += len(token_ids)
        return int(number)

    def _allocate(self, capacity: int) -> None:
        columns = self._scopes * len(self._levels)
        buckets = 1 << (capacity - 1).bit_length()
        # Untouched zero pages cost nothing, so a large log is as cheap as what is in it.
        self._rows = np.zeros((capacity, kernels.LINKS + columns), np.int32)
        self._heads = np.zeros((columns, buckets), np.int32)

    def _grow(self, wanted: int) -> None:
        """Write everything again into a log of twice the size: rows keep their numbers, so texts need not know."""
        old = self._rows
        self._allocate(max(wanted, 2 * len(old), _SMALLEST))
        kernels.rewrite(old, self._count, self._rows, self._heads, self._levels, self._scopes)


_NO_NOISE = np.zeros(4, np.uint32)


def _words(noise: Noise) -> Any:
    return np.array((noise.seed & 0xFFFFFFFF, noise.seed >> 32, noise.position & 0xFFFFFFFF, 1), np.uint32)


def warm_up() -> None:
    """Compile or load the kernels now (some seconds on the first run of a machine), not while a verifier waits."""
    log, text = TokenLog(2, 1, 2, growing=True), Text()
    log.append(text, [1, 2, 1, 2])
    log.draft([1], 2)
