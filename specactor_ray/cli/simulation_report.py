"""Tables, plots and timelines of simulations, made from the plain data of their reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specactor_ray.core.console import draw, make_table

if TYPE_CHECKING:
    from specactor_ray.simulation.world import Span

_SHARES = ("forward", "waiting", "protocol", "idle")


def speed_table(point: Mapping[str, Any]) -> Table:
    """Speed of each variant, and its ratio to the baseline."""
    results, device = point["results"], point["device"]
    has_steps, has_latency = (any(result[key] for result in results) for key in ("update_s", "latency_s"))
    columns = ["variant", "mode", f"{device}s", "drafting", "rollout s", "tokens/s", f"tokens/s/{device}", "x"]
    columns += [*(["latency s", "95%"] if has_latency else []), *(["RL step s"] if has_steps else [])]
    table = _table("speed", columns, text=("variant", "mode"))
    for result in results:
        name, ratio = result["variant"], _times(point["ratios"].get(result["variant"]))
        cells = [
            _count(result["devices"]),
            _count(result["draft_devices"]),
            f"{result['rollout_s']:,.2f}",
            f"{result['tokens_per_s']:,.0f}",
            f"{result['tokens_per_s_and_device']:,.1f}",
            f"{ratio}*" if name == point["baseline"] else ratio,
        ]
        if has_latency:
            latency = sorted(result["latency_s"])
            cells += [f"{fmean(latency):.2f}", f"{latency[int(0.95 * len(latency))]:.2f}"] if latency else ["-", "-"]
        if has_steps:
            cells.append(f"{result['rollout_s'] + result['update_s']:,.2f}")
        table.add_row(name, result["mode"], *cells)
    captions = [f"* baseline of x: tokens/s per {device}, drafting ones included."]
    captions += ["latency s: mean of the requests, and what 95% of them stay below."] if has_latency else []
    captions += ["RL step s: rollout and update."] if has_steps else []
    table.caption = "\n".join(captions)
    return table


def work_table(point: Mapping[str, Any]) -> Table:
    """Benefit of drafting, parts of the verifiers' time, and memory of drafters."""
    columns = ("variant", "acc. length", "supply", *_SHARES, "draft streams", "cache GB")
    table = _table("drafting, and time of the verifiers", columns, text=("variant",))
    for result in point["results"]:
        table.add_row(
            result["variant"],
            f"{result['acceptance_length']:.2f}",
            f"{result['supply']:.2f}",
            *(f"{result['shares'][name]:.1%}" for name in _SHARES),
            f"{result['peak_streams']:,}",
            f"{result['peak_stream_bytes'] / 1e9:.2f}",
        )
    table.caption = (
        "acc. length: tokens per request and verify step. supply: usable draft tokens per request and step.\n"
        "waiting: for drafts. protocol: Python between forwards. draft streams: most requests that drafters\n"
        "follow at once. cache GB: most that these take in the caches of the drafters."
    )
    return table


def speed_lines(point: Mapping[str, Any]) -> Iterator[str]:
    """Conclusions from the figures: the fastest variant per device, and the reason if a variant that drafts is slower
    than the baseline. Empty without a variant to compare."""
    baseline, device, ratios = point["baseline"], point["device"], point["ratios"]
    if len(ratios) < 2:
        return
    best = max(ratios, key=lambda name: ratios[name])
    faster = f": {ratios[best]:.2f} times {baseline}" if best != baseline else ""
    yield f"{best} is the fastest per {device}{faster}."
    for result in point["results"]:
        name, ratio = result["variant"], ratios[result["variant"]]
        share = result["draft_devices"] / result["devices"]
        if ratio < 1.0 and share:
            yield (
                f"{name} makes {ratio:.2f} of {baseline}: {share:.0%} of its {device}s draft. Those that verify are "
                f"{ratio / (1.0 - share):.2f} times as fast as those of {baseline}, and break even at "
                f"{1.0 / (1.0 - share):.2f}."
            )
        elif ratio < 1.0 < result["acceptance_length"]:
            yield (
                f"{name} makes {ratio:.2f} of {baseline}: {result['acceptance_length']:.2f} tokens per request and "
                "step do not make up for what its steps cost more."
            )


def sweep_table(report: Mapping[str, Any]) -> Table:
    """Tokens per second and device of each variant at each value, and the ratio to the first."""
    points = report["points"]
    device, baseline = points[0]["device"], points[0]["baseline"]
    names = points[0]["variants"]
    columns = [column for name in names for column in ((name,) if name == baseline else (name, "x"))]
    table = _table(f"tokens/s/{device} over {report['sweep']}", [report["sweep"], *columns], text=(report["sweep"],))
    for point in points:
        found = {result["variant"]: result["tokens_per_s_and_device"] for result in point["results"]}
        cells = []
        for name in names:
            cells.append(f"{found[name]:,.1f}" if name in found else "-")
            if name != baseline:
                cells.append(_times(point["ratios"].get(name)))
        table.add_row(point["value"], *cells)
    table.caption = f"x: relative to {baseline}; drafting {device}s are counted."
    return table


def validation_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Measured and simulated figures, side by side."""
    columns = ("backend", "batch", "layout", "measured tokens/s", "simulated", "error", "acc. length", "simulated")
    rows = (
        (
            *(point["backend"], str(point["batch"]), point["variant"]),
            *(f"{point['measured']:.1f}", f"{point['predicted']:.1f}", f"{point['error']:+.1%}"),
            *(f"{point['measured_length']:.2f}", f"{point['predicted_length']:.2f}"),
        )
        for point in points
    )
    text = ("backend", "layout")
    return make_table(columns, rows, "simulated against measured", text, wrap=True, title_justify="left")


def write_plot(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Write `sweep.png`, the ratios at each value, or `running.png`, the unfinished requests over time. Returns the
    name of the file; empty if matplotlib is not installed."""
    points = report["points"]

    def draw_ratios(axes: Any) -> None:
        for name in points[0]["variants"]:
            known = [(tick, point["ratios"][name]) for tick, point in enumerate(points) if name in point["ratios"]]
            axes.plot(*zip(*known, strict=True), "o-", label=name, markersize=4)
        axes.set_xticks(range(len(points)), [point["value"] for point in points], fontsize=8)
        axes.set(xlabel=report["sweep"], ylabel=f"times {points[0]['baseline']}, per {points[0]['device']}")
        axes.grid(alpha=0.3)

    def draw_running(axes: Any) -> None:
        for result in points[0]["results"]:
            ended = sorted(result["ended_s"])
            axes.step([0.0, *ended], range(len(ended), -1, -1), where="post", label=result["variant"])
        axes.set(xlabel="seconds", ylabel="unfinished requests", xlim=(0, None), ylim=(0, None))

    name, plot, size = ("sweep.png", draw_ratios, (7, 4)) if report["sweep"] else ("running.png", draw_running, (8, 4))
    return [name] if draw(folder / name, plot, size=size) else []


def timeline_file(variant: str) -> str:
    """Name of a variant's timeline."""
    name = re.sub(r"[^-.\w]", "_", variant)
    return f"trace-{name}.json"


def timeline(variant: str, spans: Sequence[Span]) -> dict[str, Any]:
    """A timeline in the Trace Event Format, which Perfetto and chrome://tracing open: a row per actor."""
    verifiers = {span.actor for span in spans if span.what == "verify"}
    events: list[dict[str, Any]] = []
    places: dict[str, dict[str, int]] = {}
    for number, actor in enumerate(sorted({span.actor for span in spans}, key=_natural), start=1):
        place = places[actor] = {"pid": 1 if actor in verifiers else 2, "tid": number}
        group = "verifiers" if actor in verifiers else "drafters"
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": group}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": actor}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
    for span in sorted(spans, key=lambda span: span.begin):
        # Whole nanoseconds: spans that touch do not overlap in the file.
        begin, end = round(1e9 * span.begin), round(1e9 * span.end)
        event = {"ph": "X", "name": span.what, **places[span.actor], "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        events.append({**event, "args": {"rows": span.rows, "positions": span.positions}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"variant": variant}}


def _natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts `verifier-2` before `verifier-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _table(title: str, columns: Sequence[str], text: Sequence[str]) -> Table:
    return make_table(columns, title=title, text=text, title_justify="left", caption_justify="left")


def _count(devices: float) -> str:
    return f"{devices:,.0f}" if devices == int(devices) else f"{devices:,.2f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
