"""Ctrl-C and SIGTERM during training: at once where nothing can be torn, else as soon as the step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(KeyboardInterrupt):
    """The user or the cluster wants the run to end."""


class StopSignal:
    """While inside, SIGINT and SIGTERM raise `StopRequested` in the main thread, or at the end of a shielded part.

    `connect` keeps it in place when Ray sets handlers of its own. Does nothing in any other thread.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._shields = 0
        self._pending = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """What runs inside is not interrupted; a signal that came meanwhile is raised afterwards."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._pending and not self._shields:
            self._pending = False
            raise StopRequested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._shields:
            self._pending = True
        else:
            raise StopRequested
