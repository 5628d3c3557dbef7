"""Earlier outputs of the same prompt, for the samples that come after them.

In group-based RL a prompt is sampled many times, within a step and again in later epochs, and the answers share
phrases (the observation behind SuffixDecoding, arXiv 2411.04975, and history-based drafting in rollouts).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from specactor_ray.draft.lookup import _ngram_numba as kernels


@dataclass(slots=True, eq=False)
class PromptHistory:
    """A prompt that has outputs in the history, or open requests."""

    number: int
    """Stands for the prompt in the history's arrays; is never used again."""
    prompt: bytes
    users: int = 0
    """Open requests of this prompt."""
    num_tokens: int = 0


class History:
    """A ring of outputs, the oldest forgotten first; each behind the end of its prompt, so that its start is found too.

    Args:
        max_tokens: Most tokens kept over all prompts (output, the end of the prompt before it, a separator).
        min_match: Shortest match.
        max_match: Longest match.
    """

    def __init__(self, max_tokens: int, min_match: int, max_match: int) -> None:
        self.max_tokens, self._min, self._max = max_tokens, min_match, max_match
        capacity = max(max_tokens, 1)
        self.tokens, self.owners = np.zeros(capacity, np.int32), np.zeros(capacity, np.int64)
        """Token id and prompt number of position `p`, counted from the first output, at `p % capacity`."""
        self.links = np.zeros(capacity, np.int64)
        self.heads = np.zeros(1 << (capacity - 1).bit_length(), np.int64)
        """See `_ngram_numba.py`."""
        self.floor = self.count = 0
        """Positions from `floor` to `count` are kept."""
        self._prompts: dict[bytes, PromptHistory] = {}
        self._order: deque[tuple[PromptHistory, int]] = deque()
        self._next_number = 0
        self._append(np.zeros(0, np.int32), kernels.OWN)  # compiles or loads the kernel

    def __len__(self) -> int:
        """Prompts that have outputs or open requests."""
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return self.count - self.floor

    def attach(self, prompt: np.ndarray) -> PromptHistory:
        """The history of a prompt (int32), for as long as a request of it is open; pair it with `detach`."""
        key = prompt.tobytes()
        entry = self._prompts.get(key)
        if entry is None:
            entry = self._prompts[key] = PromptHistory(self._next_number, key)
            self._next_number += 1
        entry.users += 1
        return entry

    def detach(self, entry: PromptHistory) -> None:
        entry.users -= 1
        self._forget_if_unused(entry)

    def record(self, entry: PromptHistory, output: np.ndarray) -> None:
        """Keep a finished output (int32). One that is longer than the bound alone keeps its beginning."""
        lead = np.frombuffer(entry.prompt, np.int32)[-self._max :]
        room = self.max_tokens - len(lead) - 1
        if room < 1 or not len(output):
            return
        text = np.concatenate([lead, output[:room], np.array([kernels.SEPARATOR], np.int32)])
        while self.num_tokens + len(text) > self.max_tokens:
            oldest, length = self._order.popleft()
            self.floor += length
            oldest.num_tokens -= length
            self._forget_if_unused(oldest)
        self._append(text, entry.number)
        entry.num_tokens += len(text)
        self._order.append((entry, len(text)))

    def _append(self, text: np.ndarray, owner: int) -> None:
        kernels.append(self.tokens, self.owners, self.links, self.heads, self.floor, self.count, text, owner, self._min)
        self.count += len(text)

    def _forget_if_unused(self, entry: PromptHistory) -> None:
        if entry.users == 0 and entry.num_tokens == 0:
            self._prompts.pop(entry.prompt, None)
