"""Progress of a rollout: a bar on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID

from specactor_ray.observability.console import make_bar, say

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgressState:
    """What there is to show at one moment."""

    done: int = 0
    """Trajectories that ended, the failed ones included."""
    failed: int = 0
    tokens: int = 0
    """Output tokens so far."""
    acceptance_length: float = 0.0
    supply: float = 0.0


class RolloutProgress:
    """Shows the state that `read` returns, while the `with` block runs; a thread of its own asks for it.

    Args:
        console: Where to show it; a bar if it is a terminal, else plain lines.
        title: What runs.
        total: Trajectories in all.
        read: Returns the present state; called from another thread, so it may only read.
        line_interval_s: Seconds between plain lines.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        read: Callable[[], ProgressState],
        line_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._title, self._total, self._read = console, title, total, read
        self._clock = clock
        self._begin = clock()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._interval_s = 0.5 if console.is_terminal else line_interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> RolloutProgress:
        self._begin = self._clock()
        if self._console.is_terminal:
            self._bar = make_bar(self._console, MofNCompleteColumn())
            self._task = self._bar.add_task(self._title, total=self._total, figures="")
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(2.0)
        self.show()
        if self._bar is not None:
            self._bar.stop()

    def show(self) -> None:
        """Show the present state now."""
        state = self._read()
        seconds, finished = max(self._clock() - self._begin, 1e-9), state.done - state.failed
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, figures=figures(state, seconds))
        else:
            counts = f"{finished}/{self._total} trajectories, {state.tokens:,} tokens"
            say(self._console, f"{self._title}: {counts}, {figures(state, seconds)}")

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self.show()
            except Exception:  # a figure that cannot be shown must not end the rollout
                logger.debug("progress could not be shown", exc_info=True)


def figures(state: ProgressState, seconds: float) -> str:
    """`98.2 tokens/s, acceptance length 1.42, supply 2.10`, and the failures if there are any."""
    parts = [
        f"{state.tokens / seconds:.1f} tokens/s",
        f"acceptance length {state.acceptance_length:.2f}",
        f"supply {state.supply:.2f}",
    ]
    if state.failed:
        parts.append(f"{state.failed} failed")
    return ", ".join(parts)
