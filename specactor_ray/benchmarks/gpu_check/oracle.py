"""A drafter that knows the target's output and is wrong on purpose, with a set probability per position."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from specactor_ray.draft.proposer import Traits
from specactor_ray.draft.slots import RowProposer

_MAX_BATCH = 1 << 20


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
        super().__init__(max_batch=_MAX_BATCH)
        self.vocab_size: int | None = vocab_size
        self._guesses: dict[str, list[int]] = {}
        for request_id, tokens in outputs.items():
            rng = random.Random(f"{seed} {request_id}")
            self._guesses[request_id] = [t if rng.random() < accuracy else (t + 1) % vocab_size for t in tokens]

    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int]:
        return self._guesses.get(self.request_ids[slot], [])[len(output) : len(output) + room]
