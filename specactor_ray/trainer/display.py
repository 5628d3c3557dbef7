"""A training run for its readers: a live table of the last steps on a terminal, or lines at intervals; at the end
`report.md`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specactor_ray.core.console import make_table, say
from specactor_ray.core.progress import Heartbeat

PHASES = ("rollout", "reward", "update", "sync", "checkpoint")
REPORT_FILE = "report.md"
_MOST_ROWS = 25
"""Most rows of the report's table of steps."""
Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""Name of the column, and function from a step's record to its cell."""
_ROWS = 12
"""Rows of the live table."""
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

_LEFT_OUT = ("kl", "turns", "share", "sync", "grad", "entropy", "update", "loss", "rollout", "drafters", "length")
"""Columns to leave out of a live table that is wider than the terminal, in this order."""


class TrainingDisplay:
    """Shows the steps of a run: `columns` of each, its number first. `line_interval_s` is the time between lines within
    a step, if there is no terminal."""

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
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_ROWS)
        self._step, self._phase, self._since = 0, "starting Ray, verifiers and trainer", 0.0
        self._live: Live | None = None
        self._lines = Heartbeat(lambda _: say(self._console, self.doing()), line_interval_s)

    def __enter__(self) -> TrainingDisplay:
        self._since = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the display. Idempotent."""
        self._lines.stop()
        if self._live is not None:
            self._phase = "done"
            self._live.stop()
            self._live = None

    def begin(self, step: int) -> None:
        self._step = step

    def phase(self, phase: str) -> None:
        """Begin a phase of the step."""
        self._phase, self._since = phase, time.monotonic()

    def end(self, record: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self._rows.append(record)
        if self._live is None:
            cells = ", ".join(f"{name} {show(record)}" for name, show in self._columns[1:])
            say(self._console, f"step {record['step']}/{self._steps}: {cells}")

    def doing(self) -> str:
        """The present work, such as `step 2/30: rollout 12/32, 8 s`."""
        if self._phase == "done":
            return self._phase
        done, total = self.rollout_progress()
        count = f" {done}/{total}" if self._phase == "rollout" and total else ""
        step = f"step {self._step}/{self._steps}: " if self._step else ""
        return f"{step}{self._phase}{count}, {time.monotonic() - self._since:.0f} s"

    def _view(self) -> Group:
        return Group(self._table(), Text(self.doing()))

    def _table(self) -> Table:
        """Table of the columns that fit the terminal."""
        columns, unbounded = self._columns, self._console.options.update(width=1000)
        for name in ("", *_LEFT_OUT):
            columns = [column for column in columns if column[0] != name]
            cells = ([show(record) for _, show in columns] for record in self._rows)
            table = make_table((name for name, _ in columns), cells)
            if self._console.measure(table, options=unbounded).maximum <= self._console.width:
                break
        return table


def _drafters(by_method: Mapping[str, Any]) -> str:
    """The acceptance rate of each method, such as `ngram 41%`."""
    used = {method: accepted / drafted for method, (drafted, accepted) in by_method.items() if drafted}
    return " ".join(f"{method} {100 * rate:.0f}%" for method, rate in used.items()) or "-"


# ---- the report ----


def write_report(folder: Path, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Write the report of the steps in `records`."""
    config, totals = summary["config"], summary["totals"]
    seconds = totals["seconds"]
    lines = [
        f"# Training run {summary['run']} ({summary['status']})",
        "",
        f"{config['algorithm']['name']} on `{config['data']['path']}`, model `{config['target']['model']}`, "
        f"mode {config['mode']}; {summary['steps']} steps.",
        "",
    ]
    if summary["error"]:
        lines += [f"Ended by an error: {summary['error']}", ""]
    if summary["fallbacks"]:
        lines += [f"Fallbacks: {'; '.join(summary['fallbacks'])}", ""]
    whole = max(seconds["step"], 1e-9)
    shares = [(phase, f"{seconds[phase]:.1f}", f"{100 * seconds[phase] / whole:.1f}%") for phase in PHASES]
    lines += _markdown(("phase", "seconds", "share"), [*shares, ("in all", f"{seconds['step']:.1f}", "")])
    stride = -(-len(records) // _MOST_ROWS) or 1
    chosen = [record for index, record in enumerate(records) if index % stride == 0 or index == len(records) - 1]
    lines += _markdown([name for name, _ in ALL_COLUMNS], [[show(one) for _, show in ALL_COLUMNS] for one in chosen])
    drafts = [(method, drafted, right) for method, (drafted, right) in totals["drafters"].items() if drafted]
    if drafts:
        rows = [
            (method, str(drafted), str(right), f"{100 * right / drafted:.1f}%") for method, drafted, right in drafts
        ]
        lines += _markdown(("drafter", "drafted", "accepted", "acceptance"), rows)
    hardware = ", ".join(f"{name} {value}" for name, value in summary["hardware"].items())
    packages = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    lines += [f"Machine: {hardware}.", "", f"Packages: {packages}.", ""]
    (folder / REPORT_FILE).write_text("\n".join(lines), encoding="utf-8")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, with an empty one after it."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)] + [""]
