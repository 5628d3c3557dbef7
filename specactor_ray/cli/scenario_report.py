"""Tables, plots and traces of simulated scenarios, made from the plain data in `report.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from specactor_ray.core.console import draw, make_table

_SHARES = ("forward", "waiting", "protocol", "idle")
_COLORS = {
    "forward": "tab:blue",
    "waiting": "tab:orange",
    "protocol": "tab:green",
    "idle": "lightgray",
    "update": "tab:purple",
    "sync": "tab:brown",
}
"""Colours of the phases, from the bottom to the top."""
_ROUNDING_NS = 10
"""Largest apparent overlap of two consecutive spans of one actor, in nanoseconds."""


def scenario_speed_table(report: Mapping[str, Any]) -> Table:
    """Speed of each variant, and ratios to others."""
    results, device = report["results"], report["device"]
    has_steps = any(step["update_s"] or step["sync_s"] for result in results for step in result["steps"])
    columns = ["variant", "mode", f"{device}s", "drafting", "rollout s", "tokens/s", f"tokens/s/{device}", "x"]
    latencies = [
        sorted(second for step in result["steps"] for second in step.get("latency_s", ())) for result in results
    ]
    columns += ["latency s", "95%"] if any(latencies) else []
    columns += [*(["RL step s"] if has_steps else []), *(["of oracle"] if report["of_oracle"] else [])]
    table = _table("speed", columns, text=("variant", "mode"))
    for result, latency in zip(results, latencies, strict=True):
        name = result["variant"]
        cells = [
            _count(result["devices"]),
            _count(result["draft_devices"]),
            f"{result['rollout_s']:,.2f}",
            f"{result['tokens_per_s']:,.0f}",
            f"{result['tokens_per_s_and_device']:,.1f}",
            _times(report["ratios"].get(name)) + ("*" if name == report["baseline"] else ""),
        ]
        if any(latencies):
            seconds = [fmean(latency), latency[int(0.95 * len(latency))]] if latency else []
            cells += [f"{one:.2f}" for one in seconds] or ["-", "-"]
        if has_steps:
            cells.append(f"{sum(result['step_s']) / max(len(result['step_s']), 1):,.2f}")
        if report["of_oracle"]:
            cells.append(_share(report["of_oracle"].get(name)))
        table.add_row(name, result["mode"], *cells)
    table.caption = f"* baseline of x: tokens/s per {device}, drafting ones included. rollout s: all RL steps."
    if any(latencies):
        table.caption = f"{table.caption}\nlatency s: mean of the requests, and what 95% of them stay below."
    if has_steps:
        table.caption = f"{table.caption}\nRL step s: mean of rollout, update and weight sync."
    return table


def _count(devices: float) -> str:
    return f"{devices:,.0f}" if devices == int(devices) else f"{devices:,.2f}"


def scenario_work_table(report: Mapping[str, Any]) -> Table:
    """Benefit of drafting, parts of the verifiers' time, and memory of drafters."""
    columns = ("variant", "acc. length", "supply", *_SHARES, "draft streams", "cache GB")
    table = _table("drafting, and time of the verifiers", columns, text=("variant",))
    for result in report["results"]:
        table.add_row(
            result["variant"],
            f"{result['acceptance_length']:.2f}",
            f"{result['supply']:.2f}",
            *(_share(result["shares"][name]) for name in _SHARES),
            f"{result['peak_streams']:,}",
            f"{result['peak_stream_bytes'] / 1e9:.2f}",
        )
    table.caption = (
        "acc. length: tokens per request and verify step. supply: usable draft tokens per request and step.\n"
        "waiting: for drafts. protocol: Python between forwards. draft streams: most requests that drafters\n"
        "follow at once. cache GB: most that these take in the caches of the drafters."
    )
    return table


def verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Conclusions from the figures: the fastest variant per device, and the reason if a variant that drafts is slower
    than the baseline. Empty without a variant to compare."""
    baseline, device, ratios = report["baseline"], report["device"], report["ratios"]
    variants = [r for r in report["results"] if r["variant"] in report["variants"] and ratios.get(r["variant"])]
    if len(variants) < 2 or baseline not in {one["variant"] for one in variants}:
        return
    best = max(variants, key=lambda one: ratios[one["variant"]])["variant"]
    yield (
        f"{baseline} is the fastest per {device}."
        if best == baseline
        else f"{best} is the fastest per {device}: {ratios[best]:.2f} times {baseline}."
    )
    for one in variants:
        name, ratio = one["variant"], ratios[one["variant"]]
        share = one["draft_devices"] / one["devices"]
        if ratio >= 1.0:
            continue
        if share:
            yield (
                f"{name} makes {ratio:.2f} of {baseline}: {share:.0%} of its {device}s draft. Those that verify are "
                f"{ratio / (1.0 - share):.2f} times as fast as those of {baseline}, and break even at "
                f"{1.0 / (1.0 - share):.2f}."
            )
        elif one["acceptance_length"] > 1.0:
            yield (
                f"{name} makes {ratio:.2f} of {baseline}: {one['acceptance_length']:.2f} tokens per request and step "
                "do not make up for what its steps cost more."
            )


def sweep_table(report: Mapping[str, Any]) -> Table:
    """Tokens per second and device of each variant at each value, and the ratio to the first."""
    points = report["points"]
    device, baseline = points[0]["device"], points[0]["baseline"]
    names = list(dict.fromkeys(result["variant"] for point in points for result in point["results"]))
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


def write_sweep_plot(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Write `sweep.png`: the speed of each variant relative to the first one. Returns as `write_plots`."""
    points = report["points"]
    values = [_number(point["value"]) for point in points]
    ticks = list(range(len(points)))

    def draw_ratios(axes: Any) -> None:
        for name in dict.fromkeys(name for point in points for name in point["ratios"]):
            known = [(tick, point["ratios"][name]) for tick, point in enumerate(points) if name in point["ratios"]]
            style = "k--" if name == "oracle" else "o-"
            axes.plot([tick for tick, _ in known], [ratio for _, ratio in known], style, label=name, markersize=4)
        axes.set_xticks(ticks, [f"{value:g}" if isinstance(value, float) else value for value in values], fontsize=8)
        axes.set(xlabel=report["sweep"], ylabel=f"times {points[0]['baseline']}, per {points[0]['device']}")
        axes.grid(alpha=0.3)

    return ["sweep.png"] if draw(folder / "sweep.png", draw_ratios, size=(7, 4)) else []


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def write_plots(folder: Path, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write `running.png` and `phases.png`. Returns their names; empty if matplotlib is not installed."""
    plots = {"running.png": _draw_running, "phases.png": _draw_phases}
    return [name for name, plot in plots.items() if draw(folder / name, partial(plot, results=results), size=(8, 4))]


def _draw_running(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    for result in results:
        axes.step(*running_over_time(result["steps"]), where="post", label=result["variant"])
    axes.set(xlabel="seconds", ylabel="unfinished requests", xlim=(0, None), ylim=(0, None))


def running_over_time(steps: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Times at which the number of unfinished requests changes, over all RL steps, and its values from then on."""
    times, counts, begin = list[float](), list[int](), 0.0
    for step in steps:
        ended = sorted(step["ended_s"])
        times += [begin, *(begin + second for second in ended)]
        counts += range(len(ended), -1, -1)
        begin += step["rollout_s"] + step["update_s"] + step["sync_s"]
    return times, counts


def _draw_phases(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    names = [result["variant"] for result in results]
    bottom = [0.0] * len(results)
    phases = [phase_seconds(result) for result in results]
    for phase, color in _COLORS.items():
        seconds = [one[phase] for one in phases]
        if any(seconds):
            axes.bar(names, seconds, bottom=bottom, label=phase, color=color, width=0.6)
            bottom = [below + second for below, second in zip(bottom, seconds, strict=True)]
    axes.set(ylabel="seconds per verifier")


def phase_seconds(result: Mapping[str, Any]) -> dict[str, float]:
    """Phase → seconds: of the rollouts as the average of the verifiers, of updates and weight syncs."""
    rollout = {name: result["shares"][name] * result["rollout_s"] for name in _SHARES}
    others = {name: sum(step[f"{name}_s"] for step in result["steps"]) for name in ("update", "sync")}
    return {**rollout, **others}


def trace_file(variant: str) -> str:
    """Name of a variant's trace."""
    safe = re.sub(r"[^-.\w]", "_", variant)
    return f"trace-{safe}.json"


def chrome_trace(variant: str, spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A timeline in the Trace Event Format, which Perfetto and chrome://tracing open, of spans with `actor`, `what`,
    `begin`, `end` (seconds), `rows` and `positions`."""
    verifiers = {span["actor"] for span in spans if span["what"] == "verify"}
    actors = sorted({span["actor"] for span in spans}, key=_natural)
    thread = {actor: number for number, actor in enumerate(actors, start=1)}
    process = {actor: 1 if actor in verifiers else 2 for actor in actors}
    events: list[dict[str, Any]] = []
    for number, name in ((1, "verifiers"), (2, "drafters")):
        if number in process.values():
            events.append(_metadata("process_name", number, 0, {"name": name}))
            events.append(_metadata("process_sort_index", number, 0, {"sort_index": number}))
    for actor in actors:
        events.append(_metadata("thread_name", process[actor], thread[actor], {"name": actor}))
        events.append(_metadata("thread_sort_index", process[actor], thread[actor], {"sort_index": thread[actor]}))
    done_ns = dict.fromkeys(actors, 0)
    timeline: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: (span["begin"], span["end"])):
        actor, begin, end = span["actor"], round(span["begin"] * 1e9), round(span["end"] * 1e9)
        if 0 < done_ns[actor] - begin <= _ROUNDING_NS:
            begin = done_ns[actor]
        done_ns[actor] = end = max(begin, end)
        event = {"name": span["what"], "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        arguments = {"rows": span["rows"], "positions": span["positions"]}
        timeline.append({**event, "pid": process[actor], "tid": thread[actor], "args": arguments})
    events += sorted(timeline, key=lambda event: (event["ts"], event["tid"]))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"variant": variant}}


def _metadata(name: str, process: int, thread: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(arguments)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts `verifier-2` before `verifier-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _table(title: str, columns: Sequence[str], text: Sequence[str]) -> Table:
    return make_table(columns, title=title, text=text, title_justify="left", caption_justify="left")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
