"""SIGTERM as an interruption like Ctrl-C, and parts of the work that neither of them may interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_sigterm_seen = threading.Event()
"""Set when SIGTERM arrived: while Ray waits, any exception of a signal handler becomes a plain KeyboardInterrupt."""
_announcing_pids: set[int] = set()
"""The process, if it shows a line at the next signal. Its forks do not."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, for example from `ray job stop`: the same orderly end as Ctrl-C."""


def interruption(error: KeyboardInterrupt) -> str:
    """Cause of the interruption, in words."""
    return "SIGTERM" if isinstance(error, Terminated) or _sigterm_seen.is_set() else "Ctrl-C"


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread, and the first signal shows a line at once;
    `ignore_signals` is in effect until its end. Does nothing in other threads.

    `connect` keeps it in place when Ray sets its own handler.
    """
    if not _in_main_thread():
        yield
        return
    _sigterm_seen.clear()
    _announcing_pids.add(os.getpid())
    before = {number: signal.getsignal(number) for number in _INTERRUPTS}
    signal.signal(signal.SIGTERM, _interrupt)
    if callable(before[signal.SIGINT]):  # a process in the background may ignore it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # it was set by Python code
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    announce_interruption()
    if number == signal.SIGTERM:
        _sigterm_seen.set()
        raise Terminated
    raise KeyboardInterrupt


def announce_interruption() -> None:
    """Show a line at the first signal inside `sigterm_interrupts`."""
    if os.getpid() in _announcing_pids:
        _announcing_pids.clear()
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted; stopping ...\n")  # a stream may be in the middle of a write


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """SIGINT and SIGTERM that arrive inside are handled at the end, by the previous handlers.

    Intended for steps that must be complete, and for imports: the start of a compiled module may end the whole process
    if Python code that it calls raises. Does nothing outside the main thread, and for a signal without a handler in
    Python (SIGTERM ends the process at once then).
    """
    if not _in_main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in _INTERRUPTS if callable(signal.getsignal(number))}

    def defer(number: int, frame: FrameType | None) -> None:
        if before[signal.Signals(number)] is _interrupt:
            announce_interruption()
        arrived.append((number, frame))

    for number in before:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for arrival, frame in arrived[:1]:
        if arrival == signal.SIGTERM:
            signal.alarm(0)  # set by a handler of Ray in C++ that took the signal in another thread, to abort then
        handler = before[signal.Signals(arrival)]
        assert callable(handler)
        handler(arrival, frame)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on, during the end. Processes that are started later do not inherit that. Does
    nothing outside the main thread."""
    if _in_main_thread():
        for number in _INTERRUPTS:
            signal.signal(number, lambda number, frame: None)


@contextlib.contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Processes that are started inside do not receive this signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
