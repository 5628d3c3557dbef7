"""What a draft token costs the drafter, measured while it drafts."""

from __future__ import annotations

from collections import deque


class DraftCost:
    """Moving lower quartile of the seconds one request waits per drafted token, at the load the drafter has now.

    An autoregressive drafter extends all its requests by one token in one forward, so a request waits a whole forward
    for its token; a lookup drafter fills one window after the other and answers when it is through with all. Both are
    `seconds · requests / tokens` of an `extend`. A low quantile, because machines hesitate. The first `extend` of a
    request also reads its prompt, so it counts only as long as nothing else is known.

    Args:
        memory: Measurements kept.
    """

    def __init__(self, memory: int = 31) -> None:
        if memory < 1:
            raise ValueError(f"memory is {memory}; it must be 1 or more")
        self._recent: deque[float] = deque(maxlen=memory)
        self._quartile = 0.0

    def record(self, seconds: float, requests: int, tokens: int, reads_prompts: bool = False) -> None:
        """One `extend` lengthened the tails of `requests` requests by `tokens` tokens in all. Nonsense is ignored."""
        if requests < 1 or tokens < 1 or not 0.0 < seconds < float("inf"):
            return
        if reads_prompts:
            self._quartile = self._quartile or seconds * requests / tokens
            return
        self._recent.append(seconds * requests / tokens)
        self._quartile = sorted(self._recent)[len(self._recent) // 4]

    @property
    def token_s(self) -> float:
        """Seconds per drafted token for one request; 0 before anything was measured."""
        return self._quartile
