"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table


def faults_table(faults: Mapping[str, int]) -> Table:
    """How often each kind of fault struck, the most frequent first."""
    table = Table(title="faults that struck", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("kind")
    table.add_column("times", justify="right")
    for kind, times in sorted(faults.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(kind, f"{times:,}")
    return table
