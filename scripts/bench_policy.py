#!/usr/bin/env python3
"""How good the policy is, without noise: many situations, each simulated by the product's decisions, by a clairvoyant's
in the same layout, and by plain decoding on the same verifiers.

`x plain` is the speed relative to plain decoding, drafters' GPUs not counted (a layout is given here, what it does
with it is judged); `of clairvoyant` relative to decisions by true probabilities and costs (`KnownAcceptance` and
`KnownCost` of `simulation/cluster.py`).

    python scripts/bench_policy.py                    # all; three minutes on two cores
    python scripts/bench_policy.py useless drifting   # some
    python scripts/bench_policy.py --json new.json --base old.json   # and what changed since old.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from specactor_ray.core.console import make_console
from specactor_ray.core.phase_progress import PhaseProgress
from specactor_ray.simulation.comparison import VariantJob, run_jobs
from specactor_ray.simulation.rollouts import Result

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "conf" / "simulation" / "qwen32b_5xh100.yaml"
TWO = ROOT / "conf" / "simulation" / "equal_drafters_6xh100.yaml"
LAYOUTS = ("coupled", "decoupled")
SHORT = ["workload.median_tokens=300", "workload.max_tokens=1200"]
USELESS = "skills=[{method: draft_model, mean: 0.72, spread: 0.35}, {method: eagle, mean: 0.02}]"

SITUATIONS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "base": (SCENARIO, []),
    "high acceptance": (SCENARIO, ["skills.0.mean=0.92"]),
    "low acceptance": (SCENARIO, ["skills.0.mean=0.25"]),
    "useless": (SCENARIO, ["skills.0.mean=0.02", "skills.0.spread=0"]),
    "drifting": (SCENARIO, ["skills.0.mean=0.9", "skills.0.decay=0.6", "workload.median_tokens=800"]),
    "bimodal": (SCENARIO, ["skills.0.mean=0.5", "skills.0.spread=2.0", "skills.0.burst=0"]),
    "bursts": (SCENARIO, ["skills.0.mean=0.6", "skills.0.spread=0", "skills.0.burst=1.5"]),
    "patchy": (SCENARIO, ["skills.0.mean=0.85", "skills.0.coverage=0.25"]),
    "slow link": (SCENARIO, ["network.call_ms=8"]),
    "slow drafter": (SCENARIO, ["skills.0.forward_ms=10"]),
    "very slow drafter": (SCENARIO, ["skills.0.forward_ms=50"]),
    "batch 1": (SCENARIO, ["config.target.max_batch=1", "workload.requests=4"]),
    "batch 4": (SCENARIO, ["config.target.max_batch=4", "workload.requests=16"]),
    "batch 16": (SCENARIO, ["config.target.max_batch=16", "workload.requests=48"]),
    "batch 256": (SCENARIO, ["config.target.max_batch=256", "workload.requests=256"]),
    "batch 512": (SCENARIO, ["config.target.max_batch=512", "workload.requests=384", "workload.median_tokens=150"]),
    "a rollout": (SCENARIO, ["workload.arrival=at_once", "workload.sigma=1.0", "workload.requests=64"]),
    "a large rollout": (
        SCENARIO,
        ["workload.arrival=at_once", "workload.sigma=1.0", "workload.requests=384", "config.target.max_batch=384"],
    ),
    "equal drafters": (TWO, []),
    "equal and alike": (TWO, ["correlation=1"]),
    "one useless": (TWO, [USELESS]),
    "race": (TWO, ["config.speculation.race=always"]),
}
"""Name → scenario and what is different in it."""


def jobs_of(name: str) -> dict[str, VariantJob]:
    """What is simulated of a situation: `plain`, and each layout with the product's decisions and a clairvoyant's."""
    path, overrides = SITUATIONS[name]
    layouts, variant = (LAYOUTS, "decoupled") if path == SCENARIO else (("decoupled",), "apart")

    def job(mode: str, clairvoyant: bool = False) -> VariantJob:
        return VariantJob(path, (*SHORT, *overrides, f"config.mode={mode}"), variant, clairvoyant)

    jobs = {"plain": job("plain")}
    for layout in layouts:
        jobs |= {layout: job(layout), f"{layout} clairvoyant": job(layout, True)}
    return jobs


def judge(results: Mapping[str, Result], before: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Layout → speed relative to plain decoding, and to the limit: the fastest of plain decoding, the clairvoyant, and
    the clairvoyant of the revision compared with."""
    plain = results["plain"].tokens_per_s
    judged = {}
    for layout in (one for one in LAYOUTS if one in results):
        known = before.get(layout, {}).get("limit_tokens_per_s", 0.0)
        limit = max(plain, results[f"{layout} clairvoyant"].tokens_per_s, known)
        speed = results[layout].tokens_per_s
        judged[layout] = {
            "tokens_per_s": speed,
            "limit_tokens_per_s": limit,
            "x_plain": speed / plain,
            "of_clairvoyant": speed / limit,
            "acceptance_length": results[layout].metrics.acceptance_length,
        }
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SITUATION", help=", ".join(SITUATIONS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--base", type=Path, metavar="FILE", help="figures of another revision to compare with")
    arguments = parser.parse_args()
    names = arguments.names or list(SITUATIONS)
    if unknown := [name for name in names if name not in SITUATIONS]:
        parser.error(f"{unknown[0]}: no such situation; there are {', '.join(SITUATIONS)}")
    if arguments.json and arguments.json.exists():
        parser.error(f"--json: {arguments.json} exists and is never overwritten; name another file")
    try:
        base = json.loads(arguments.base.read_text()) if arguments.base else {}
    except (OSError, ValueError) as error:
        parser.error(f"--base: {arguments.base} cannot be read ({error}); name a file that --json wrote")
    jobs = {(name, what): job for name in names for what, job in jobs_of(name).items()}
    with PhaseProgress(make_console(sys.stderr), "simulating", len(jobs)) as progress:
        found = run_jobs(list(jobs.values()), on_progress=lambda done: progress.update(done, f"{len(jobs)} runs"))
    if None in found:
        sys.exit(130)
    judged = {}
    for name in names:
        results = {what: result for (one, what), result in zip(jobs, found, strict=True) if one == name and result}
        judged[name] = judge(results, base.get(name, {}))
    Console(width=120).print(table_of(judged, base))
    scores = [score for layouts in judged.values() for score in layouts.values()]
    of_limit, of_plain = [s["of_clairvoyant"] for s in scores], [s["x_plain"] for s in scores]
    print(f"of clairvoyant: mean {fmean(of_limit):.3f}, worst {min(of_limit):.3f}; x plain: worst {min(of_plain):.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(judged, indent=2) + "\n", encoding="utf-8")


def table_of(judged: Mapping[str, Any], base: Mapping[str, Any]) -> Table:
    table = Table(
        "situation", "layout", "x plain", "of clairvoyant", "acceptance length", *(["x base"] if base else [])
    )
    for name, layouts in judged.items():
        for layout, score in layouts.items():
            before = base.get(name, {}).get(layout)
            change = [f"{score['tokens_per_s'] / before['tokens_per_s']:.3f}" if before else ""] if base else []
            table.add_row(
                name,
                layout,
                f"{score['x_plain']:.2f}",
                f"{score['of_clairvoyant']:.2f}",
                f"{score['acceptance_length']:.2f}",
                *change,
            )
    return table


if __name__ == "__main__":
    main()
