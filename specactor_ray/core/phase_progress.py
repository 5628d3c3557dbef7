"""Progress of a phase: a bar with the remaining time on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, TaskID, TaskProgressColumn

from specactor_ray.core.console import make_bar, say
from specactor_ray.core.heartbeat import Heartbeat

_POLL_S = 0.5


class PhaseProgress:
    """Shows the progress of a phase; call `update` while the `with` block runs.

    Args:
        console: A bar if it is a terminal, else plain lines, one every `line_interval_s`.
        title: Name of the phase.
        total: Final value of `done`.
        poll: Called with this object twice a second, from a separate thread, and once at the end; it calls `update`.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: float,
        line_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        poll: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        self._console, self._title, self._total = console, title, max(total, 1e-9)
        self._interval_s, self._clock = line_interval_s, clock
        self._begin = self._last_line = clock()
        self._first: float | None = None
        self._done, self._figures = 0.0, ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._poll = poll
        self._polls = None if poll is None else Heartbeat(lambda _: poll(self), _POLL_S)

    def __enter__(self) -> PhaseProgress:
        self._begin = self._last_line = self._clock()
        if self._console.is_terminal:
            self._bar = make_bar(self._console, TaskProgressColumn())
            self._task = self._bar.add_task(self._title, total=self._total, figures="")
            self._bar.start()
        if self._polls is not None:
            self._polls.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._poll is not None and self._polls is not None:
            self._polls.stop()
            self._poll(self)
        if self._bar is not None:
            self._bar.stop()
        elif self._first is not None:
            say(self._console, f"{self._line()} in {self.seconds:.0f} s")

    @property
    def seconds(self) -> float:
        """Seconds since the beginning of the phase."""
        return self._clock() - self._begin

    @property
    def rate(self) -> float:
        """`done` per second, without its value at the first update: a resumed phase begins in the middle."""
        return self.rate_at(self._done)

    def rate_at(self, done: float) -> float:
        """Rate at this value of `done`."""
        return 0.0 if self._first is None else (done - self._first) / max(self.seconds, 1e-9)

    def update(self, done: float, figures: str) -> None:
        """Set the progress to `done` of `total`; `figures` describe its state."""
        if self._first is None:
            self._first = 0.0 if done < self._total / 100 else done
        self._done, self._figures = min(done, self._total), figures
        if self._bar is not None:
            shown = f"{figures}, {self._left()} left" if self._left() else figures
            self._bar.update(self._task, completed=self._done, figures=shown)
        elif self._clock() - self._last_line >= self._interval_s:
            self._last_line = self._clock()
            left = f", {self._left()} left" if self._left() else ""
            say(self._console, self._line() + left)

    def _left(self) -> str:
        """Estimate of the remaining time; empty if there is none, and at the very end, where it would not change."""
        if self.rate <= 0.0 or self._done >= 0.99 * self._total:
            return ""
        seconds = round((self._total - self._done) / self.rate)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _line(self) -> str:
        return f"{self._title}: {self._done / self._total:.0%}, {self._figures}"


def show_tokens(progress: PhaseProgress) -> Callable[[int], None]:
    """Callback for a phase that makes tokens, called with their number so far."""

    def show(tokens: int) -> None:
        progress.update(tokens, f"{tokens:,} tokens, {progress.rate_at(tokens):.1f} tokens/s")

    return show


def show_steps(progress: PhaseProgress, total: int) -> Callable[[str], None]:
    """Callback for a phase of `total` counted steps, called after each with its description."""
    done = 0

    def show(what: str) -> None:
        nonlocal done
        done += 1
        progress.update(done, f"{done}/{total}, {what}")

    return show


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Progress of a rollout at one moment."""

    done: int = 0
    """Number of ended trajectories, including failed ones."""
    failed: int = 0
    tokens: int = 0
    """Number of output tokens so far."""
    acceptance_length: float = 0.0
    supply: float = 0.0


def rollout_progress(
    console: Console,
    title: str,
    total: int,
    read: Callable[[], ProgressState],
    line_interval_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> PhaseProgress:
    """Progress of a rollout of `total` trajectories. Another thread calls `read`, so it must not change anything."""

    def show(progress: PhaseProgress) -> None:
        state = read()
        finished = state.done - state.failed
        counts = f"{finished}/{total} trajectories, {state.tokens:,} tokens"
        progress.update(finished, f"{counts}, {figures(state, progress.seconds)}")

    return PhaseProgress(console, title, total, line_interval_s, clock, show)


def figures(state: ProgressState, seconds: float) -> str:
    """Figures such as `98.2 tokens/s, acceptance length 1.42, supply 2.10`, and the failures if there are any."""
    speed = f"{state.tokens / max(seconds, 1e-9):.1f} tokens/s"
    failures = f", {state.failed} failed" if state.failed else ""
    return f"{speed}, acceptance length {state.acceptance_length:.2f}, supply {state.supply:.2f}{failures}"
