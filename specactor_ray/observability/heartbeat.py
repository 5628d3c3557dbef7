"""A line now and then while something takes long and reports nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class Heartbeat:
    """Shows `what, 10 s` every few seconds until `stop`, or the end of the `with` block.

    Args:
        show: Shows a line; called from a thread.
        what: What is under way.
        interval_s: Seconds between lines.
    """

    def __init__(self, show: Callable[[str], None], what: str, interval_s: float = 5.0) -> None:
        self._show, self._what, self._interval_s = show, what, interval_s
        self._begin, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Harmless when repeated."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._show(f"{self._what}, {time.monotonic() - self._begin:.0f} s")
