"""The figures of a check as text, for the end of a terminal's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

Figures = Mapping[str, Any]


def tables(data: Figures) -> str:
    """All tables of the stages that have figures, and how each stage ended."""
    blocks = [_block("stages", ("stage", "status", "seconds", ""), _statuses(data["stages"]))]
    for name, (title, header, rows) in _TABLES.items():
        figures = data["stages"].get(name, {}).get("figures", {})
        lines = list(rows(figures)) if figures else []
        if lines:
            blocks.append(_block(title, header, lines))
    return "\n\n".join(blocks)


def _block(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title and columns: the first to the left, the others to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in table)
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _statuses(stages: Mapping[str, Figures]) -> list[list[str]]:
    return [
        [name, entry["status"], f"{entry['seconds']:.1f}", entry["error"].split("\n")[0][:80]]
        for name, entry in stages.items()
    ]


def _hardware(figures: Figures) -> Iterator[list[str]]:
    for name in ("copy_gb_per_s", "matmul_tflop_per_s", "launch_us", "to_host_us", "memory_gb"):
        if name in figures:
            yield [name, f"{figures[name]:.4g}"]


def _forwards(figures: Figures) -> Iterator[list[str]]:
    """A line per shape, context and rows: graph times by positions, or eager ones where there is no graph."""
    for name, shape in figures["shapes"].items():
        kind = "graph" if shape["graph"] else "eager"
        seconds = {tuple(point[:3]): point[3] for point in shape[kind]}
        eager = {tuple(point[:3]): point[3] for point in shape["eager"]}
        for context, rows in dict.fromkeys((point[2], point[0]) for point in shape["eager"]):
            by_positions = {p: s for (r, p, c), s in seconds.items() if (r, c) == (rows, context)}
            cells = ", ".join(f"{positions}: {1e3 * s:.2f}" for positions, s in by_positions.items())
            first = min(p for r, p, c in eager if (r, c) == (rows, context))
            yield [name, str(context), str(rows), f"{1e3 * eager[rows, first, context]:.2f}", kind, cells]


def _costs(figures: Figures, names: Sequence[str]) -> Iterator[list[str]]:
    """A line per number of rows: milliseconds, then peak memory of each name."""
    for point in figures["points"]:
        costs = [point.get(name, {}) for name in names]
        cells = [f"{cost['ms']:.3g}" if "ms" in cost else cost.get("error", "-") for cost in costs]
        yield [str(point["rows"]), *cells, *(f"{cost['peak_gb']:.2f}" if "peak_gb" in cost else "-" for cost in costs)]


def _flips(figures: Figures) -> Iterator[list[str]]:
    for way in figures["ways"]:
        cells = []
        for temperature in ("1.0", "0.0"):
            found = way[temperature]
            cells += [
                f"{found['flips_per_1000']:.2f}",
                f"{found['margin_max']:.4f}" if "margin_max" in found else "-",
            ]
        yield [str(way["batch"]), str(way["length"]), *cells]


def _steps(figures: Figures) -> Iterator[list[str]]:
    for point in figures["steps"]:
        names = ("ms", "synchronized_ms", "forward_ms", "sampling_ms", "python_ms")
        cells = [f"{point[name]:.2f}" if name in point else "-" for name in names]
        yield [point["shape"], str(point["rows"]), str(point["drafts"]), *cells]


def _runs(figures: Figures) -> Iterator[list[str]]:
    for run in figures["runs"]:
        yield [
            run["mode"],
            run["dtype"],
            str(run["batch"]),
            "-" if run["accuracy"] is None else f"{run['accuracy']:g}",
            f"{run['tokens_per_s']:.1f}",
            f"{run['ratio_to_plain']:.2f}",
            f"{run['acceptance_length']:.2f}",
            str(run["different_requests"]),
        ]


_SAMPLER, _TRITON = ("T=1", "T=0", "softmax"), ("T=1", "T=0", "top-p 0.95", "torch")
_TABLES: dict[str, tuple[str, Sequence[str], Callable[[Figures], Iterator[list[str]]]]] = {
    "hardware": ("the device", ("", ""), _hardware),
    "forwards": (
        "a forward, ms (context: tokens of each row; positions: new ones of each row)",
        ("shape", "context", "rows", "eager, 1 position", "", "by positions"),
        _forwards,
    ),
    "sampler": (
        "the keyed sampler, ms and peak GB",
        ("rows", *_SAMPLER, *(f"{name} GB" for name in _SAMPLER)),
        partial(_costs, names=_SAMPLER),
    ),
    "triton": (
        "the sampler's Triton kernels alone, and its torch form: ms and peak GB",
        ("rows", *_TRITON, *(f"{name} GB" for name in _TRITON)),
        partial(_costs, names=_TRITON),
    ),
    "flips": (
        "tokens flipped per 1,000 against batch 1, length 1; largest margin of a flip",
        ("batch", "length", "T=1", "margin", "T=0", "margin"),
        _flips,
    ),
    "engine": (
        "a step of the hf engine, ms; split: with a wait for the device after the forward",
        ("shape", "rows", "drafts", "step", "split step", "forward", "sampling", "Python"),
        _steps,
    ),
    "end_to_end": (
        "rollouts in one process, oracle drafter",
        ("mode", "dtype", "batch", "accuracy", "tokens/s", "to plain", "tokens/row/step", "requests that differ"),
        _runs,
    ),
}
