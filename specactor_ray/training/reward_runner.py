"""Scoring outputs in processes of the driver that have nothing to do with Ray, with a limit on their time.

Two limits. Inside the process an alarm interrupts Python code after `timeout_s` and keeps the process. What an alarm
cannot interrupt (native code, a swallowed exception) is cut off with its process some seconds later.

What happens to the process (out of memory, a crash) says nothing about the output: such a sample is scored again, a few
times. A sample without a score is never scored as wrong; see `reward.failure_value`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil

from specactor_ray.clock import SYSTEM
from specactor_ray.config.training_schema import RewardConfig
from specactor_ray.models.cache_size import available_bytes
from specactor_ray.rollout.memory import gib
from specactor_ray.training.reward_process import Outcome
from specactor_ray.training.rewards import RewardSample, Scorer

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Beyond `timeout_s`, before a process is killed."""
_START_S = 60.0
"""Longest time for a fresh process to import what the rewards need."""
_SEND_S = 10
"""Longest time until a process takes a sample."""
_POLL_S = 0.2
"""How often a busy process is looked at."""
_ATTEMPTS = 3
"""How often a sample whose process died is scored."""
_LARGE_BYTES = 1 << 30
"""A process with less memory than this is not killed for it."""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from specactor_ray.training.reward_process import main; main()"


class _Died(Exception):
    """A reward process has ended, or had to be."""


@dataclass(slots=True)
class Scores:
    """Rewards in the order of the samples, and what went wrong."""

    rewards: list[float | None]
    """None: no score; the sample is left out of training."""
    failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of samples without a score; they got `reward.failure_value`."""


class RewardRunner:
    """Scores samples in `reward.workers` processes at once; a context manager. Raises ConfigError if a function is not
    available."""

    def __init__(self, config: RewardConfig) -> None:
        Scorer(config)
        self._config = config
        self._processes = [_RewardProcess(config) for _ in range(config.workers)]
        self._idle: queue.LifoQueue[_RewardProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._deaths = 0
        """In the current `score`; the first is logged."""

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.end()

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """The reward of every sample; never raises for what a reward function does, or for what ends its process."""
        self._deaths, outcomes = 0, list[Outcome | None]([None] * len(samples))
        for _ in range(_ATTEMPTS):  # after all others: a machine short of memory may have some by then
            waiting = [index for index, outcome in enumerate(outcomes) if outcome is None]
            for index, outcome in zip(waiting, self._score_all([samples[index] for index in waiting]), strict=True):
                outcomes[index] = outcome
        scores = Scores([self._config.failure_value] * len(samples))
        for index, outcome in enumerate(outcomes):
            reward, reason = outcome or (None, f"its process died {_ATTEMPTS} times")
            if reward is not None:
                scores.rewards[index] = reward
                continue
            scores.failures[reason] += 1
            if scores.failures[reason] == 1:
                answer = samples[index].answer
                logger.warning("a reward failed: %s (sample %d, reference answer %.80r)", reason, index, answer)
        return scores

    def _score_all(self, samples: Sequence[RewardSample]) -> list[Outcome | None]:
        """None for a sample whose process died."""
        with ThreadPoolExecutor(self._config.workers, "reward") as pool:
            try:
                return list(pool.map(self._score, samples))
            except BaseException:  # an interruption does not wait for functions
                for process in self._processes:
                    process.kill()
                raise

    def _score(self, sample: RewardSample) -> Outcome | None:
        process = self._idle.get()
        try:
            return process.score(sample)
        except _Died as problem:
            if not self._deaths:
                logger.warning("a reward process died: %s; up to %d attempts for a sample", problem, _ATTEMPTS)
            self._deaths += 1
            return None
        finally:
            self._idle.put(process)


class _RewardProcess:
    """A reward process (`reward_process.py`), started when it is needed and again after it has died. For one thread at
    a time; `kill` for any."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection

    def score(self, sample: RewardSample) -> Outcome:
        """Raises `_Died`."""
        try:
            if self._process is None and (problem := self._start()):
                self.end()
                return None, problem
            self._channel.send(sample)
            outcome: Outcome = self._receive(self._config.timeout_s + _GRACE_S)
            return outcome
        except TimeoutError:
            self.end()
            return None, "timed out and had to be killed"
        except (_Died, OSError, EOFError) as problem:
            self.end()
            raise _Died(str(problem) or "it closed its channel") from None

    def kill(self) -> None:
        """Kill it and all that it started. What waits for it sees it die."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        if (process := self._process) is not None:
            self._process = None
            self._channel.close()
            process.communicate()

    def _start(self) -> str:
        """Returns why the functions cannot be run, if they cannot."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._channel = Connection(ours.detach())
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *path],
                stdin=subprocess.PIPE,  # its lifeline
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self._channel.send(self._config)
        try:
            return str(self._receive(_START_S))
        except TimeoutError:
            return f"the reward process did not start within {_START_S:g} s"

    def _receive(self, timeout_s: float) -> Any:
        """What it sends next. Raises `TimeoutError`, and what ends it."""
        assert self._process is not None
        end = SYSTEM.now() + timeout_s
        while True:
            self._check_memory(self._process.pid)
            if self._channel.poll(_POLL_S):
                return self._channel.recv()
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and not self._channel.poll(0.0):  # a fork of it holds its end open
                raise _Died(f"it ended with status {ended.si_status}")
            if SYSTEM.now() > end:
                raise TimeoutError

    def _check_memory(self, pid: int) -> None:
        """Ray would kill its own workers for the memory that this process takes."""
        try:
            held = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return
        if held > max(free := available_bytes(), _LARGE_BYTES):
            raise _Died(f"it held {gib(held)} of memory where {gib(free)} were left, and was killed")


def _environment() -> dict[str, str]:
    """Environment of this process, without the variables of Ray."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {"OMP_NUM_THREADS": "1", **own, "RAY_ENABLE_AUTO_CONNECT": "0"}
