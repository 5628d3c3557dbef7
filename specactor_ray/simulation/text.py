"""Outputs of the requests of a simulated rollout, and the guesses of drafters.

A request is identified by its seed. A token of the target is a function of (seed, weights, position), as with keyed
sampling; the guess of a draft method at a position, given that the tokens before it are right, is a function of
(method, seed, weights, position). So runs of different policies meet the same tokens and the same guesses.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np

from specactor_ray.messages import SamplingParams
from specactor_ray.simulation._kernels import NO_GUESS


class Text(Protocol):
    """The outputs of all requests."""

    vocab_size: int

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(n,)`: the whole output of a request under these weights, at most `sampling.max_tokens` tokens."""

    def guesses(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(most,)`: the token that a drafter of this method guesses at each output position after a right
        prefix, or `NO_GUESS`."""

    def probability(self, method: str, seed: int, position: int) -> float:
        """Probability that the guess of a method at a position is right, knowing all but the draw of that position."""


def true_token(seed: int, version: int, position: int) -> int:
    """What the target samples in a run with faults; keyed like the real sampler."""
    return zlib.crc32(b"%d %d %d" % (seed, version, position)) % HashedText.vocab_size


def true_output(sampling: SamplingParams, version: int) -> tuple[int, ...]:
    """The whole output of a request of a run with faults."""
    return tuple(true_token(sampling.seed, version, position) for position in range(sampling.max_tokens))


class HashedText:
    """Cheap tokens for runs with faults, whose outputs are short and change with the weights. `skill`: draft method →
    probability that a draft token is right; 0.5 where it is not named."""

    vocab_size = 1000

    def __init__(self, skill: Mapping[str, float] | None = None) -> None:
        self._skill = dict(skill or {})

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return np.array(true_output(sampling, version))

    def guesses(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        key = b"%s %d %d" % (method.encode(), sampling.seed, version)
        wrong = _draws(key, sampling.max_tokens) >= self._skill.get(method, 0.5)
        return (self.output(sampling, version) + wrong) % self.vocab_size

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._skill.get(method, 0.5)


def _draws(key: bytes, count: int) -> np.ndarray:
    """`(count,)` numbers in [0, 1) that are functions of the key and their position."""
    return np.array([zlib.crc32(b"%s %d" % (key, position)) for position in range(count)]) / 2**32


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


class _Request(NamedTuple):
    tokens: np.ndarray
    guesses: Mapping[str, np.ndarray]
    """Method → its guess at each position, int16."""
    thresholds: Mapping[str, np.ndarray]
    """Method → probit threshold of each stretch; what a clairvoyant uses."""


class GeneratedText:
    """Outputs of given lengths, with guesses drawn from the skill of each method.

    Args:
        lengths: Seed of a request → its output tokens; may grow.
        skills: Draft method → how good it is.
        correlation: Share of variance that all methods have in common, in requests, stretches and single positions: at
            1 methods of equal mean are right and wrong at the same places, and racing them brings nothing.
        seed: Of all draws.
        methods: Those that are used; guesses of others are not drawn. None: all.
    """

    vocab_size = 255

    def __init__(
        self,
        lengths: Mapping[int, int],
        skills: Mapping[str, Skill],
        correlation: float = 0.0,
        seed: int = 0,
        methods: Container[str] | None = None,
    ) -> None:
        numbered = enumerate(sorted(skills.items()))
        self._skills = [(n, name, one) for n, (name, one) in numbered if methods is None or name in methods]
        self._lengths, self._seed = lengths, seed
        self._common, self._own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
        self._requests: dict[int, _Request] = {}

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return self._request(sampling.seed).tokens[: sampling.max_tokens]

    def guesses(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        return self._request(sampling.seed).guesses[method][: sampling.max_tokens]

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
        tokens = rng.integers(0, self.vocab_size, length, dtype=np.uint8)
        guesses, thresholds = {}, {}
        shared = [rng.standard_normal(size) for size in (1, stretches, length)] if self._skills else []
        for number, method, skill in self._skills:
            rng = np.random.default_rng([self._seed, seed, number])
            request, stretch, position = (
                self._common * common + self._own * rng.standard_normal(len(common)) for common in shared
            )
            scale = math.sqrt(1.0 + skill.spread**2 + skill.burst**2)
            base = _thresholds(skill.mean, skill.decay, 1 << stretches.bit_length())[:stretches] * scale
            threshold = base + skill.spread * request + skill.burst * stretch
            right = position < np.repeat(threshold, STRETCH)[:length]
            said = np.where(right, tokens, (tokens + 1) % self.vocab_size)
            covered = np.repeat(rng.random(stretches) < skill.coverage, STRETCH)[:length]
            guesses[method] = np.where(covered, said.astype(np.int16), np.int16(NO_GUESS))
            thresholds[method] = threshold
        return _Request(tokens, guesses, thresholds)


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

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return np.array(self._outputs[sampling.seed][: sampling.max_tokens])

    def guesses(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        output, seed = self.output(sampling, version), sampling.seed
        wrong = _draws(b"%s %d" % (method.encode(), seed), len(output)) >= self._accuracy.get((method, seed), 0.0)
        return (output + wrong) % self.vocab_size

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._accuracy.get((method, seed), 0.0)
