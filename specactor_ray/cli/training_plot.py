"""The plot of training runs: rewards, acceptance, lengths, seconds, and the timeline of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.cli.run_files import RunFiles
from specactor_ray.core.plot import write_plot
from specactor_ray.trainer.figures import PHASES

_SMOOTHED = 12
"""Least number of steps with a moving mean; its window is a tenth of the steps, at least 5."""


def plot_training(run: RunFiles, step: Mapping[str, Any] | None, file: Path) -> str:
    """Draw a run, and the timeline of a step if there is one. Returns a line for the user."""

    def acceptance(axes: Any) -> None:
        for method in dict.fromkeys(method for one in run.records for method in one["speed"]["by_method"]):
            counts = [one["speed"]["by_method"].get(method, (0, 0)) for one in run.records]
            shares = [right / drafted if drafted else math.nan for drafted, right in counts]
            axes.plot([one["step"] for one in run.records], shares, label=method)
        axes.set(title="draft tokens that were right", xlabel="step", ylabel="share", ylim=(0, 1))

    def seconds(axes: Any) -> None:
        phases = [phase for phase in PHASES if any(one["seconds"].get(phase) for one in run.records)]
        stacks = [[one["seconds"].get(phase, 0.0) for one in run.records] for phase in phases]
        steps, whole = [one["step"] for one in run.records], [one["seconds"]["step"] for one in run.records]
        if len(steps) > 1:
            axes.stackplot(steps, *stacks, labels=phases, alpha=0.8)
        else:
            for phase, (value,), below in zip(phases, stacks, range(len(stacks)), strict=True):
                axes.bar(steps, [value], bottom=sum(one[0] for one in stacks[:below]), label=phase)
        axes.plot(steps, whole, color="black", linewidth=1, label="whole step")
        axes.set(title="time of a step", xlabel="step", ylabel="seconds", ylim=(0, None))

    def timeline(axes: Any) -> None:
        assert step is not None
        spans = sorted(step["timeline"].items(), key=lambda item: item[1], reverse=True)
        begins = [begin for _, (begin, _) in spans]
        axes.barh([name for name, _ in spans], [end - begin for _, (begin, end) in spans], left=begins)
        axes.set(title=f"step {step['step']}", xlabel="seconds")

    panels = [_rewards([run]), acceptance, _lengths([run]), _acceptance_lengths([run]), seconds]
    return write_plot(file, *panels, *([timeline] if step is not None else []), columns=2)


def plot_trainings(runs: Sequence[RunFiles], file: Path) -> str:
    """Draw the curves of several runs over each other. Returns a line for the user."""

    def seconds(axes: Any) -> None:
        for run in runs:
            steps = [one["step"] for one in run.records]
            (line,) = axes.plot(steps, [one["seconds"]["step"] for one in run.records], label=run.name)
            rollout = [one["seconds"].get("rollout", math.nan) for one in run.records]
            axes.plot(steps, rollout, ":", color=line.get_color(), label=f"{run.name}, rollout")
        axes.set(title="time of a step", xlabel="step", ylabel="seconds", ylim=(0, None))

    rates = _curves(runs, "speed", "tokens_per_s", "speed of rollouts", "tokens/s")
    return write_plot(file, _rewards(runs), _acceptance_lengths(runs), _lengths(runs), seconds, rates, columns=2)


def _rewards(runs: Sequence[RunFiles]) -> Any:
    """Rewards of training samples as dots, with their moving mean, and the evaluations."""

    def draw(axes: Any) -> None:
        for run in runs:
            name = f"{run.name}: " if len(runs) > 1 else ""
            steps, values = series(run.records, "train", "reward_mean")
            (dots,) = axes.plot(steps, values, ".", alpha=0.4, markersize=4)
            if len(steps) < _SMOOTHED:
                dots.set(label=f"{name}training", alpha=1.0)
            else:
                window = max(len(steps) // 10, 5)
                label = f"{name}training, mean of {window} steps"
                axes.plot(steps, moving_mean(values, window), color=dots.get_color(), label=label)
            evaluated = [one for one in run.evaluations if one.get("mean") is not None]
            if evaluated:
                colour = dots.get_color() if len(runs) > 1 else "black"
                points = [one["step"] for one in evaluated], [one["mean"] for one in evaluated]
                errors = [one.get("standard_error") or 0.0 for one in evaluated]
                axes.errorbar(*points, errors, fmt="s--", color=colour, markersize=4, label=f"{name}evaluation")
        axes.set(title="reward", xlabel="step", ylabel="mean reward")

    return draw


def _lengths(runs: Sequence[RunFiles]) -> Any:
    return _curves(runs, "train", "length_mean", "length of outputs", "tokens, mean")


def _acceptance_lengths(runs: Sequence[RunFiles]) -> Any:
    return _curves(runs, "speed", "acceptance_length", "acceptance length", "tokens per request and step")


def _curves(runs: Sequence[RunFiles], section: str, figure: str, title: str, unit: str) -> Any:
    """A line for each run."""

    def draw(axes: Any) -> None:
        for run in runs:
            axes.plot(*series(run.records, section, figure), label=run.name if len(runs) > 1 else None)
        axes.set(title=title, xlabel="step", ylabel=unit)

    return draw


def series(records: Sequence[Mapping[str, Any]], section: str, figure: str) -> tuple[list[int], list[float]]:
    """Steps that have a figure, and its values."""
    pairs = [(one["step"], one[section].get(figure)) for one in records]
    return [step for step, value in pairs if value is not None], [value for _, value in pairs if value is not None]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those around it, `window` in all, fewer at the ends."""
    before, after = window // 2, window - window // 2
    parts = (values[max(at - before, 0) : at + after] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]
