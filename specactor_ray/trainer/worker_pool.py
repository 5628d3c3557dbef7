"""Processes of the driver for user functions, independent of Ray, with a time limit.

There are two limits. Inside the process an alarm interrupts Python code after `Work.timeout_s` and keeps the process.
Code that an alarm cannot interrupt (native code, a swallowed exception) is ended with its process some seconds later.

The end of a process (out of memory, a crash) has no meaning for the request: callers try it again, up to `ATTEMPTS`
times in all. So a request holds all inputs of its result, and any process can execute it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil

from specactor_ray.core.clock import SYSTEM
from specactor_ray.models.cache_size import available_bytes
from specactor_ray.rollout.memory import gib
from specactor_ray.trainer.worker_process import Outcome, Work

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Number of tries of a request whose process dies."""
_GRACE_S = 5.0
"""Seconds beyond `Work.timeout_s` after which a process is killed."""
_START_S = 60.0
"""Longest time for a fresh process to import the modules of the functions."""
_SEND_S = 10
"""Longest time until a process accepts a request."""
_POLL_S = 0.2
"""Seconds between two checks of a busy process."""
_LARGE_BYTES = 1 << 30
"""A process with less memory is not killed for it."""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from specactor_ray.trainer.worker_process import main; main()"


class _Died(Exception):
    """A worker process has ended, or had to be ended."""


class WorkerPool:
    """Answers requests in several processes at once; a context manager."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.deaths = 0
        """Number of processes that died since the caller set this to 0; the first is logged."""
        self._processes = [_WorkerProcess(work) for _ in range(workers)]
        self._idle: queue.LifoQueue[_WorkerProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, work.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    def submit(self, request: Any) -> Future[Outcome | None]:
        """Begin a request when a process is free. The result is None if the process died."""
        return self._threads.submit(self._answer, request)

    def map(self, requests: Sequence[Any]) -> list[Outcome | None]:
        """Outcome of each request; None if the process died each time."""
        self.deaths, outcomes = 0, list[Outcome | None]([None] * len(requests))
        for _ in range(ATTEMPTS):  # after all others: a machine short of memory may have some by then
            waiting = [index for index, outcome in enumerate(outcomes) if outcome is None]
            for index, outcome in zip(waiting, self._once([requests[index] for index in waiting]), strict=True):
                outcomes[index] = outcome
        return outcomes

    def kill(self) -> None:
        """Kill the processes, and fail running requests."""
        for process in self._processes:
            process.kill()

    def _once(self, requests: Sequence[Any]) -> list[Outcome | None]:
        try:
            return [SYSTEM.result(future, math.inf) for future in [self.submit(request) for request in requests]]
        except BaseException:  # an interruption does not wait for functions
            self.kill()
            raise

    def _answer(self, request: Any) -> Outcome | None:
        process = self._idle.get()
        try:
            return process.answer(request)
        except _Died as problem:
            if not self.deaths:
                name = self.work.name
                logger.warning("%s process died: %s; a request has up to %d attempts", name, problem, ATTEMPTS)
            self.deaths += 1
            return None
        finally:
            self._idle.put(process)


class _WorkerProcess:
    """A worker process (`worker_process.py`), started on demand and again after its death. For one thread at a time;
    `kill` and `close` for any."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection
        self._closed, self._lock = False, threading.Lock()

    def answer(self, request: Any) -> Outcome:
        """Execute a request. Raises `_Died`."""
        try:
            if self._process is None and (problem := self._start()):
                self.end()
                return None, problem
            self._channel.send(request)
            outcome: Outcome = self._receive(self._work.timeout_s + _GRACE_S)
            return outcome
        except TimeoutError:
            self.end()
            return None, "timed out and had to be killed"
        except (_Died, OSError, EOFError) as problem:
            self.end()
            raise _Died(str(problem) or "it closed its channel") from None

    def kill(self) -> None:
        """Kill the process and all processes started by it. Waiting callers get `_Died`."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process permanently."""
        with self._lock:
            self._closed = True
        self.kill()

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill()
        if (process := self._process) is not None:
            self._process = None
            self._channel.close()
            process.communicate()

    def _start(self) -> str:
        """Start the process. Returns the reason if the functions cannot be run."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        channel = Connection(ours.detach())
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs, self._lock:
            if self._closed:
                channel.close()
                raise _Died("the pool is closed")
            self._channel = channel
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *path],
                stdin=subprocess.PIPE,  # the process ends when this pipe closes
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self._channel.send(self._work)
        try:
            return str(self._receive(_START_S))
        except TimeoutError:
            return f"the {self._work.name} process did not start within {_START_S:g} s"

    def _receive(self, timeout_s: float) -> Any:
        """Next message of the process. Raises `TimeoutError`, and the errors of its end."""
        assert self._process is not None
        end = SYSTEM.now() + timeout_s
        while True:
            self._check_memory(self._process.pid)
            if self._channel.poll(_POLL_S):
                return self._channel.recv()
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and not self._channel.poll(0.0):  # a fork of it may keep its end open
                raise _Died(f"it ended with status {ended.si_status}")
            if SYSTEM.now() > end:
                raise TimeoutError

    def _check_memory(self, pid: int) -> None:
        """Raise `_Died` if the process takes too much memory: Ray would kill its own workers instead."""
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
