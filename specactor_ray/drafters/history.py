"""Earlier outputs of the same prompt, for the samples that come after them.

In group-based RL a prompt is sampled many times, within a step and again in later epochs, and the answers share
phrases (the observation behind SuffixDecoding, arXiv 2411.04975, and history-based drafting in rollouts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specactor_ray.drafters.suffix_index import SEPARATOR, SuffixIndex


class PromptHistory:
    """Earlier outputs of one prompt: one text, each output behind the end of the prompt, so that the start of an
    output is found too."""

    __slots__ = ("index", "lead", "prompt", "users")

    def __init__(self, prompt: tuple[int, ...], min_match: int, max_match: int) -> None:
        self.prompt = prompt
        self.index = SuffixIndex(min_match, max_match)
        self.lead = prompt[-max_match:]
        self.users = 0
        """Open requests of this prompt."""

    def guess(self, suffix: Sequence[int], room: int) -> tuple[int, list[int]]:
        """(match length, what followed), at most `room` tokens and not past the end of that output.

        Among the occurrences with the longest match the next token that followed most often wins, of equals the one
        seen last; what is copied is the latest occurrence with that next token.
        """
        length, positions = self.index.find(suffix)
        if not positions:
            return 0, []
        tokens = self.index.tokens
        votes: dict[int, int] = {}
        for position in positions:
            votes[tokens[position]] = votes.get(tokens[position], 0) + 1
        # A dict keeps the order of first insertion and max takes the first of equals: the token seen last.
        winner = max(votes, key=votes.__getitem__)
        start = next(position for position in positions if tokens[position] == winner)
        copied = tokens[start : start + room]
        return length, copied[: copied.index(SEPARATOR)] if SEPARATOR in copied else copied


class History:
    """Outputs per prompt, the oldest forgotten first.

    Args:
        max_tokens: Most tokens kept over all prompts (output, the end of the prompt before it, a separator); the
            memory in use is at most about twice that.
        min_match: Shortest match.
        max_match: Longest match.
    """

    def __init__(self, max_tokens: int, min_match: int, max_match: int) -> None:
        self.max_tokens, self._min, self._max = max_tokens, min_match, max_match
        self.num_tokens = 0
        self._prompts: dict[tuple[int, ...], PromptHistory] = {}
        self._order: deque[tuple[PromptHistory, int]] = deque()

    def __len__(self) -> int:
        """Prompts that have outputs or open requests."""
        return len(self._prompts)

    def attach(self, prompt: tuple[int, ...]) -> PromptHistory:
        """The history of a prompt, for as long as a request of it is open; pair it with `detach`."""
        entry = self._prompts.get(prompt)
        if entry is None:
            entry = self._prompts[prompt] = PromptHistory(prompt, self._min, self._max)
        entry.users += 1
        return entry

    def detach(self, entry: PromptHistory) -> None:
        entry.users -= 1
        self._forget_if_unused(entry)

    def record(self, entry: PromptHistory, output: Sequence[int]) -> None:
        """Keep a finished output. One that is longer than the bound alone keeps its beginning."""
        room = self.max_tokens - len(entry.lead) - 1
        if room < 1 or not output:
            return
        text = [*entry.lead, *output[:room], SEPARATOR]
        entry.index.append(text)
        self._order.append((entry, len(text)))
        self.num_tokens += len(text)
        while self.num_tokens > self.max_tokens:
            oldest, length = self._order.popleft()
            oldest.index.forget_front(length)
            self.num_tokens -= length
            self._forget_if_unused(oldest)

    def _forget_if_unused(self, entry: PromptHistory) -> None:
        if entry.users == 0 and len(entry.index.tokens) == entry.index.floor:
            self._prompts.pop(entry.prompt, None)
