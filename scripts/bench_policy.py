#!/usr/bin/env python3
"""What the policy gains and loses, without noise: situations simulated by the product's decisions and by plain decoding
on the same verifiers, and streams of changing acceptance beside an oracle (`policy_streams.py`). `x plain` is the ratio
to the speed of plain decoding, drafters' GPUs not counted.

    python scripts/bench_policy.py                    # the situations; two minutes on two cores
    python scripts/bench_policy.py useless drifting   # some
    python scripts/bench_policy.py --streams          # the streams; a minute
    python scripts/bench_policy.py --json FILE
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from points import JsonFile, points_table, run_script, show_points
from policy_streams import measure, streams
from specactor_ray.core.console import make_console
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.simulation.comparison import Job, Result, run_jobs

SCENARIOS = Path(__file__).parents[1] / "conf" / "simulation"
ONE, TWO = SCENARIOS / "qwen32b_5xh100.yaml", SCENARIOS / "equal_drafters_6xh100.yaml"
SHORT = ["workload.median_tokens=300", "workload.max_tokens=1200"]
ROLLOUT = ["workload.arrival=at_once", "workload.sigma=1.0"]

SITUATIONS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "base": (ONE, []),
    "high acceptance": (ONE, ["skills.0.mean=0.92"]),
    "low acceptance": (ONE, ["skills.0.mean=0.25"]),
    "useless": (ONE, ["skills.0.mean=0.02", "skills.0.spread=0"]),
    "drifting": (ONE, ["skills.0.mean=0.9", "skills.0.decay=0.6", "workload.median_tokens=800"]),
    "bimodal": (ONE, ["skills.0.mean=0.5", "skills.0.spread=2.0", "skills.0.burst=0"]),
    "bursts": (ONE, ["skills.0.mean=0.6", "skills.0.spread=0", "skills.0.burst=1.5"]),
    "patchy": (ONE, ["skills.0.mean=0.85", "skills.0.coverage=0.25"]),
    "slow link": (ONE, ["network.call_ms=8"]),
    "slow drafter": (ONE, ["skills.0.forward_ms=10"]),
    "very slow drafter": (ONE, ["skills.0.forward_ms=50"]),
    "batch 1": (ONE, ["config.target.max_batch=1", "workload.requests=4"]),
    "batch 4": (ONE, ["config.target.max_batch=4", "workload.requests=16"]),
    "batch 16": (ONE, ["config.target.max_batch=16", "workload.requests=48"]),
    "batch 256": (ONE, ["config.target.max_batch=256", "workload.requests=256"]),
    "batch 512": (ONE, ["config.target.max_batch=512", "workload.requests=384", "workload.median_tokens=150"]),
    "a rollout": (ONE, [*ROLLOUT, "workload.requests=64"]),
    "a large rollout": (ONE, [*ROLLOUT, "workload.requests=384", "config.target.max_batch=384"]),
    "equal drafters": (TWO, []),
    "equal and alike": (TWO, ["correlation=1"]),
    "one useless": (TWO, ["skills=[{method: draft_model, mean: 0.72, spread: 0.35}, {method: eagle, mean: 0.02}]"]),
    "race": (TWO, ["config.speculation.race=always"]),
}
"""Name → scenario and what is different in it."""


def jobs_of(name: str) -> dict[str, Job]:
    """The runs of a situation: `plain`, and each layout that drafts."""
    path, overrides = SITUATIONS[name]
    layouts, variant = (("coupled", "decoupled"), "decoupled") if path == ONE else (("decoupled",), "apart")
    return {mode: (path, (*SHORT, *overrides, f"config.mode={mode}"), variant) for mode in ("plain", *layouts)}


def judge(name: str, results: Mapping[str, Result]) -> Iterator[dict[str, Any]]:
    """A point per layout of a situation."""
    plain = results["plain"].tokens_per_s
    for layout, result in results.items():
        if layout != "plain":
            yield {
                "situation": name,
                "layout": layout,
                "x plain": result.tokens_per_s / plain,
                "acceptance length": result.metrics.acceptance_length,
                "tokens/s": result.tokens_per_s,
            }


SEEDS = {1: 3, 4: 1, 16: 1, 64: 1}
"""Rows of a stream → runs."""


def stream_points(names: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of every stream in both layouts."""
    cases = list(itertools.product(names, (True, False), SEEDS, (0.1, 0.3)))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, *zip(*((*one, SEEDS[one[2]]) for one in cases), strict=True)))


def worst_of(points: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A point per stream and layout: means of speeds, and the worst of the others, over rows and slopes."""
    for (stream, layout), group in itertools.groupby(points, lambda one: (one["stream"], one["layout"])):
        found = list(group)
        columns = {name: [one[name] for one in found if one[name] is not None] for name in list(found[0])[4:]}
        speeds = {name: sum(columns[name]) / len(found) for name in ("x plain", "oracle x plain")}
        regret = {name: max(columns[name], default=None) for name in columns if name.startswith("regret")}
        worst = "worst 100 steps x plain"
        yield {"stream": stream, "layout": layout, **speeds, **regret, worst: min(columns[worst])}


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[SITUATION]...", help=", ".join(SITUATIONS))] = None,
    on_streams: Annotated[bool, typer.Option("--streams", help="Streams in place of situations.")] = False,
    json_file: JsonFile = None,
) -> None:
    known = list(streams(True)) if on_streams else list(SITUATIONS)
    if unknown := [name for name in names or () if name not in known]:
        raise InputError(f"{unknown[0]}: not among {', '.join(known)}")
    if on_streams:
        points = stream_points(names or known)
        make_console().print(points_table(list(worst_of(points)), "streams; worst of 1 to 64 rows and slopes 0.1, 0.3"))
        if json_file is not None:
            write_json(json_file, points, new=True)
        return
    jobs = {(name, what): job for name in names or SITUATIONS for what, job in jobs_of(name).items()}
    with PhaseProgress(make_console(sys.stderr), "simulating", len(jobs)) as progress:
        found = run_jobs(list(jobs.values()), on_progress=lambda done: progress.update(done, f"{len(jobs)} runs"))
    points = []
    for name in names or SITUATIONS:
        results = {what: result for (one, what), result in zip(jobs, found, strict=True) if one == name}
        points += judge(name, results)
    show_points("policy, simulated", points, json_file)
    print(f"x plain: worst {min(one['x plain'] for one in points):.3f}")


if __name__ == "__main__":
    run_script(main)
