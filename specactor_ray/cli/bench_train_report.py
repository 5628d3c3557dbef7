"""Tables and plot of `specactor bench train`, made from the plain data of its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from specactor_ray.bench.pairs import right_share, supply_share
from specactor_ray.cli.report import number, right_by_method
from specactor_ray.core import plot
from specactor_ray.core.console import make_table


def training_pairs_table(parts: Iterable[Mapping[str, Any]], title: str) -> Table:
    """Rollouts and whole steps of a training with drafts beside plain decoding, by parts of the run."""

    def ratio(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "-"
        interval = "" if found["interval"] is None else " ({:.2f} to {:.2f})".format(*found["interval"])
        return f"{found['ratio']:.2f}{interval}"

    rows = (
        {
            "steps": "{} to {}".format(*one["steps"]),
            "tokens": f"{one['tokens']:,}",
            "tokens/s": f"{number(one['plain_tokens_per_s'], '{:.0f}')} to {one['drafted_tokens_per_s']:.0f}",
            "rollout": ratio(one["rollout"]),
            "step": ratio(one["step"]),
            "share": number(one["rollout_share"], "{:.0%}"),
            "acc. length": f"{one['acceptance_length']:.2f}",
            "drafts right": right_by_method(one["by_method"]),
        }
        for one in parts
    )
    caption = (
        "tokens/s: of plain decoding and with drafts. rollout, step: ratio of the speeds with its 95% interval.\n"
        "share: of the rollout in a plain step."
    )
    return make_table(rows, title, text=("drafts right",), caption=caption)


def history_table(epochs: Iterable[Mapping[str, Any]], drafted: str) -> Table:
    """Acceptance of each drafted rollout of a training by epoch; `drafted` names that of the configuration."""
    rows = (
        {
            "epoch": str(one["part"] + 1),
            "steps": "{} to {}".format(*one["steps"]),
            "reward": number(one["reward"]),
            **{name: _history_cell(figures) for name, figures in {drafted: one, **one["also"]}.items()},
        }
        for one in epochs
    )
    caption = (
        "a / b / c: share of right draft tokens among those after right ones, of requests with a draft,\n"
        "and tokens per request and step."
    )
    return make_table(rows, "drafts by epoch, each rollout by itself", caption=caption)


def _history_cell(figures: Mapping[str, Any]) -> str:
    shares = (number(share(figures), "{:.0%}") for share in (right_share, supply_share))
    return " / ".join((*shares, f"{figures['acceptance_length']:.2f}"))


def write_plot(report: Mapping[str, Any]) -> str:
    """Write the speed of each step and the acceptance of each method as `bench.png` beside the report, and with further
    rollouts the acceptance of each by epoch. Returns a line for the user."""
    steps = report["steps"]
    numbers, paired = [one["step"] for one in steps], [one for one in steps if one["plain_s"] is not None]

    def speed(axes: Any) -> None:
        for name, label in (("", "rollout"), ("_step", "whole step")):
            ratios = [one[f"plain{name}_s"] / one[f"drafted{name}_s"] for one in paired]
            axes.plot([one["step"] for one in paired], ratios, "o-", label=label)
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set(ylabel="times plain decoding", ylim=(0, None))

    def right(axes: Any) -> None:
        for method in dict.fromkeys(method for one in steps for method in one["by_method"]):
            counts = [one["by_method"].get(method, (0, 0)) for one in steps]
            axes.plot(numbers, [accepted / max(drafted, 1) for drafted, accepted in counts], "o-", label=method)
        axes.set(xlabel="step", ylabel="draft tokens right", ylim=(0, 1))

    panels = (speed, *(history_panels(report) if report["epochs"][0]["also"] else (right,)))
    return plot.write_plot(Path(report["output"]).with_suffix(".png"), *panels)


def history_panels(report: Mapping[str, Any], title: str = "") -> tuple[plot.Panel, plot.Panel]:
    """Acceptance and acceptance length of all drafted rollouts by epoch, under a title."""
    epochs = report["epochs"]
    numbers = [one["part"] + 1 for one in epochs]
    rollouts = {report["drafted"]: epochs, **{way: [one["also"][way] for one in epochs] for way in epochs[0]["also"]}}
    shares = {way: [right_share(one) for one in parts] for way, parts in rollouts.items()}
    lengths = {way: [one["acceptance_length"] for one in parts] for way, parts in rollouts.items()}
    rewards = [one["reward"] for one in epochs]

    def right(axes: Any) -> None:
        for way, values in shares.items():
            axes.plot(numbers, values, "o-", label=way)
        axes.plot(numbers, rewards, ":", color="grey", label="reward")
        axes.set(xlabel="epoch", ylabel="draft tokens right", ylim=(0, 1), title=title)

    def length(axes: Any) -> None:
        for way, values in lengths.items():
            axes.plot(numbers, values, "o-", label=way)
        axes.set(xlabel="epoch", ylabel="tokens per request and step", ylim=(1, None), title=title)

    return right, length
