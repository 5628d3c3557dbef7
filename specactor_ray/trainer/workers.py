"""Processes of the driver for user functions, independent of Ray, with a time limit, which ends the process.

A process is a fresh interpreter that leads its own process group, which ends with the process, and with the driver.
After the end of a process its request is tried again: a request holds all inputs of its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self

import psutil

from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import in_words
from specactor_ray.core.machine import available_bytes

logger = logging.getLogger(__name__)

Outcome = tuple[Any, str]
"""Result of a function, or None and the reason if there is none."""
Open = Callable[[], Callable[[Any], Any]]
"""Imports the needed modules and returns a function from request to result; pickled to reach a process."""
_ATTEMPTS = 3
"""Number of tries of a request when its process dies."""
_START_S = 60.0
"""Longest time for a fresh process to import the modules of the functions."""
_SEND_S = 10
"""Longest time until a process accepts a request."""
_POLL_S = 0.2
"""Seconds between two checks of a busy process."""
_LARGE_BYTES = 1 << 30
"""A process with less memory is not killed for it."""
_MOST_CHARACTERS = 2000
"""Longest reason in characters: a channel accepts it without a reader."""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from specactor_ray.trainer.workers import main; main()"


class WorkerPool:
    """Answers requests in several processes at once; a context manager. `name` is the section of the configuration
    whose key `timeout_s` is the longest time of a request."""

    def __init__(self, name: str, timeout_s: float, open_function: Open, workers: int) -> None:
        self._name, self._died, self.closed = name, False, False
        self._processes = [_WorkerProcess(name, timeout_s, open_function) for _ in range(workers)]
        self._idle: queue.LifoQueue[_WorkerProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, request: Any) -> Future[Outcome]:
        """Begin a request when a process is free."""
        return self._threads.submit(self._answer, request)

    def close(self) -> None:
        """Kill the processes, without waiting for running requests. Idempotent."""
        self.closed = True
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)

    def _answer(self, request: Any, times: int = 1) -> Outcome:
        """Execute a request, with `times` the time limit."""
        process = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return process.answer(request, times)
                except _DiedError as problem:
                    level = logging.DEBUG if self._died or process.closed else logging.WARNING
                    message = "%s process died: %s; a request has up to %d attempts"
                    logger.log(level, message, self._name, problem, _ATTEMPTS)
                    self._died = True
            return None, f"its process died {_ATTEMPTS} times"
        finally:
            self._idle.put(process)


class _DiedError(Exception):
    """A worker process has ended, or had to be ended."""


class _WorkerProcess:
    """A worker process, started on demand and again after its death. For one thread at a time; `close` for any."""

    def __init__(self, name: str, timeout_s: float, open_function: Open) -> None:
        self.closed = False
        self._name, self._timeout_s, self._open, self._lock = name, timeout_s, open_function, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection

    def answer(self, request: Any, times: int) -> Outcome:
        """Execute a request. Raises `_DiedError`."""
        try:
            if self._process is None and (problem := self._start()):
                self._end()
                return None, problem
            self._channel.send(request)
            outcome: Outcome = self._receive(times * self._timeout_s)
            return outcome
        except TimeoutError:
            self._end()
            return None, f"took longer than {self._name}.timeout_s ({self._timeout_s:g} s{f' x {times}' * (times > 1)})"
        except (_DiedError, OSError, EOFError) as problem:
            self._end()
            raise _DiedError(str(problem) or "it closed its channel") from None

    def close(self) -> None:
        """Kill the process permanently, and all processes started by it. A waiting caller gets `_DiedError`."""
        with self._lock:
            self.closed = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Kill the process and wait until it is gone."""
        with self._lock:
            self._kill()
            process, self._process = self._process, None
        if process is not None:
            self._channel.close()
            process.communicate()

    def _start(self) -> str:
        """Start the process. Returns the reason if the functions cannot be run."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._channel = Connection(ours.detach())
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with theirs, self._lock:
            if self.closed:
                raise _DiedError("the pool is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(os.path.abspath, sys.path)],
                stdin=subprocess.PIPE,  # the process ends when this pipe closes
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **inherited, "RAY_ENABLE_AUTO_CONNECT": "0"},
                start_new_session=True,
            )
        self._channel.send(self._open)
        try:
            problem = self._receive(_START_S)
        except TimeoutError:
            return f"the {self._name} process did not start within {_START_S:g} s"
        return problem and f"the {self._name} process cannot run the functions: {problem}"

    def _receive(self, timeout_s: float) -> Any:
        """Next message of the process. Raises `TimeoutError`, and the errors of its end."""
        assert self._process is not None
        end = SYSTEM.now() + timeout_s
        while True:
            _check_memory(self._process.pid)
            if self._channel.poll(_POLL_S):
                return self._channel.recv()
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and not self._channel.poll(0.0):  # a fork of it may keep its end open
                raise _DiedError(f"it ended with status {ended.si_status}")
            if SYSTEM.now() > end:
                raise TimeoutError


def _check_memory(pid: int) -> None:
    """Raise `_DiedError` if a process takes too much memory: Ray would kill its own workers instead."""
    try:
        held = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return
    if held > max(free := available_bytes(), _LARGE_BYTES):
        raise _DiedError(f"it held {held >> 20} MiB of memory where {int(free) >> 20} MiB were left, and was killed")


# ---- inside the process ----


def main() -> None:
    """Serve the channel whose descriptor is the first argument. It carries an `Open`, answered by the reason if it
    fails (else empty), then requests, each answered by an `Outcome`."""
    channel = Connection(int(sys.argv[1]))
    del sys.argv[1:]
    _end_with_driver()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # as for Ray's workers: the kernel kills these first when memory is short
    pid = os.getpid()
    try:
        function = channel.recv()()
    except Exception as error:  # noqa: BLE001 - the import of a user's module may raise anything
        channel.send(in_words(error)[:_MOST_CHARACTERS])
        return
    channel.send("")
    with contextlib.suppress(EOFError):
        while True:
            outcome = answer(function, channel.recv())
            if os.getpid() != pid:  # a fork in the function that returned
                os._exit(0)
            channel.send(outcome)


def answer(function: Callable[[Any], Any], request: Any) -> Outcome:
    """Call a function."""
    try:
        return function(request), ""
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return None, in_words(error)[:_MOST_CHARACTERS]


def _end_with_driver() -> None:
    """Let the kernel kill the process group when the other end of stdin closes, even while native code hangs."""
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]  # Linux
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
