"""Progress of work whose steps are counted: a bar on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specactor_ray.observability.console import say


class StepsProgress:
    """Shows how many of `total` steps are done, and the last of them.

    Args:
        console: Where to show it; a bar if it is a terminal, else plain lines.
        title: What runs.
        total: Steps in all.
        line_interval_s: Seconds between plain lines.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        line_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._title, self._total = console, title, total
        self._interval_s, self._clock = line_interval_s, clock
        self._done, self._said = 0, clock()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> StepsProgress:
        if self._console.is_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
            what = TextColumn("{task.fields[what]}", markup=False)
            self._bar = Progress(TextColumn("{task.description}", markup=False), *columns, what, console=self._console)
            self._task = self._bar.add_task(self._title, total=self._total, what="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """One more step, `what`, is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, what=what)
        elif self._clock() - self._said >= self._interval_s or self._done == self._total:
            self._said = self._clock()
            say(self._console, f"{self._title}: {self._done}/{self._total}, {what}")
