"""Run the experiments of docs/simulation.md: tables go to the terminal, plots replace those in docs/figures.

python scripts/simulate_experiments.py [NAME ...]        # all, or some; ten minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
PAIR = ["--config", "conf/simulation/qwen32b_5xh100.yaml"]
WHOLE = ["--config", "conf/simulation/qwen32b_256xh100.yaml"]

EXPERIMENTS: Mapping[str, list[str]] = {
    "paper": WHOLE,
    "batch": [
        *(*PAIR, "--compare", "plain,coupled,decoupled", "--sweep", "config.target.max_batch=16,64,128,256,512,1024"),
        *("workload.prompt_tokens=16", "workload.requests=512"),
    ],
    "latency": [
        *(*PAIR, "--compare", "plain,coupled,decoupled", "--sweep", "skills.0.forward_ms=0.1,0.5,1,2,5,10,20"),
    ],
    "acceptance": [
        *(*PAIR, "--compare", "plain,coupled,decoupled", "--sweep", "skills.0.mean=0.2,0.4,0.6,0.7,0.8,0.9"),
    ],
    "rows": [
        *(*PAIR, "--sweep", "config.target.max_batch=1,4,16,64", "workload.requests=64"),
        *("workload.median_tokens=300", "workload.max_tokens=1200"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    names = parser.parse_args().names or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        parser.error(f"{unknown[0]}: no such experiment; there are {', '.join(EXPERIMENTS)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out"
            arguments = ["simulate", *EXPERIMENTS[name], "--output", str(output)]
            print(f"\n{name}: specactor {' '.join(arguments[:-2])}", flush=True)
            subprocess.run([sys.executable, "-m", "specactor_ray.cli.main", *arguments], cwd=ROOT, check=True, stdout=2)
            for plot, suffix in (("sweep", ""), ("running", "_running"), ("phases", "_phases")):
                if (output / f"{plot}.png").exists():
                    shutil.copy(output / f"{plot}.png", FIGURES / f"simulation_{name}{suffix}.png")
            print("\n".join(markdown(json.loads((output / "report.json").read_text()))), flush=True)


def markdown(report: Mapping[str, Any]) -> list[str]:
    """The table of a report."""
    if "points" not in report:
        return _variants(report)
    names = [result["variant"] for result in report["points"][0]["results"]]
    first, others = names[0], " | ".join(f"{name}, x" for name in names[1:])
    lines = [f"| `{report['sweep']}` | {first}, tokens/s/GPU | {others} | draft streams | their cache, GB |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for point in report["points"]:
        speed = next(one["tokens_per_s_and_device"] for one in point["results"] if one["variant"] == first)
        ratios = " | ".join(f"{point['ratios'][name]:.2f}" for name in names[1:])
        most = max(point["results"], key=lambda one: one["peak_stream_bytes"])
        memory = f"{most['peak_streams']:,} | {most['peak_stream_bytes'] / 1e9:.1f}"
        lines.append(f"| {point['value']} | {speed:,.0f} | {ratios} | {memory} |")
    return lines


def _variants(report: Mapping[str, Any]) -> list[str]:
    lines = ["| variant | GPUs (drafting) | rollout s | tokens/s/GPU | x | acceptance length |", "|---" * 6 + "|"]
    for one in report["results"]:
        name = one["variant"]
        lines.append(
            f"| {name} | {one['devices']} ({one['draft_devices']}) | {one['rollout_s']:.1f} "
            f"| {one['tokens_per_s_and_device']:,.0f} | {report['ratios'][name]:.2f} | {one['acceptance_length']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()
