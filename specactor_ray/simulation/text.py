"""What the requests of a simulated rollout say, and what drafters guess of it.

A request is told by its seed. What the target says is a function of (seed, weights, position), as with keyed sampling;
what a draft method guesses at a position, given that the tokens before it are right, is a function of (method, seed,
weights, position) as well. So runs of different policies meet the same tokens and the same guesses.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from specactor_ray.messages import SamplingParams

NO_GUESS = -1


class Text(Protocol):
    """The outputs of all requests."""

    vocab_size: int

    def output(self, sampling: SamplingParams, version: int) -> Sequence[int]:
        """The whole output of a request under these weights, at most `sampling.max_tokens` tokens."""

    def guess(self, method: str, seed: int, version: int, position: int) -> int:
        """The token that a drafter of this method guesses at an output position after a right prefix, or `NO_GUESS`."""

    def probability(self, method: str, seed: int, position: int) -> float:
        """Probability that the guess of a method at a position is right, knowing all but the draw of that position."""


def true_token(seed: int, version: int, position: int) -> int:
    """What the target samples in a run with faults; keyed like the real sampler."""
    return zlib.crc32(b"%d %d %d" % (seed, version, position)) % HashedText.vocab_size


def true_output(sampling: SamplingParams, version: int) -> tuple[int, ...]:
    """The whole output of a request of a run with faults."""
    return tuple(true_token(sampling.seed, version, position) for position in range(sampling.max_tokens))


class HashedText:
    """Tokens that cost nothing to know: for runs with faults, whose outputs are short and change with the weights.

    Args:
        skill: Draft method → probability that a draft token is right; 0.5 where it is not named.
    """

    vocab_size = 1000

    def __init__(self, skill: Mapping[str, float] | None = None) -> None:
        self._skill = dict(skill or {})

    def output(self, sampling: SamplingParams, version: int) -> Sequence[int]:
        return true_output(sampling, version)

    def guess(self, method: str, seed: int, version: int, position: int) -> int:
        draw = zlib.crc32(b"%s %d %d %d" % (method.encode(), seed, version, position)) / 2**32
        return (true_token(seed, version, position) + (draw >= self._skill.get(method, 0.5))) % self.vocab_size

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._skill.get(method, 0.5)


@dataclass(frozen=True)
class Skill:
    """How often a draft method is right, given that it was right so far.

    A guess is right where a standard normal draw of (request, position) is below a threshold (a probit model). The
    threshold varies over requests and over stretches of an output such that its mean probability stays `mean`.
    """

    mean: float
    """Mean probability over requests and positions, in (0, 1)."""
    spread: float = 0.0
    """Standard deviation of the threshold over requests; 0.5 at a mean of 0.7 makes the middle two thirds of requests
    lie between 0.55 and 0.85."""
    burst: float = 0.0
    """Standard deviation of the threshold over stretches of `STRETCH` tokens of one output."""
    decay: float = 0.0
    """Share of `mean` that is lost per 1,000 output tokens."""
    coverage: float = 1.0
    """Share of stretches in which there is a guess at all: lookups find something in some places only."""


STRETCH = 32
"""Output tokens over which coverage and bursts are constant."""
_STANDARD = NormalDist()


@dataclass(frozen=True)
class _Request:
    tokens: Sequence[int]
    guesses: Mapping[str, Sequence[int]]
    """Method → its guess at each position; `_NONE` where it has none."""
    thresholds: Mapping[str, np.ndarray]
    """Method → probit threshold of each stretch; what a clairvoyant knows."""


_NONE = 255
"""Stands for `NO_GUESS` in arrays of bytes; not a token."""


class GeneratedText:
    """Outputs of given lengths, with guesses drawn from the skill of each method.

    Args:
        lengths: Seed of a request → its output tokens; may grow.
        skills: Draft method → how good it is.
        correlation: Share of variance that all methods have in common, in requests, stretches and single positions: at
            1 methods of equal mean are right and wrong at the same places, and racing them brings nothing.
        seed: Of all draws.
    """

    vocab_size = _NONE

    def __init__(
        self, lengths: Mapping[int, int], skills: Mapping[str, Skill], correlation: float = 0.0, seed: int = 0
    ) -> None:
        self._lengths, self._skills, self._seed = lengths, dict(skills), seed
        self._common, self._own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
        self._requests: dict[int, _Request] = {}

    def output(self, sampling: SamplingParams, version: int) -> Sequence[int]:
        tokens = self._request(sampling.seed).tokens
        return tokens[: sampling.max_tokens]

    def guess(self, method: str, seed: int, version: int, position: int) -> int:
        guesses = self._request(seed).guesses[method]
        if position >= len(guesses):
            return 0  # past the end: nobody will compare it
        token = guesses[position]
        return NO_GUESS if token == _NONE else token

    def probability(self, method: str, seed: int, position: int) -> float:
        thresholds = self._request(seed).thresholds[method]
        return _STANDARD.cdf(float(thresholds[min(position // STRETCH, len(thresholds) - 1)]))

    def _request(self, seed: int) -> _Request:
        found = self._requests.get(seed)
        if found is None:
            found = self._requests[seed] = self._make(seed)
        return found

    def _make(self, seed: int) -> _Request:
        length = self._lengths[seed]
        stretches = -(-length // STRETCH)
        rng = np.random.default_rng([self._seed, seed])
        tokens = rng.integers(0, _NONE, length, dtype=np.uint8)
        shared = [rng.standard_normal(size) for size in (1, stretches, length)]
        guesses, thresholds = {}, {}
        for number, (method, skill) in enumerate(sorted(self._skills.items())):
            rng = np.random.default_rng([self._seed, seed, number])
            request, stretch, position = (
                self._common * common + self._own * rng.standard_normal(len(common)) for common in shared
            )
            scale = math.sqrt(1.0 + skill.spread**2 + skill.burst**2)
            base = _thresholds(skill.mean, skill.decay, stretches) * scale
            threshold = base + skill.spread * request + skill.burst * stretch
            right = position < np.repeat(threshold, STRETCH)[:length]
            said = np.where(right, tokens, (tokens + 1) % _NONE).astype(np.uint8)
            covered = np.repeat(rng.random(stretches) < skill.coverage, STRETCH)[:length]
            guesses[method] = np.where(covered, said, np.uint8(_NONE)).tobytes()
            thresholds[method] = threshold
        return _Request(tokens.tobytes(), guesses, thresholds)


@functools.lru_cache(maxsize=4096)
def _thresholds(mean: float, decay: float, stretches: int) -> np.ndarray:
    means = [mean * (1.0 - decay) ** (number * STRETCH / 1000.0) for number in range(stretches)]
    return np.array([_STANDARD.inv_cdf(min(max(p, 1e-6), 1.0 - 1e-6)) for p in means])


class RecordedText:
    """Outputs that were recorded. Lookups search them for real; other methods are right as often as was recorded.

    Args:
        outputs: Seed of a request → its tokens.
        accuracy: (method, seed) → probability that a draft token is right, given that those before it are.
        vocab_size: Of the model that was recorded.
    """

    def __init__(
        self, outputs: Mapping[int, Sequence[int]], accuracy: Mapping[tuple[str, int], float], vocab_size: int
    ) -> None:
        self._outputs, self._accuracy = dict(outputs), dict(accuracy)
        self.vocab_size = vocab_size

    def output(self, sampling: SamplingParams, version: int) -> Sequence[int]:
        return self._outputs[sampling.seed][: sampling.max_tokens]

    def guess(self, method: str, seed: int, version: int, position: int) -> int:
        output = self._outputs[seed]
        token = output[position] if position < len(output) else 0
        draw = zlib.crc32(b"%s %d %d" % (method.encode(), seed, position)) / 2**32
        return token if draw < self._accuracy.get((method, seed), 0.0) else (token + 1) % self.vocab_size

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._accuracy.get((method, seed), 0.0)
