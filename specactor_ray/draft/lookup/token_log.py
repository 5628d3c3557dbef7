"""A bounded log of many texts that grow at once: the index of the lookup methods.

It replaces a suffix trie with counts (SuffixDecoding, arXiv 2411.04975): a look-up finds the occurrences of the longest
match of a context and walks along all of them at once. See `docs/design/suffix-drafter.md`.
"""

from __future__ import annotations

import numpy as np

from specactor_ray.draft.lookup import _token_log_numba as kernels


class TokenLog:
    """Texts of token ids, interleaved in the order they were written; `_token_log_numba.py` looks them up.

    An *occurrence* of a context is a token of some text such that the `n` tokens before it, in its text, equal the
    last `n` of the context, `min_match <= n <= max_match`. Contexts are hashed at the lengths `min_match`, four times
    that, and so on. Of the longest of these that has occurrences the `MAX_VOTES` latest are compared, and those with
    the longest match vote for the next token. The winner is drafted, the occurrences that agree with it go on to their
    next token and vote again.

    Args:
        capacity: Most tokens kept, at least 1. Beyond them each new token overwrites the oldest.
        min_match: Shortest match, at least 1.
        max_match: Longest match.
        scopes: 1: look-ups stay within a group. 2: they may also go over all groups.
    """

    def __init__(self, capacity: int, min_match: int, max_match: int, scopes: int) -> None:
        levels = [min_match]
        while 4 * levels[-1] <= max_match:
            levels.append(4 * levels[-1])
        columns = scopes * len(levels)
        # Untouched zero pages take no memory.
        self.rows = np.zeros((capacity, kernels.LINKS + columns), np.int32)
        self.heads = np.zeros(columns << (capacity - 1).bit_length(), np.int32)
        self.arrays = (self.rows, self.heads, np.array(levels, np.int32), scopes)
        """See `_token_log_numba.Log`."""
        self.count = 0
        """Total of written tokens."""

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
        return 0 <= number >= self.count - len(self.rows)

    def write(self, text: np.ndarray, group: int, last: int, begin: int = 0) -> int:
        """Append `text[begin:]` (int32) after the row number `last` (-1: none). Returns the number of its last row."""
        self.count, last = kernels.write(self.arrays, self.count, text, begin, len(text), group, last)
        return last
