"""The report of a training run: `report.md`, with plots beside it if matplotlib is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.core.console import draw

logger = logging.getLogger(__name__)

REPORT_FILE = "report.md"
_PHASES = ("rollout", "reward", "update", "sync", "checkpoint")
_MOST_ROWS = 25


def write_report(folder: Path, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Write the report of the steps in `records`."""
    plots = _write_plots(folder, records) if records else []
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
    lines += ["| phase | seconds | share |", "|---|---|---|"]
    whole = max(seconds["step"], 1e-9)
    lines += [f"| {phase} | {seconds[phase]:.1f} | {100 * seconds[phase] / whole:.1f}% |" for phase in _PHASES]
    lines += [f"| in all | {seconds['step']:.1f} | |", ""]
    lines += [f"![{name}]({name})" for name in plots]
    lines += ["", *_steps_table(records), "", *_drafts_table(totals["drafters"])]
    hardware = ", ".join(f"{name} {value}" for name, value in summary["hardware"].items())
    packages = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    lines += [f"Machine: {hardware}.", "", f"Packages: {packages}.", ""]
    (folder / REPORT_FILE).write_text("\n".join(lines), encoding="utf-8")


def _steps_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """All steps, or an evenly spaced selection that includes the last one."""
    stride = -(-len(records) // _MOST_ROWS) or 1
    chosen = [record for index, record in enumerate(records) if index % stride == 0 or index == len(records) - 1]
    lines = [
        "| step | reward | pass | length | entropy | loss | grad norm | logprob gap | tokens/s | acceptance length |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in chosen:
        train, speed = record["train"], record["speed"]
        lines.append(
            f"| {record['step']} | {train['reward_mean']:.4f} | {100 * train['pass_rate']:.1f}% "
            f"| {train['length_mean']:.1f} | {train['entropy']:.3f} | {train['loss']:.5f} | {train['grad_norm']:.4f} "
            f"| {record['gap']['mean']:.2e} | {speed['tokens_per_s']:.1f} | {speed['acceptance_length']:.2f} |"
        )
    return lines


def _drafts_table(drafters: Mapping[str, Sequence[int]]) -> list[str]:
    """Acceptance by draft method."""
    lines = ["| drafter | drafted | accepted | acceptance |", "|---|---|---|---|"]
    lines += [
        f"| {method} | {drafted} | {right} | {100 * right / drafted:.1f}% |"
        for method, (drafted, right) in drafters.items()
        if drafted
    ]
    return [*lines, ""] if drafters else []


def _write_plots(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the plots; returns their names, empty if matplotlib is not installed."""
    steps = [record["step"] for record in records]
    rewards = {"mean reward": ("train", "reward_mean"), "pass rate": ("train", "pass_rate")}
    tokens = {"acceptance length": ("speed", "acceptance_length"), "supply": ("speed", "supply")}

    def draw_lines(axes: Any, label: str, series: Mapping[str, tuple[str, str]]) -> None:
        for title, (section, key) in series.items():
            axes.plot(steps, [record[section][key] for record in records], label=title)
        axes.set(xlabel="step", ylabel=label)

    def draw_phases(axes: Any) -> None:
        axes.stackplot(steps, *([r["seconds"].get(p, 0.0) for r in records] for p in _PHASES), labels=_PHASES)
        axes.set(xlabel="step", ylabel="seconds per step")

    plots: dict[str, Callable[[Any], None]] = {
        "reward.png": lambda axes: draw_lines(axes, "reward", rewards),
        "phases.png": draw_phases,
        "acceptance.png": lambda axes: draw_lines(axes, "tokens per request and step", tokens),
    }
    written = [name for name, plot in plots.items() if draw(folder / name, plot)]
    if not written:
        logger.info("matplotlib is not installed; the report has no plots")
    return written
