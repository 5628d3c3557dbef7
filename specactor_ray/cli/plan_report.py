"""Tables of a profile, from the data of its file, and of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specactor_ray.core.console import make_table
from specactor_ray.plan.search import Plan


def cost_table(profile: Mapping[str, Any]) -> Table:
    """Milliseconds at the longest context: a row per measured item, device count and window."""
    measured = [("verifying", profile["verify"])]
    measured += [(f"drafting, {method}", entry["points"]) for method, entry in profile["methods"].items()]
    batches = sorted({point["batch"] for _, points in measured for point in points})
    context = max(point["context"] for point in profile["verify"])
    columns = ("cost of", "devices", "window", *(f"batch {batch}" for batch in batches))
    caption = "verifying: of a step; drafting: of one token of each request"
    table = make_table(columns, title=f"ms, context {context}", text=("cost of",), caption=caption)
    for name, points in measured:
        rows: dict[tuple[int, int], dict[int, float]] = {}
        for point in points:
            if point["context"] == context:
                rows.setdefault((point["devices"], point["window"]), {})[point["batch"]] = 1e3 * point["seconds"]
        for (devices, window), costs in sorted(rows.items()):
            cells = (f"{costs[batch]:.3g}" if batch in costs else "-" for batch in batches)
            table.add_row(name, str(devices), str(window) if name == "verifying" else "-", *cells)
    return table


def acceptance_table(profile: Mapping[str, Any]) -> Table:
    """Share of steps at which the first i draft tokens were right, per method."""
    depth = max((len(entry["acceptance"]["survival"]) for entry in profile["methods"].values()), default=0)
    depths = [i for i in range(1, depth + 1) if i in (1, 2, 3, 4, 6, 8) or i == depth]
    columns = ("method", "steps", "supply", "acc. rate", *(f"first {i}" for i in depths))
    caption = "first i: share of steps at which i draft tokens or more were there and right"
    table = make_table(columns, title="acceptance", text=("method",), caption=caption)
    for method, entry in profile["methods"].items():
        found, survival = entry["acceptance"], entry["acceptance"]["survival"]
        cells = [f"{survival[i - 1]:.1%}" if i <= len(survival) else "-" for i in depths]
        figures = (str(found["steps"]), f"{found['supply']:.2f}", f"{found['acceptance_rate']:.1%}")
        table.add_row(method, *figures, *cells)
    return table


def prediction_table(plan: Plan, shrinks: bool = False) -> Table:
    """The best window of every layout, fastest first. `shrinks`: speeds are those of a rollout whose requests end."""
    title = f"batch {plan.batch} on {plan.devices} device(s), context {plan.context:.0f}"
    columns = (
        "mode",
        "method",
        "n_v",
        "g_v",
        "n_d",
        "g_d",
        "b",
        "w",
        "p",
        "D ms",
        "V ms",
        "tau",
        "TGS",
        "tokens/s",
    )
    table = make_table(columns, title=title, text=("mode", "method"), collapse_padding=True, caption_justify="left")
    for row in plan.predictions:
        table.add_row(
            row.mode.value,
            row.method or "-",
            *(str(count) for count in (row.verifiers, row.verify_devices, row.drafters, row.draft_devices)),
            *(str(count) for count in (row.batch, row.window)),
            f"{row.probability:.2f}",
            f"{1e3 * row.draft_s:.2f}",
            f"{1e3 * row.verify_s:.1f}",
            f"{row.tokens_per_iteration:.2f}",
            f"{row.tgs:.2f}",
            f"{row.tokens_per_s:.1f}" + ("*" if row is plan.chosen else ""),
        )
    table.caption = (
        "* chosen. n_v, g_v: verifiers, and cores or GPUs of each; n_d, g_d: drafters with devices of their own; b: "
        "requests of a verifier; w: window; p: chance that a draft token is right; D: of one draft token; "
        "V: of one verify step; tau: tokens of a step and request; TGS: tokens/s of one request; "
        "tokens/s: of all requests" + ("; both: over the whole rollout, in which requests end" if shrinks else "")
    )
    return table
