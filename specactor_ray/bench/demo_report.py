"""Table, verdict and plot of `specactor demo`, made from the plain data in `report.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specactor_ray.core.console import draw, figures_table
from specactor_ray.trainer.display import Column

DEMO_COLUMNS: Sequence[Column] = (
    ("step", lambda r: str(r["step"])),
    ("reward", lambda r: f"{r['train']['reward_mean']:.3f}"),
    ("samples", lambda r: str(r["train"]["sampled"])),
    ("tokens/s", lambda r: f"{r['speed']['tokens_per_s']:.1f}"),
    ("acceptance length", lambda r: f"{r['speed']['acceptance_length']:.2f}"),
    ("rollout", lambda r: f"{r['seconds']['rollout']:.1f} s"),
    ("update", lambda r: f"{r['seconds']['update']:.1f} s"),
)


def demo_table(report: Mapping[str, Any]) -> Table:
    """The figures, one per row."""
    return figures_table(f"demo: {report['model']}, {report['seconds']:.0f} s", _rows(report))


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    speed, training = report["speed"], report["training"]
    if speed is not None:
        yield "plain", f"{speed['plain_tokens_per_s']:.1f} tokens/s"
        yield "auto", f"{speed['auto_tokens_per_s']:.1f} tokens/s"
        error = "" if speed["error"] is None else f" ± {speed['error']:.2f}"
        yield f"ratio, {len(speed['rounds'])} paired round(s)", f"{speed['ratio']:.2f}{error}"
        yield "acceptance length", f"{speed['acceptance_length']:.2f}"
        yield "identical outputs", f"{speed['identical']} of {speed['requests']}"
    if training is not None:
        for name, one in (("step 1", training["before"]), (f"step {training['steps']}", training["after"])):
            yield f"GRPO reward, {name}", f"{one['mean']:.2f} ± {one['error']:.2f} ({one['samples']} samples)"
        lengths = training["acceptance_lengths"]
        yield "acceptance length, first and last step", f"{lengths[0]:.2f} and {lengths[-1]:.2f}"
        yield "time of rollout, of update", f"{training['rollout_share']:.0%}, {training['update_share']:.0%}"


def verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Conclusions from the figures, in words: a difference within two standard errors counts as none."""
    speed, training = report["speed"], report["training"]
    if speed is None:
        yield "nothing was measured"
        return
    if speed["identical"] < speed["requests"]:
        yield f"{speed['requests'] - speed['identical']} outputs differ from those of plain decoding: report this"
    ratio, error = speed["ratio"], speed["error"]
    if error is None:
        yield "one round only: the ratio has no error"
    elif abs(ratio - 1.0) <= 2.0 * error:
        yield f"auto is as fast as plain decoding here, within the error ({ratio:.2f} ± {error:.2f})"
    else:
        yield f"auto is {ratio:.2f} times as fast as plain decoding here, token for token the same"
    if training is not None:
        before, after = training["before"], training["after"]
        rise, error = after["mean"] - before["mean"], math.hypot(before["error"], after["error"])
        verb = "rose" if rise > 2.0 * error else "fell" if rise < -2.0 * error else "did not change beyond its error"
        yield f"the reward {verb} in {training['steps']} steps: {before['mean']:.2f} to {after['mean']:.2f}"


def write_demo_plot(path: Path, report: Mapping[str, Any]) -> bool:
    """Plot tokens per second by round, and reward by step. Returns whether it was written: false without matplotlib."""

    def draw_speeds(axes: Any) -> None:
        rounds = report["speed"]["rounds"] if report["speed"] else []
        numbers = range(1, len(rounds) + 1)
        for name in ("plain", "auto") if rounds else ():
            axes.plot(numbers, [one[f"{name}_tokens_per_s"] for one in rounds], "o-", label=name)
        axes.set(xlabel="round", ylabel="tokens/s", ylim=(0, None), xticks=list(numbers))

    def draw_rewards(axes: Any) -> None:
        rewards = report["training"]["rewards"] if report["training"] else []
        steps = range(1, len(rewards) + 1)
        axes.errorbar(steps, [one["mean"] for one in rewards], [one["error"] for one in rewards], fmt="o-", capsize=3)
        axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1), xticks=list(steps))

    return draw(path, draw_speeds, draw_rewards, size=(9, 3.5))
