"""Scoring outputs off the driver: a Ray task for each sample, with a limit on its time.

Two limits. Inside the task an alarm interrupts Python code after `timeout_s` and keeps the process. What an alarm
cannot interrupt (native code, a swallowed exception) is cut off with its process some seconds later.

What happens to the process (out of memory, a lost node, a crash) says nothing about the output: such a sample is scored
again, a few times. A sample without a score is never scored as wrong; see `reward.failure_value`.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import ray

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.cluster.calls import RayTransport, Transport
from specactor_ray.config.training_schema import RewardConfig
from specactor_ray.errors import CallError, RemoteError, SpecActorError, UserError
from specactor_ray.training.rewards import RewardSample, Scorer

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Beyond `timeout_s`, before the process of a task is ended."""
_START_S = 20.0
"""Longest time for a fresh process to import what the rewards need."""
_POLL_S = 0.5
"""How often running tasks are looked at."""
_ATTEMPTS = 3
"""How often a sample whose process died is scored."""


class RewardTimeoutError(BaseException):
    """A reward function took too long. No `Exception`: those are caught by the libraries that functions use."""


@dataclass(slots=True)
class Scores:
    """Rewards in the order of the samples, and what went wrong."""

    rewards: list[float | None]
    """None: no score; the sample is left out of training."""
    failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of samples without a score; they got `reward.failure_value`."""


class RewardRunner:
    """Scores samples in `reward.workers` processes at once. Makes sure at once that the functions can be had.

    Args:
        config: The `reward` section.
        transport: What waits for the processes; default: Ray.
        clock: What their time is measured by.

    Raises:
        ConfigError: One of the functions cannot be had.
    """

    def __init__(self, config: RewardConfig, transport: Transport | None = None, clock: Clock = SYSTEM) -> None:
        self._config, self._clock = config, clock
        self._transport: Transport = transport if transport is not None else RayTransport()
        self._task: Any = ray.remote(num_cpus=0, max_retries=0)(_score_one)
        Scorer(config)

    def score(self, samples: Sequence[RewardSample], on_done: Callable[[], None] | None = None) -> Scores:
        """The reward of every sample; never raises for what a reward function does, or for what ends its process.

        Args:
            samples: What to score.
            on_done: Called after each one.
        """
        scoring = _Scoring(samples, Scores([self._config.failure_value] * len(samples)), on_done or (lambda: None))
        config = self._transport.put(self._config)
        while scoring.waiting or scoring.running:
            while scoring.waiting and len(scoring.running) < self._config.workers:
                index = scoring.waiting.popleft()
                scoring.running[self._task.remote(config, samples[index])] = (index, self._clock.now())
            for reference in self._transport.wait(list(scoring.running), _POLL_S):
                self._take(scoring, scoring.running.pop(reference)[0], reference)
            for reference, (index, begin) in list(scoring.running.items()):
                if self._clock.now() - begin > self._config.timeout_s + _GRACE_S + _START_S:
                    del scoring.running[reference]
                    ray.cancel(reference, force=True)
                    scoring.fail(index, "timed out and had to be killed")
        return scoring.scores

    def _take(self, scoring: _Scoring, index: int, reference: Any) -> None:
        try:
            reward, problem = self._transport.take(reference)
        except RemoteError as error:  # outside of what a reward function may raise
            logger.warning("the reward of sample %d: %s", index, error)
            scoring.fail(index, "the reward process cannot run the functions")
        except CallError as error:
            scoring.process_died(index, error)
        else:
            if reward is None:
                scoring.fail(index, problem)
            else:
                scoring.succeed(index, reward)


@dataclass(slots=True)
class _Scoring:
    """The state of one `RewardRunner.score`."""

    samples: Sequence[RewardSample]
    scores: Scores
    on_done: Callable[[], None]
    waiting: deque[int] = field(default_factory=deque)
    running: dict[Any, tuple[int, float]] = field(default_factory=dict)
    """Reference of a task → its sample, and when it began."""
    deaths: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.samples)))

    def succeed(self, index: int, reward: float) -> None:
        self.scores.rewards[index] = reward
        self.on_done()

    def fail(self, index: int, reason: str) -> None:
        self.scores.failures[reason] += 1
        if self.scores.failures[reason] == 1:
            answer = self.samples[index].answer
            logger.warning("a reward failed: %s (sample %d, reference answer %.80r)", reason, index, answer)
        self.on_done()

    def process_died(self, index: int, error: SpecActorError) -> None:
        """Score it again, after the samples that wait: a machine short of memory may have some by then."""
        if not self.deaths:
            logger.warning("a reward process died: %s; up to %d attempts for a sample", error, _ATTEMPTS)
        self.deaths[index] += 1
        if self.deaths[index] < _ATTEMPTS:
            self.waiting.append(index)
        else:
            self.fail(index, f"its process died {_ATTEMPTS} times")


def _score_one(config: RewardConfig, sample: RewardSample) -> tuple[float | None, str]:
    """Runs in a process of its own: the reward, or None and why there is none."""
    try:
        scorer = _scorer(config)
    except UserError as error:
        return None, str(error)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise RewardTimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, config.timeout_s)
    try:
        return scorer(sample), ""
    except RewardTimeoutError:
        return None, f"took longer than reward.timeout_s ({config.timeout_s:g} s)"
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return None, f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


_scorers: dict[str, Scorer] = {}
"""One per configuration and process: importing the functions may take seconds."""


def _scorer(config: RewardConfig) -> Scorer:
    key = repr(config)
    if key not in _scorers:
        _scorers[key] = Scorer(config)
    return _scorers[key]
