"""One thread that shows progress at intervals during long work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` (replaceable) with the seconds since the start every `interval_s`, from a separate thread, until
    `stop` or the end of the `with` block. Errors of `beat` are logged and ignored."""

    def __init__(self, beat: Callable[[float], None], interval_s: float = 5.0) -> None:
        self.beat, self._interval_s, self._ended = beat, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the calls; a running one gets two seconds. Idempotent."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._ended.wait(self._interval_s):
            try:
                self.beat(time.monotonic() - begin)
            except Exception:  # a display error must not end the work
                logger.debug("progress could not be shown", exc_info=True)


def elapsed(show: Callable[[str], None], what: str) -> Callable[[float], None]:
    """A beat that shows `what, 10 s`."""
    return lambda seconds: show(f"{what}, {seconds:.0f} s")
