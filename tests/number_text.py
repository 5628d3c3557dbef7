"""Cheap outputs of simulated requests, functions of seed, weights and position, and a tokenizer for them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import GAPS
from specactor_ray.plan.search import RIGHT_BEHIND_WRONG
from specactor_ray.simulation.world import GeneratedText

VOCABULARY = 1000
_RIGHT_TO = 1.0 - np.cumprod(1.0 - np.array(RIGHT_BEHIND_WRONG))
"""`(4,)`: chance that one of the candidates from the second up to this one is right where the first is wrong."""


def true_token(seed: int, version: int, position: int) -> int:
    return zlib.crc32(b"%d %d %d" % (seed, version, position)) % VOCABULARY


def true_output(sampling: SamplingParams, version: int) -> tuple[int, ...]:
    """The whole output of a request."""
    begin = sampling.first_position
    return tuple(true_token(sampling.seed, version, begin + position) for position in range(sampling.max_tokens))


class HashedText(GeneratedText):
    """These outputs. `skill`: draft method → chance that a draft token is right; 0.5 for others."""

    vocab_size = VOCABULARY

    def __init__(self, skill: Mapping[str, float] | None = None) -> None:
        self._skill = dict(skill or {})

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return np.array(true_output(sampling, version))

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        """All gaps are equal."""
        key, first = b"%s %d %d" % (method.encode(), sampling.seed, version), self._skill.get(method, 0.5)
        count = sampling.max_tokens
        draws = np.array([zlib.crc32(b"%s %d" % (key, position)) for position in range(count)]) / 2**32
        left = np.where(draws < first, 0.0, (draws - first) / max(1.0 - first, 1e-9))  # uniform where it is wrong
        ranks = np.where(draws < first, 0, 1 + np.searchsorted(_RIGHT_TO, left, side="right"))
        return np.stack([ranks, np.full(count, GAPS // 2)]).astype(np.int8)


class NumberText:
    """Token n reads `n,`."""

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        return "".join(f"{token}," for token in tokens)


def stopped_output(sampling: SamplingParams, version: int = 0) -> tuple[tuple[int, ...], str]:
    """Tokens and text of a whole output, up to its first stop text."""
    tokens, text = true_output(sampling, version), NumberText()
    for end in range(1, len(tokens) + 1) if sampling.stop else ():
        part = text.decode(tokens[:end])
        if begins := [part.find(stop) for stop in sampling.stop if stop in part]:
            return tokens[:end], part[: min(begins)]
    return tokens, text.decode(tokens)
