"""A training run for its readers: a line per step, and the present work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specactor_ray.core.console import say
from specactor_ray.core.progress import Heartbeat

PHASES = ("rollout", "reward", "update", "sync", "checkpoint")
Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""Name of the column, and function from a step's record to its cell."""
ALL_COLUMNS: Sequence[Column] = (
    ("step", lambda r: str(r["step"])),
    ("reward", lambda r: f"{r['train']['reward_mean']:.3f} ±{r['train']['reward_std']:.2f}"),
    ("pass", lambda r: f"{100 * r['train']['pass_rate']:.0f}%"),
    ("length", lambda r: f"{r['train']['length_mean']:.1f}"),
    ("turns", lambda r: f"{r['train']['turns_mean']:.1f}" if "turns_mean" in r["train"] else "-"),
    ("kl", lambda r: f"{r['train']['kl']:.4f}" if "kl" in r["train"] else "-"),
    ("entropy", lambda r: f"{r['train']['entropy']:.3f}"),
    ("loss", lambda r: f"{r['train']['loss']:.4f}"),
    ("grad", lambda r: f"{r['train']['grad_norm']:.3f}"),
    ("tok/s", lambda r: f"{r['speed']['tokens_per_s']:.0f}"),
    ("acc. length", lambda r: f"{r['speed']['acceptance_length']:.2f}"),
    ("drafters", lambda r: _drafters(r["speed"]["by_method"])),
    ("rollout", lambda r: f"{r['seconds']['rollout']:.1f}s"),
    ("update", lambda r: f"{r['seconds']['update']:.1f}s"),
    ("sync", lambda r: f"{r['seconds']['sync']:.2f}s"),
    ("share", lambda r: f"{100 * r['speed']['rollout_share']:.0f}%"),
)


class TrainingDisplay:
    """Shows a line with the `columns` of each step, its number first. In between it shows the present work: on a
    terminal all the time, elsewhere every `line_interval_s` seconds."""

    def __init__(
        self,
        console: Console,
        steps: int,
        columns: Sequence[Column] = ALL_COLUMNS,
        line_interval_s: float = 10.0,
    ) -> None:
        self.rollout_progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Number of ended trajectories of the present step, and its total."""
        self._console, self._steps, self._columns = console, steps, columns
        self._step, self._phase, self._since = 0, "starting Ray, verifiers and trainer", time.monotonic()
        self._live: Live | Heartbeat
        if console.is_terminal:
            self._live = Live(get_renderable=lambda: Text(self.doing()), console=console, transient=True)
        else:
            self._live = Heartbeat(lambda _: say(console, self.doing()), line_interval_s)

    def __enter__(self) -> TrainingDisplay:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the display. Idempotent."""
        self._live.stop()

    def begin(self, step: int) -> None:
        self._step = step

    def phase(self, phase: str) -> None:
        """Begin a phase of the step."""
        self._phase, self._since = phase, time.monotonic()

    def end(self, record: Mapping[str, Any]) -> None:
        """Show a finished step."""
        cells = ", ".join(f"{name} {show(record)}" for name, show in self._columns[1:])
        say(self._console, f"step {record['step']}/{self._steps}: {cells}")

    def doing(self) -> str:
        """The present work, such as `step 2/30: rollout 12/32, 8 s`."""
        done, total = self.rollout_progress()
        count = f" {done}/{total}" if self._phase == "rollout" and total else ""
        step = f"step {self._step}/{self._steps}: " if self._step else ""
        return f"{step}{self._phase}{count}, {time.monotonic() - self._since:.0f} s"


def _drafters(by_method: Mapping[str, Any]) -> str:
    """The acceptance rate of each method, such as `ngram 41%`."""
    used = {method: accepted / drafted for method, (drafted, accepted) in by_method.items() if drafted}
    return " ".join(f"{method} {100 * rate:.0f}%" for method, rate in used.items()) or "-"
