"""Requests of a simulated rollout, drawn or recorded: their outputs, and the guesses of drafters.

A request is identified by its seed. A token of the target is a function of (seed, weights, position), as with keyed
sampling; the candidates of a draft method at a position, given that the tokens before it are right, are functions of
(method, seed, weights, position). So runs of different policies have the same tokens and the same guesses.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import GAPS, ranges_of
from specactor_ray.plan.search import RIGHT_BEHIND_WRONG
from specactor_ray.simulation._kernels import NO_GUESS
from specactor_ray.simulation.scenario import SkillConfig, WorkloadConfig

STRETCH = 32
"""Output tokens over which coverage and bursts are constant."""
_STANDARD = NormalDist()
_BLUR = 1.5
"""Noise of the gap, see `_gaps`: fitted to SmolLM2, whose first candidate with a mean of 0.58 is right in 0.35, 0.45,
0.63 and 0.88 of the quarters of the gap."""
_SECOND_BY_GAP = np.linspace(0.8, 1.55, GAPS)
"""`(GAPS,)`: chance of the second candidate by range of the gap, relative to its mean."""
_RIGHT_TO = 1.0 - np.cumprod(1.0 - np.array(RIGHT_BEHIND_WRONG))
"""`(4,)`: chance that one of the candidates from the second up to this one is right where the first is wrong."""
_FIX = "; name a trajectories.jsonl that a run wrote"


class Text(Protocol):
    """The outputs of all requests."""

    vocab_size: int

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(n,)`: the whole output of a request with these weights, at most `sampling.max_tokens` tokens."""

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        """Integers `(2, n)`: the right candidate of a drafter of this method at each output position after a right
        prefix (0: the first; `RANKS + 1`: none; `NO_GUESS`: there are none), and the range of the gap between the
        scores of the first two."""

    def probability(self, method: str, seed: int, position: int) -> float:
        """Probability that the guess of a method at a position is right, given all but the draw of that position."""


def true_token(seed: int, version: int, position: int) -> int:
    """The target's token in a run with faults; keyed like the real sampler."""
    return zlib.crc32(b"%d %d %d" % (seed, version, position)) % HashedText.vocab_size


def true_output(sampling: SamplingParams, version: int) -> tuple[int, ...]:
    """The whole output of a request in a run with faults."""
    begin = sampling.first_position
    return tuple(true_token(sampling.seed, version, begin + position) for position in range(sampling.max_tokens))


def _positions(sampling: SamplingParams) -> slice:
    """Positions of the request in the output of its seed."""
    return slice(sampling.first_position, sampling.first_position + sampling.max_tokens)


def guesses(ranks: np.ndarray, output: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 `(n,)`: the first candidates, or `NO_GUESS`; a wrong one is the next token of the vocabulary."""
    return np.where(ranks == NO_GUESS, NO_GUESS, (output.astype(np.int32) + (ranks > 0)) % vocab_size)


class HashedText:
    """Cheap tokens for runs with faults, whose outputs are short and change with the weights. `skill`: draft method →
    probability that a draft token is right, 0.5 for other methods."""

    vocab_size = 1000

    def __init__(self, skill: Mapping[str, float] | None = None) -> None:
        self._skill = dict(skill or {})

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return np.array(true_output(sampling, version))

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        key = b"%s %d %d" % (method.encode(), sampling.seed, version)
        return _hashed_ranks(key, sampling.max_tokens, self._skill.get(method, 0.5))

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._skill.get(method, 0.5)


def _draws(key: bytes, count: int) -> np.ndarray:
    """`(count,)`: numbers in [0, 1) that are functions of the key and their position."""
    return np.array([zlib.crc32(b"%s %d" % (key, position)) for position in range(count)]) / 2**32


def _hashed_ranks(key: bytes, count: int, first: float) -> np.ndarray:
    """`Text.ranks` where the first candidate is right with this probability; all gaps are equal."""
    draws = _draws(key, count)
    left = np.where(draws < first, 0.0, (draws - first) / max(1.0 - first, 1e-9))  # uniform again where it is wrong
    ranks = np.where(draws < first, 0, 1 + np.searchsorted(_RIGHT_TO, left, side="right"))
    return np.stack([ranks, np.full(count, GAPS // 2)]).astype(np.int8)


class _Request(NamedTuple):
    tokens: np.ndarray
    ranks: Mapping[str, np.ndarray]
    """Method → `Text.ranks`, int8."""
    thresholds: Mapping[str, np.ndarray]
    """Method → probit threshold of each stretch, for the clairvoyant policy."""


class GeneratedText:
    """Outputs of given lengths, with guesses drawn from the skill of each method.

    A guess is right where a standard normal draw of (request, position) is below a threshold (a probit model). The
    threshold varies over requests and over stretches of an output such that its mean probability stays `mean`.

    Args:
        lengths: Seed of a request → number of its output tokens; may grow.
        skills: Accuracy of the draft methods.
        correlation: Share of variance that all methods have in common, in requests, stretches and single positions: at
            1 methods of equal mean are right and wrong at the same positions, and a race of them gains nothing.
        seed: Seed of all draws.
        methods: Used methods; guesses of others are not drawn. None: all.
    """

    vocab_size = 255

    def __init__(
        self,
        lengths: Mapping[int, int],
        skills: Sequence[SkillConfig],
        correlation: float = 0.0,
        seed: int = 0,
        methods: Container[str] | None = None,
    ) -> None:
        numbered = enumerate(sorted(skills, key=lambda skill: skill.method))
        self._skills = [(n, skill) for n, skill in numbered if methods is None or skill.method in methods]
        self._lengths, self._seed = lengths, seed
        self._common, self._own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
        self._requests: dict[int, _Request] = {}

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return self._request(sampling.seed).tokens[_positions(sampling)]

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        return self._request(sampling.seed).ranks[method][:, _positions(sampling)]

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
        ranks, thresholds = {}, {}
        shared = [rng.standard_normal(size) for size in (1, stretches, length)] if self._skills else []
        for number, skill in self._skills:
            rng = np.random.default_rng([self._seed, seed, number])
            request, stretch, position = (
                self._common * common + self._own * rng.standard_normal(len(common)) for common in shared
            )
            scale = math.sqrt(1.0 + skill.spread**2 + skill.burst**2)
            base = _thresholds(skill.mean, skill.decay, 1 << stretches.bit_length())[:stretches] * scale
            threshold = base + skill.spread * request + skill.burst * stretch
            margin = np.repeat(threshold, STRETCH)[:length] - position
            covered = np.repeat(rng.random(stretches) < skill.coverage, STRETCH)[:length]
            gaps = _gaps(margin, rng)
            second, third = rng.random((2, length))
            rank = 1 + (second >= skill.second * _SECOND_BY_GAP[gaps]) * (1 + (third >= skill.third))
            fourth, fifth = rng.random((2, length))
            rank += (rank == 3) * (fourth >= skill.fourth) * (1 + (fifth >= skill.fifth))
            ranks[skill.method] = np.stack([np.where(covered, rank * (margin <= 0.0), NO_GUESS), gaps]).astype(np.int8)
            thresholds[skill.method] = threshold
        return _Request(tokens, ranks, thresholds)


def _gaps(margin: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranges of gaps between the first two scores: the distance of the draw below its threshold, plus noise."""
    return ranges_of(np.exp(margin - _BLUR * rng.gumbel(size=len(margin))))


@functools.lru_cache(maxsize=4096)
def _thresholds(mean: float, decay: float, stretches: int) -> np.ndarray:
    means = [mean * (1.0 - decay) ** (number * STRETCH / 1000.0) for number in range(stretches)]
    return np.array([_STANDARD.inv_cdf(min(max(p, 1e-6), 1.0 - 1e-6)) for p in means])


@dataclass(frozen=True)
class RecordedRequest:
    """One line of a `trajectories.jsonl`."""

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    """`max_tokens` of the recorded request; 0: unknown."""
    accuracy: Mapping[str, float]
    """Draft method → share of right draft tokens among those with only right tokens before."""


class RecordedText:
    """Recorded outputs. Lookups really search them; other methods are right as often as in the record.

    Args:
        requests: The requests; the seed of each is its index.
        skills: Accuracy of methods in place of the recorded one.
    """

    def __init__(self, requests: Sequence[RecordedRequest], skills: Sequence[SkillConfig] = ()) -> None:
        self.requests = requests
        self.vocab_size = 1 + max(max((*request.prompt, *request.output)) for request in requests)
        self._skills = {skill.method: skill.mean for skill in skills}

    def output(self, sampling: SamplingParams, version: int) -> np.ndarray:
        return np.array(self.requests[sampling.seed].output[_positions(sampling)])

    def ranks(self, method: str, sampling: SamplingParams, version: int) -> np.ndarray:
        count, seed = len(self.output(sampling, version)), sampling.seed
        return _hashed_ranks(b"%s %d" % (method.encode(), seed), count, self.probability(method, seed, 0))

    def probability(self, method: str, seed: int, position: int) -> float:
        return self._skills.get(method, self.requests[seed].accuracy.get(method, 0.0))


def load_recording(path: Path, limit: int | None = None) -> list[RecordedRequest]:
    """Read the trajectories of a rollout, at most `limit`; failed ones are left out. Raises InputError if the file
    cannot be read, a line is no trajectory, or none is left."""
    requests: list[RecordedRequest] = []
    number = 0
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):  # noqa: B007 - in the message
            row = parse_json(line)
            if row["finish_reason"] != "error" and (limit is None or len(requests) < limit):
                requests.append(_recorded(row))
    except OSError as error:
        raise InputError(f"workload.trajectories: {path} cannot be read ({error.strerror}){_FIX}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"line {number} is no trajectory ({type(error).__name__}: {error})"
        raise InputError(f"workload.trajectories: {path}, {problem}{_FIX}") from None
    if not requests:
        raise InputError(f"workload.trajectories: {path} holds no finished trajectory{_FIX}")
    unlimited = max(len(request.output) for request in requests) + 1
    return [request if request.max_tokens else replace(request, max_tokens=unlimited) for request in requests]


def _recorded(row: Mapping[str, Any]) -> RecordedRequest:
    steps, accuracy = int(row["stats"]["steps"]), {}
    for method, (drafted, accepted) in row["stats"]["by_method"].items():
        # Tokens after a wrong one were not tested, and a step has one wrong token at most.
        tested = accepted + min(steps, drafted - accepted)
        if tested > 0:
            accuracy[method] = accepted / tested
    prompt, output = (tuple(map(operator.index, row[key])) for key in ("prompt_token_ids", "token_ids"))
    if min((*prompt, *output)) < 0 or not output:
        raise ValueError("its token ids are negative, or it has no output")
    limit = len(output) if row["finish_reason"] == "length" else 0
    return RecordedRequest(str(row["request_id"]), prompt, output, limit, accuracy)


def draw_lengths(workload: WorkloadConfig, count: int, seed: str) -> list[int]:
    """Output lengths: log-normal with the workload's median and sigma, at least 1, cut at `max_tokens`."""
    rng = random.Random(seed)
    mu = math.log(workload.median_tokens)
    return [min(max(round(rng.lognormvariate(mu, workload.sigma)), 1), workload.max_tokens) for _ in range(count)]


def draw_arrivals(workload: WorkloadConfig, seed: str) -> list[float]:
    """Seconds since midnight at which requests of a day arrive, ascending."""
    rng, found = random.Random(seed), list[float]()
    while len(found) < workload.requests:
        at = rng.random()
        rate = workload.night + (1.0 - workload.night) * (0.5 - 0.5 * math.cos(2.0 * math.pi * at)) ** 3
        if rng.random() < rate:
            found.append(at * workload.day_s)
    return sorted(found)
