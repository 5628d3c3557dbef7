"""A bounded log of many texts that grow at once: the index of the lookup methods.

It replaces a suffix trie with counts (SuffixDecoding, arXiv 2411.04975): a look-up finds the occurrences of the longest
match of a context and walks along all of them at once. See `docs/design/suffix-drafter.md`.
"""

from __future__ import annotations

import numpy as np

from specactor_ray.draft.lookup import _token_log_numba as kernels


def levels_of(min_match: int, max_match: int) -> np.ndarray:
    """int32: the lengths at which contexts are hashed: `min_match`, four times that, and so on up to `max_match`."""
    levels = [min_match]
    while 4 * levels[-1] <= max_match:
        levels.append(4 * levels[-1])
    return np.array(levels, np.int32)


class TokenLog:
    """Texts of token ids, interleaved in the order they were written; `_token_log_numba.draft` looks them up.

    An *occurrence* of a context is a token of some text such that the `n` tokens before it, in its text, equal the
    last `n` of the context, `min_match <= n <= max_match`. Of the longest level that has occurrences the `MAX_VOTES`
    latest are compared, and those with the longest match vote for the next token. The winner is drafted, the
    occurrences that agree with it go on to their next token and vote again.

    Args:
        capacity: Most tokens kept, at least 1. Beyond them each new token overwrites the oldest.
        min_match: Shortest match, at least 1.
        max_match: Longest match.
        scopes: 1: look-ups stay within a group. 2: they may also go over all groups.
    """

    def __init__(self, capacity: int, min_match: int, max_match: int, scopes: int = 1) -> None:
        self.levels, self.scopes = levels_of(min_match, max_match), scopes
        columns = scopes * len(self.levels)
        # Untouched zero pages take no memory.
        self.rows = np.zeros((capacity, kernels.LINKS + columns), np.int32)
        self.heads = np.zeros(columns << (capacity - 1).bit_length(), np.int32)
        """See `_token_log_numba.py`."""
        self.count = 0
        """Tokens ever written."""

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return min(self.count, len(self.rows))

    @property
    def nbytes(self) -> int:
        """Bytes reserved for the log, untouched pages included."""
        return int(self.rows.nbytes + self.heads.nbytes)

    def remembers(self, number: int) -> bool:
        """Whether row `number`, counted from the first ever written, is kept."""
        return 0 <= self.count - 1 - number < len(self.rows)

    def begin(self, context: np.ndarray) -> int:
        """Begin a text with tokens (int32) that are context only. Returns the number of its last row, or -1."""
        back, none = -1, np.zeros(0, np.uint64)
        for token in context.tolist():
            slot = self.count % len(self.rows)
            kernels.append(
                self.rows, self.heads, self.levels, self.scopes, slot, back, token, kernels.CONTEXT_ONLY, none, 0
            )
            back, self.count = slot, self.count + 1
        return self.count - 1 if len(context) else -1

    def write(self, text: np.ndarray, begin: int, group: int, last: int) -> int:
        """Write `text[begin:]` (int32) behind the row number `last` (-1: none). Returns the number of its last row."""
        arrays = (self.rows, self.heads, self.levels, self.scopes)
        self.count, last = kernels.write(*arrays, self.count, text, begin, group, last)
        return last
