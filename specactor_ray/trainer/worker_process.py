"""Code of a worker process: user functions, request after request, without Ray.

The process is a fresh interpreter and leads its own process group, so a function may fork, start processes or kill
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
"""Result of a function, or None and the reason if there is none."""
_MOST_CHARACTERS = 2000
"""Longest reason in characters: a channel accepts it without a reader."""


class Work(Protocol):
    """Work of worker processes. It is pickled to reach them."""

    @property
    def name(self) -> str:
        """Section of the configuration of the work."""

    @property
    def timeout_s(self) -> float:
        """Longest time of one request; the key `timeout_s` of its section."""

    def open(self) -> Callable[[Any], Any]:
        """Import the needed modules. Returns a function from request to result."""


class TookTooLongError(BaseException):
    """A function took too long. Not an `Exception`, since libraries that functions use catch those."""


def main() -> None:
    """Serve the channel whose descriptor is the first argument. It carries a `Work`, answered by the reason if it
    cannot be done (else empty), then requests, each answered by an `Outcome`."""
    channel = Connection(int(sys.argv[1]))
    del sys.argv[1:]
    _end_with_driver()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # as for Ray's workers: the kernel kills these first when memory is short
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
            if os.getpid() != pid:  # a fork in the function that returned
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
