"""Training on the terminal: a live table of the last steps, or a line a step where there is no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specactor_ray.observability.console import say

_ROWS = 12
_COLUMNS = (
    ("step", lambda r: str(r["step"])),
    ("reward", lambda r: f"{r['train']['reward_mean']:.3f} ±{r['train']['reward_std']:.2f}"),
    ("pass", lambda r: f"{100 * r['train']['pass_rate']:.0f}%"),
    ("length", lambda r: f"{r['train']['length_mean']:.1f}"),
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
    """Shows the steps of a run.

    Args:
        console: Where; a table that is redrawn if it is a terminal, else plain lines.
        steps: Steps of the whole run.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_ROWS)
        self._doing = "starting"
        self._live: Live | None = None

    def start(self) -> None:
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def stop(self) -> None:
        """Harmless when repeated."""
        if self._live is not None:
            self._doing = "done"
            self._live.update(self._view())
            self._live.stop()
            self._live = None

    def begin(self, step: int) -> None:
        self._doing = f"step {step}/{self._steps}"

    def phase(self, phase: str) -> None:
        """Say what is going on."""
        self._doing = f"{self._doing.partition(':')[0]}: {phase}"
        if self._live is not None:
            self._live.update(self._view())

    def end(self, record: Mapping[str, Any]) -> None:
        """A step is done."""
        self._rows.append(record)
        if self._live is not None:
            self._live.update(self._view())
            return
        cells = ", ".join(f"{name} {show(record)}" for name, show in _COLUMNS[1:])
        say(self._console, f"step {record['step']}/{self._steps}: {cells}")

    def _view(self) -> Group:
        return Group(steps_table(list(self._rows)), Text(self._doing))


def steps_table(records: list[Mapping[str, Any]]) -> Table:
    """A row a step."""
    table = Table(box=SIMPLE_HEAD)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(*(show(record) for _, show in _COLUMNS))
    return table


def _drafters(by_method: Mapping[str, Any]) -> str:
    """`ngram 41%`: the acceptance rate of each method."""
    used = {method: accepted / drafted for method, (drafted, accepted) in by_method.items() if drafted}
    return " ".join(f"{method} {100 * rate:.0f}%" for method, rate in used.items()) or "-"
