"""What runs in a worker process: functions of the user's, request after request, without Ray.

The process is a fresh interpreter and leads a process group of its own, so a function may fork, start processes or kill
itself. The group ends with the process, and with the driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

Outcome = tuple[Any, str]
"""What a function returned, or None and why there is nothing."""
_MOST_CHARACTERS = 2000
"""Longest reason in characters: a channel takes it without a reader."""


class Work(Protocol):
    """What worker processes do. It is pickled on its way to them."""

    @property
    def name(self) -> str:
        """The section of the configuration that it comes from."""

    @property
    def timeout_s(self) -> float:
        """Longest time of one request; the key `timeout_s` of its section."""

    def open(self) -> Callable[[Any], Any]:
        """Import what it needs. Returns what takes a request and returns its result."""


class TookTooLongError(BaseException):
    """A function took too long. No `Exception`: those are caught by the libraries that functions use."""


def main() -> None:
    """Serve the channel whose descriptor is the first argument. It carries a `Work`, answered by why it cannot be done
    (empty if it can), then requests, each answered by an `Outcome`."""
    channel = Connection(int(sys.argv[1]))
    del sys.argv[1:]
    _end_with_driver()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # as Ray's workers: short of memory, the kernel takes these first
    pid, work = os.getpid(), channel.recv()
    try:
        function = work.open()
    except Exception as error:  # noqa: BLE001 - the import of a user's module may raise anything
        channel.send(f"the {work.name} process cannot run the functions: {_in_words(error)}")
        return
    channel.send("")
    with contextlib.suppress(EOFError):
        while True:
            outcome = answer(function, channel.recv(), work)
            if os.getpid() != pid:  # a fork by the function that came back
                os._exit(0)
            channel.send(outcome)


def answer(function: Callable[[Any], Any], request: Any, work: Work) -> Outcome:
    """Call a function; an alarm interrupts Python code after `work.timeout_s`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, work.timeout_s)
    try:
        return function(request), ""
    except TookTooLongError:
        return None, f"took longer than {work.name}.timeout_s ({work.timeout_s:g} s)"
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return None, _in_words(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]


def _end_with_driver() -> None:
    """Let the kernel kill the whole group when the other end of stdin closes, even if native code hangs here."""
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]  # Linux
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
