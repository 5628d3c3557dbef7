"""Acceptance by epoch of the rollouts of several `specactor bench train`, as one figure.

python scripts/history_plot.py sums=runs/SUMS/bench.json renames=runs/RENAMES/bench.json --output history.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from points import run_script
from specactor_ray.cli.bench_train_report import history_panels
from specactor_ray.core import plot
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json, read_foreign


def main(
    reports: Annotated[list[str], typer.Argument(metavar="TITLE=REPORT", help="A title, and bench.json of a run.")],
    output: Annotated[Path, typer.Option(help="The figure, which replaces an older one.")],
) -> None:
    """Draw acceptance and acceptance length by epoch, a row for each report."""
    panels = list[plot.Panel]()
    for item in reports:
        title, _, path = item.partition("=")
        try:
            panels += history_panels(parse_json(read_foreign(Path(path))), title)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{item}: {path or 'no file'} is no report of bench train ({error!r})") from None
    if (line := plot.write_plot(output, *panels, columns=2)).startswith("no plot"):
        raise InputError(f"--output: {line}")
    say(make_console(), line)


if __name__ == "__main__":
    run_script(main)
