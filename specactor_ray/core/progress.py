"""Progress of long work: a bar with the remaining time on a terminal, lines at intervals elsewhere."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from specactor_ray.core.console import START_LOG, say

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_FIRST_LINE_S, _LINE_S = 3.0, 10.0
"""Seconds until the first line, and between lines."""
_WIDE = 120
"""Width of a console, in columns, with room for a long bar beside the figures."""


class Heartbeat:
    """Calls `beat` with the seconds since the start every `interval_s`, from a separate thread, until `stop` or the end
    of the `with` block. Errors of `beat` are logged and ignored."""

    def __init__(self, beat: Callable[[float], None], interval_s: float = 5.0) -> None:
        self._beat, self._interval_s, self._ended = beat, interval_s, threading.Event()
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
        begin = monotonic()
        while not self._ended.wait(self._interval_s):
            try:
                self._beat(monotonic() - begin)
            except Exception:  # a display error must not end the work
                logger.debug("progress could not be shown", exc_info=True)


@contextlib.contextmanager
def start_phase(what: str, note: str = "", interval_s: float = 5.0) -> Iterator[None]:
    """Log the present work of a start, with a note, when the block begins, and with the seconds until it ends."""
    log = logging.getLogger(START_LOG)
    log.info("%s%s", what, f": {note}" if note else "")
    with Heartbeat(lambda seconds: log.info("%s, %.0f s", what, seconds), interval_s):
        yield


class _FiguresColumn(TextColumn):
    """The figures of a task; of the columns of a bar the only one that a narrow terminal cuts."""

    def get_table_column(self) -> Column:
        return Column()

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class PhaseProgress:
    """Shows the progress of a phase; call `update` while the `with` block runs.

    Args:
        console: A bar if it is a terminal, else plain lines, one every 10 s, the first after 3 s.
        title: Name of the phase.
        total: Final value of `done`.
        poll: Called with this object twice a second, from a separate thread, and once at the end; it calls `update`.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: float,
        poll: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        self._console, self._title, self._total = console, title, max(total, 1e-9)
        self._first: float | None = None
        self._done, self._line = 0.0, ""
        self._moved_s = 0.0
        """Seconds at which `done` changed."""
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= _WIDE else 10),
            TaskProgressColumn(),
            _FiguresColumn(""),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=self._total, figures="")
        self._poll = poll
        self._polls = None if poll is None else Heartbeat(lambda _: poll(self), _POLL_S)

    def __enter__(self) -> PhaseProgress:
        self._begin = monotonic()
        self._next_line = self._begin + _FIRST_LINE_S
        self._bar.start()
        if self._polls is not None:
            self._polls.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._poll is not None and self._polls is not None:
            self._polls.stop()
            self._poll(self)
        self._bar.stop()
        if self._bar.disable and self._line:
            say(self._console, f"{self._line}, ended after {self.seconds:.0f} s")

    @property
    def seconds(self) -> float:
        """Seconds since the beginning of the phase."""
        return monotonic() - self._begin

    def rate_at(self, done: float) -> float:
        """`done` per second, without its value at the first update: a resumed phase begins in the middle."""
        return 0.0 if self._first is None else (done - self._first) / max(self.seconds, 1e-9)

    def update(self, done: float, figures: str, total: float | None = None) -> None:
        """Set the progress to `done` of `total`, which may change; `figures` describe its state."""
        self._total = total or self._total
        if self._first is None:
            self._first = 0.0 if done < self._total / 100 else done
        if min(done, self._total) != self._done:
            self._done, self._moved_s = min(done, self._total), self.seconds
        self._line = f"{self._title}: {self._done / self._total:.0%}, {figures}"
        self._bar.update(self._task, completed=self._done, total=self._total, figures=figures + self._time_left())
        if self._bar.disable and monotonic() >= self._next_line:
            self._next_line = monotonic() + _LINE_S
            say(self._console, self._line + self._time_left())

    def _time_left(self) -> str:
        """Estimate such as `, 1:05 left`; empty if there is none, and at the very end, where it would not change."""
        moved = self._done - (self._first or 0.0)
        if moved <= 0.0 or self._done >= 0.99 * self._total:
            return ""
        since = self.seconds - self._moved_s  # a long step does not raise the estimate
        seconds = round(max((self._total - self._done) * self._moved_s / moved - since, 0.0))
        return f", {seconds // 60}:{seconds % 60:02d} left"


def show_tokens(progress: PhaseProgress) -> Callable[[int], None]:
    """Callback for a phase that makes tokens, called with their number so far."""
    return lambda tokens: progress.update(tokens, f"{tokens:,} tokens, {progress.rate_at(tokens):.1f} tokens/s")


def rollout_progress(
    console: Console, title: str, total: int, read: Callable[[], tuple[int, int, int, float]]
) -> PhaseProgress:
    """Progress of a rollout of `total` trajectories. `read` returns how many have ended, how many of these failed, the
    output tokens so far and the acceptance length. Another thread calls it, so it must not change anything."""

    def show(progress: PhaseProgress) -> None:
        ended, failed, tokens, length = read()
        figures = (
            f"{ended - failed}/{total} trajectories, {tokens:,} tokens, "
            f"{tokens / max(progress.seconds, 1e-9):.1f} tokens/s, acceptance length {length:.2f}"
        )
        progress.update(ended - failed, figures + (f", {failed} failed" if failed else ""))

    return PhaseProgress(console, title, total, show)
