"""Tables of a profile and of a plan, from the plain data that their JSON holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

_MOST_PER_REASON = 4


def cost_table(profile: Mapping[str, Any]) -> Table:
    """Milliseconds at the longest context: a row per thing measured, device count and window."""
    measured = [("verifying", profile["verify"])]
    measured += [(f"drafting, {method}", entry["points"]) for method, entry in profile["methods"].items()]
    batches = sorted({point["batch"] for _, points in measured for point in points})
    context = max(point["context"] for point in profile["verify"])
    table = _table(f"ms, context {context}", ("cost of", "devices", "window", *(f"batch {batch}" for batch in batches)))
    for name, points in measured:
        rows: dict[tuple[int, int], dict[int, float]] = {}
        for point in points:
            if point["context"] == context:
                rows.setdefault((point["devices"], point["window"]), {})[point["batch"]] = 1e3 * point["seconds"]
        for (devices, window), costs in sorted(rows.items()):
            cells = (f"{costs[batch]:.3g}" if batch in costs else "-" for batch in batches)
            table.add_row(name, str(devices), str(window) if name == "verifying" else "-", *cells)
    table.caption = "verifying: of a step; drafting: of one token of each request"
    return table


def acceptance_table(profile: Mapping[str, Any]) -> Table:
    """How often the first i draft tokens were right, per method."""
    depth = max((len(_survival(entry)) for entry in profile["methods"].values()), default=0)
    depths = [i for i in range(1, depth + 1) if i in (1, 2, 3, 4, 6, 8) or i == depth]
    table = _table("acceptance", ("method", "steps", "supply", "acc. rate", *(f"first {i}" for i in depths)))
    for method, entry in profile["methods"].items():
        found, survival = entry["acceptance"], _survival(entry)
        if found is None:
            continue
        cells = [f"{survival[i - 1]:.1%}" if i <= len(survival) else "-" for i in depths]
        figures = (str(found["steps"]), f"{found['supply']:.2f}", f"{found['acceptance_rate']:.1%}")
        table.add_row(method, *figures, *cells)
    table.caption = "first i: share of steps at which i draft tokens or more were there and right"
    return table


def prediction_table(plan: Mapping[str, Any]) -> Table:
    """The best window of every mode, method and layout, fastest first."""
    title = f"batch {plan['batch']} on {plan['devices']} device(s), context {plan['context']:.0f}"
    columns = ("mode", "method", "g_d", "g_v", "groups", "b", "window", "p", "D ms", "V ms", "tau", "TGS", "tokens/s")
    table = _table(title, columns)
    for row in plan["predictions"]:
        chosen = _place(row) == _place(plan["chosen"])
        table.add_row(
            *_layout(row),
            *(str(row[name]) for name in ("groups", "batch", "window")),
            f"{row['probability']:.2f}",
            f"{1e3 * row['draft_s']:.2f}",
            f"{1e3 * row['verify_s']:.1f}",
            f"{row['tokens_per_iteration']:.2f}",
            f"{row['tgs']:.2f}",
            f"{row['tokens_per_s']:.1f}" + ("*" if chosen else ""),
        )
    table.caption = (
        "* chosen. g_d, g_v: cores or GPUs of drafter and verifier; b: requests of a group; p: chance that a draft "
        "token is right; D: of one draft token; V: of one verify step; tau: tokens of a step and request; TGS: "
        "tokens/s of one request; tokens/s: of all groups together"
    )
    return table


def rejected_table(plan: Mapping[str, Any]) -> Table:
    """What was rejected and why, the best few of each kind of reason."""
    table = _table("rejected", ("mode", "method", "g_d", "g_v", "because", "in detail"))
    shown: Counter[str] = Counter()
    for row in plan["rejected"]:
        shown[row["kind"]] += 1
        if shown[row["kind"]] <= _MOST_PER_REASON:
            table.add_row(*_layout(row), row["kind"], Text(row["reason"]))
    left_out = {kind: count - _MOST_PER_REASON for kind, count in shown.items() if count > _MOST_PER_REASON}
    if left_out:
        table.caption = "not shown: " + ", ".join(f"{count} more {kind}" for kind, count in left_out.items())
    return table


def chosen_line(plan: Mapping[str, Any]) -> str:
    """The choice in one line, with the best of every other mode."""
    chosen = plan["chosen"]
    best: dict[str, float] = {}
    for row in plan["predictions"]:
        best.setdefault(row["mode"], row["tokens_per_s"])
    method = f" {chosen['method']}" if chosen["method"] else ""
    where = f"g_d={chosen['draft_devices']}, g_v={chosen['verify_devices']}, window {chosen['window']}"
    layout = f"{chosen['groups']} group(s) of {chosen['batch']}"
    speeds = ", ".join(f"{mode} {speed:.1f}" for mode, speed in best.items())
    return f"batch {plan['batch']}: {chosen['mode']}{method}, {where}, {layout}; predicted tokens/s: {speeds}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    for name in columns:
        text = name in ("cost of", "mode", "method", "because", "in detail")
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "in detail")
    return table


def _survival(entry: Mapping[str, Any]) -> list[float]:
    return entry["acceptance"]["survival"] if entry["acceptance"] else []


def _layout(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["mode"], row["method"] or "-", str(row["draft_devices"]), str(row["verify_devices"])


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("mode", "method", "draft_devices", "verify_devices", "window"))
