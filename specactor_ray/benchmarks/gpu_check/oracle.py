"""A drafter that knows the target's output and is wrong on purpose, with a set probability per position."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from specactor_ray.drafters.base import RowProposer, Traits
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.messages import SamplingParams


class OracleProposer(RowProposer):
    """Drafts for requests whose outputs are known; a `Proposer` whose drafting costs next to nothing.

    Whether it is right at a position is a function of (seed, request, position) alone, so it is right equally often in
    every mode.

    Args:
        outputs: Request id → the tokens that plain decoding gives.
        accuracy: Probability that the draft token of a position is right.
        vocab_size: A wrong token is the right one's successor in the vocabulary.
        seed: Of the positions at which it is wrong.
    """

    method = "oracle"
    traits = Traits(looks_up=True)

    def __init__(self, outputs: Mapping[str, Sequence[int]], accuracy: float, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size: int | None = vocab_size
        self._guesses: dict[str, list[int]] = {}
        self._mirrors: dict[str, RequestMirror] = {}
        self._unanswered: dict[str, None] = {}
        for request_id, tokens in outputs.items():
            rng = random.Random(f"{seed} {request_id}")
            self._guesses[request_id] = [t if rng.random() < accuracy else (t + 1) % vocab_size for t in tokens]

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self._mirrors[request_id] = RequestMirror(prompt_token_ids, committed_token_ids, sampling, window)
        self._unanswered[request_id] = None

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        mirror = self._mirrors.get(request_id)
        if mirror is None or not mirror.commit(start, token_ids).ok:
            return False
        self._unanswered[request_id] = None
        return True

    def extend(self) -> list[str]:
        """Fill the window of every request that has a new commit."""
        changed, self._unanswered = list(self._unanswered), {}
        for request_id in changed:
            mirror = self._mirrors[request_id]
            end = mirror.base_len + len(mirror.tail)
            mirror.tail += self._guesses.get(request_id, [])[end : end + mirror.room]
        return changed

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self._mirrors[request_id]
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        return request_id in self._unanswered

    def close(self, request_id: str, finished: bool = True) -> None:
        self._mirrors.pop(request_id, None)
        self._unanswered.pop(request_id, None)
