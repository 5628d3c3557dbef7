#!/usr/bin/env python
"""Predicted against measured steps of vLLM on H100, and a fit of the shares of a device to them.

    python scripts/calibrate.py          # the shipped figures: conf/simulation/hardware/h100.yaml, h100_94gb.yaml
    python scripts/calibrate.py --fit    # fit them again to concurrencies 1, 4, 16 and 64; the others are held out

The points are those of tests/unit/simulation/h100_steps.yaml, nine more of Qwen3-32B, and a regression of Llama-3.1-8B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import yaml

from points import run_script
from specactor_ray.core.console import make_console, make_table
from specactor_ray.plan.hardware import DeviceSpec, RooflineCost, find_model, load_hardware

FILE = Path(__file__).parents[1] / "tests" / "unit" / "simulation" / "h100_steps.yaml"
FITTED = (1, 4, 16, 64)
"""Concurrencies that are fitted."""
SHARES = ("bandwidth_share", "layer_overhead_us", "position_us")
"""Fitted keys of a device, the same for all devices."""
LINKS = ("link_latency_us", "link_bandwidth_gb_s")
"""Fitted keys of the pair without peer-to-peer copies."""
CONTEXT = 400
"""Assumed tokens of a request's context: with it plain steps grow by rows as measured."""
PROMPT = 110.0
"""Tokens of a prompt that were not in the prefix cache (fitted)."""


@dataclass(frozen=True)
class Step:
    """A measured mean step."""

    target: str
    drafter: str | None
    gpus: int
    device: str
    concurrency: int
    drafts: int
    """Draft tokens per row."""
    rows: float
    """Requests that decode in a step on average."""
    prompts: float
    """Prompts that begin in a step on average."""
    context: int
    """Tokens per row."""
    seconds: float
    median: float | None = None
    """Median seconds of a step."""


def measured() -> list[Step]:
    """All points."""
    data, steps = yaml.safe_load(FILE.read_text(encoding="utf-8")), list[Step]()
    for run in data["runs"]:
        what = (run["target"], run["drafter"], run["gpus"], "h100_94gb")
        for concurrency, points in run["steps"].items():
            for drafts, mean, median, rows, length in points:
                prompts = rows * length / data["output_tokens"]
                times = (mean / 1e3, median / 1e3)
                steps.append(Step(*what, concurrency, drafts, rows, prompts, CONTEXT, *times))
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for drafts in (0, 1, 3, 5):
            # SpecDecode-Bench's simulator (arXiv 2601.11580): a regression, 1 to 64 rows; contexts of 600 assumed
            ms = 5.886 + 0.0210 * rows * (drafts + 1) + 0.0393 * 0.6 * rows + 1.207
            steps.append(Step("llama-3.1-8b", None, 1, "h100", rows, drafts, rows, 0.0, 600, ms / 1e3))
    # Qwen3-32B on an H100 SXM at batch 1, vLLM V1 (the blog of vllm-scripts); odd numbers of drafts are held out
    for drafts, ms in enumerate((23.65, 26.81, 29.60, 31.69, 34.34, 36.89, 39.37, 41.39, 44.70)):
        steps.append(Step("qwen3-32b", "qwen3-1.7b", 1, "h100", 1 + drafts % 2, drafts, 1, 0.0, 600, ms / 1e3))
    return steps


def device_of(name: str) -> DeviceSpec:
    device = load_hardware(name)
    assert isinstance(device, DeviceSpec)
    return device


def predicted(step: Step, device: DeviceSpec, prompt: float = PROMPT) -> float:
    """Seconds of the mean step: over the number of prompts in a step (Poisson), and of rows that wait."""
    target = RooflineCost(device, find_model(step.target), step.gpus)
    drafter = RooflineCost(device, find_model(step.drafter), step.gpus) if step.drafter and step.drafts else None
    total = weights = 0.0
    for prompts in range(8):
        weight = math.exp(-step.prompts) * step.prompts**prompts / math.factorial(prompts)
        for waiting in (0.0, 1.0, 2.0) if weight > 0.01 else ():
            rows = max(step.concurrency - waiting * (step.concurrency - step.rows), 1.0)
            total += weight * _seconds(step, target, drafter, rows, prompts * prompt)
            weights += weight
    return total / weights


def predicted_median(step: Step, device: DeviceSpec) -> float:
    """Seconds of a step without prompts."""
    return predicted(replace(step, prompts=0.0), device)


def _seconds(step: Step, target: RooflineCost, drafter: RooflineCost | None, rows: float, prefill: float) -> float:
    positions, context = rows * (step.drafts + 1), rows * step.context
    seconds = target.seconds(rows, positions, context, prefill)
    if drafter is not None:
        is_head = drafter.model.features > 0  # its first forward reads all verified positions, a model's two of a row
        read = prefill + (positions if is_head else 2 * rows) - rows
        seconds += drafter.seconds(rows, rows, context, read) + drafter.fusion_seconds(positions if is_head else 0)
        seconds += (step.drafts - 1) * drafter.seconds(rows, rows, context)
    return seconds


def fit(steps: Sequence[Step]) -> tuple[dict[str, float], float]:
    """Values of `SHARES` and `LINKS`, and prompt tokens, with the least squares of relative errors (Gauss-Newton in
    logarithms)."""
    devices = {name: device_of(name) for name in ("h100", "h100_94gb")}
    names, seconds = [*SHARES, *LINKS], np.log([step.seconds for step in steps])
    values = np.log([*(getattr(devices["h100_94gb"], name) for name in names), PROMPT])

    def errors(values: np.ndarray) -> np.ndarray:
        changed = dict(zip(names, np.exp(values).tolist(), strict=False))
        used = {
            "h100": replace(devices["h100"], **{name: changed[name] for name in SHARES}),
            "h100_94gb": replace(devices["h100_94gb"], **changed),
        }
        return np.log([predicted(step, used[step.device], float(np.exp(values[-1]))) for step in steps]) - seconds

    found, damping = errors(values), 1e-2
    for _ in range(12):
        moves = 0.03 * np.eye(len(values))
        slopes = np.stack([(errors(values + move) - errors(values - move)) / 0.06 for move in moves], 1)
        square = slopes.T @ slopes
        tried = values - np.linalg.solve(square + damping * np.diag(np.diag(square)), slopes.T @ found)
        new = errors(tried)
        if new @ new < found @ found:
            values, found, damping = tried, new, damping / 4
        else:
            damping *= 8
    return dict(zip(names, np.exp(values).tolist(), strict=False)), float(np.exp(values[-1]))


def errors_of(
    steps: Sequence[Step], devices: dict[str, DeviceSpec], prompt: float = PROMPT
) -> list[tuple[Step, float]]:
    """Each point with its relative error."""
    return [(step, predicted(step, devices[step.device], prompt) / step.seconds - 1.0) for step in steps]


def median_errors(steps: Sequence[Step], devices: dict[str, DeviceSpec]) -> list[tuple[Step, float]]:
    """The same for medians, of points at which a step has a prompt in a quarter of the cases at most."""
    rare = [step for step in steps if step.median is not None and step.prompts < 0.3]
    return [(step, predicted_median(step, devices[step.device]) / (step.median or 1.0) - 1.0) for step in rare]


def is_held_out(step: Step) -> bool:
    return step.concurrency not in FITTED


def main(fit_again: Annotated[bool, typer.Option("--fit", help="Fit the shares again.")] = False) -> None:
    """Print the table."""
    console, steps = make_console(), measured()
    devices, prompt = {name: device_of(name) for name in ("h100", "h100_94gb")}, PROMPT
    if fit_again:
        found, prompt = fit([step for step in steps if not is_held_out(step)])
        console.print({name: float(f"{value:.4g}") for name, value in (*found.items(), ("prompt", prompt))})
        shares = {name: found[name] for name in SHARES}
        devices = {"h100": replace(devices["h100"], **shares), "h100_94gb": replace(devices["h100_94gb"], **found)}
    groups: dict[str, Callable[[Step], bool]] = {"fitted": lambda step: not is_held_out(step), "held out": is_held_out}
    for target, drafter in dict.fromkeys((step.target, step.drafter) for step in steps):
        name = f"held out: {target}, {drafter or 'no drafter'}"
        groups[name] = lambda step, t=target, d=drafter: is_held_out(step) and (step.target, step.drafter) == (t, d)
    rows = [
        _row(name, errors_of([step for step in steps if chosen(step)], devices, prompt))
        for name, chosen in groups.items()
    ]
    rows.append(_row("medians of steps without prompts", median_errors(steps, devices)))
    console.print(make_table(rows, text=("points", "at")))


def _row(name: str, found: Sequence[tuple[Step, float]]) -> dict[str, str]:
    sizes = sorted(abs(error) for _, error in found)
    step, worst = max(found, key=lambda item: abs(item[1]))
    bias, median = (100 * sum(error for _, error in found) / len(found), 100 * sizes[len(sizes) // 2])
    return {
        "points": name,
        "number": str(len(found)),
        "median": f"{median:.1f}%",
        "worst": f"{100 * worst:+.1f}%",
        "at": f"concurrency {step.concurrency}, {step.drafts} drafts",
        "bias": f"{bias:+.1f}%",
    }


if __name__ == "__main__":
    run_script(main)
