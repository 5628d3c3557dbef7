"""Scoring outputs off the driver: a Ray task for each sample, with a limit on its time.

Two limits. Inside the task an alarm interrupts Python code after `timeout_s` and keeps the process. What an alarm
cannot interrupt (native code, a swallowed exception) is cut off with its process some seconds later.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError

from specactor_ray.config.training_schema import RewardConfig
from specactor_ray.errors import UserError
from specactor_ray.training.rewards import RewardSample, Scorer

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Beyond `timeout_s`, before the process of a task is ended."""
_START_S = 20.0
"""Longest time for a fresh process to import what the rewards need."""


class RewardTimeoutError(Exception):
    """A reward function took too long."""


@dataclass(slots=True)
class Scores:
    """Rewards in the order of the samples, and what went wrong."""

    rewards: list[float]
    failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of samples that got `reward.failure_value`."""


class RewardRunner:
    """Scores samples in `reward.workers` processes at once. Makes sure at once that the functions can be had.

    Raises:
        ConfigError: One of them cannot.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._score: Any = ray.remote(num_cpus=0, max_retries=0)(_score_one)
        Scorer(config)

    def score(self, samples: Sequence[RewardSample], on_done: Callable[[], None] | None = None) -> Scores:
        """The reward of every sample; never raises for what a reward function does.

        Args:
            samples: What to score.
            on_done: Called after each one.
        """
        scores = Scores([self._config.failure_value] * len(samples))
        config = ray.put(self._config)
        waiting = deque(range(len(samples)))
        running: dict[Any, tuple[int, float]] = {}
        while waiting or running:
            while waiting and len(running) < self._config.workers:
                index = waiting.popleft()
                running[self._score.remote(config, samples[index])] = (index, time.monotonic())
            done, _ = ray.wait(list(running), timeout=0.5)
            for ref in done:
                index, _begin = running.pop(ref)
                self._take(scores, index, ref)
                if on_done is not None:
                    on_done()
            for ref, (index, begin) in list(running.items()):
                if time.monotonic() - begin > self._hard_limit_s():
                    del running[ref]
                    ray.cancel(ref, force=True)
                    scores.failures["timed out and had to be killed"] += 1
                    logger.warning("the reward of sample %d took too long; its process was ended", index)
                    if on_done is not None:
                        on_done()
        return scores

    def _hard_limit_s(self) -> float:
        return self._config.timeout_s + _GRACE_S + _START_S

    def _take(self, scores: Scores, index: int, ref: Any) -> None:
        try:
            reward, problem = ray.get(ref)
        except RayError as error:
            reward, problem = None, f"the process ended: {type(error).__name__}"
        if reward is None:
            scores.failures[problem] += 1
            if scores.failures[problem] == 1:
                logger.warning("a reward failed: %s", problem)
        else:
            scores.rewards[index] = reward


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
