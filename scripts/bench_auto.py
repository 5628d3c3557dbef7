#!/usr/bin/env python3
"""What `mode: auto` comes to on CPUs, coupled with the drafter that it takes where none is configured, beside fixed
choices: plain decoding, coupled with n-gram, and with both lookups.

All run in one process on the same cores, without Ray, a slice of the same tokens by turns: on a machine that others
share, whatever is compared sees the same minutes. A ratio is that of the time of all slices, its error that of the mean
over slices.

    python scripts/bench_auto.py                                        # everything; eleven minutes on two cores
    python scripts/bench_auto.py --batch 4 --prompts editing --temperature 0 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table

from specactor_ray.bench.by_turns import TurnTaker
from specactor_ray.bench.comparison import ratio_with_error
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.console import make_console
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.planning import DEFAULT_METHOD
from specactor_ray.rollout.prompts import encode_prompt, read_prompts
from specactor_ray.target.base import TargetRequest

ROOT = Path(__file__).parents[1]
PROMPTS = ("arithmetic", "editing", "chat")
VARIANTS: Mapping[str, Sequence[str]] = {
    "plain": (),
    "ngram": ("ngram",),
    "ngram and suffix": ("ngram", "suffix"),
    "auto": (DEFAULT_METHOD,),
}
SLICES = 256
"""Turns of a workload."""


def measure(requests: Sequence[TargetRequest], target: TargetConfig) -> dict[str, TurnTaker]:
    """Run all requests with every variant, by turns that change their order."""
    variants = {name: TurnTaker([DrafterConfig(one) for one in methods], target) for name, methods in VARIANTS.items()}
    for variant in variants.values():
        variant.loop.submit(requests)
    total = sum(request.sampling.max_tokens for request in requests)
    orders = itertools.cycle(itertools.permutations(variants.values()))
    for number, order in zip(range(1, SLICES + 1), orders, strict=False):
        for variant in order:
            variant.run(math.ceil(total * number / SLICES))
    return variants


def figures(variants: Mapping[str, TurnTaker]) -> dict[str, dict[str, float]]:
    """Variant → tokens/s, speed relative to plain decoding and its standard error, acceptance length."""
    found = {}
    for name, variant in variants.items():
        metrics = variant.loop.metrics
        ratio, error = ratio_with_error(variants["plain"].seconds, variant.seconds)
        found[name] = {
            "tokens_per_s": metrics.committed_tokens / sum(variant.seconds),
            "x_plain": ratio,
            "error": error,
            "acceptance_length": metrics.committed_tokens / metrics.row_steps,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="files of conf/prompts; default: %(default)s")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="default: %(default)s")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 4, 16], help="requests at once; default: %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of each output; default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    for option in ("batch", "tokens", "threads"):
        value = getattr(arguments, option)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{option}: must be 1 or more")
    if arguments.json and arguments.json.exists():
        parser.error(f"--json: {arguments.json} exists and is never overwritten; name another file")
    for name in arguments.prompts:
        if not (ROOT / "conf" / "prompts" / f"{name}.jsonl").is_file():
            parser.error(f"--prompts: there is no conf/prompts/{name}.jsonl")
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer("smollm2-135m")
    workloads = list(itertools.product(arguments.batch, arguments.prompts, arguments.temperature))
    found: dict[str, Any] = {}
    with PhaseProgress(make_console(sys.stderr), "measuring", len(workloads)) as progress:
        for batch, name, temperature in workloads:
            what = f"{name} T={temperature:g}, batch {batch}"
            progress.update(len(found), what)
            prompts = read_prompts(ROOT / "conf" / "prompts" / f"{name}.jsonl", batch)
            requests = [
                TargetRequest(
                    str(number),
                    encode_prompt(tokenizer, prompts[number % len(prompts)], chat=True),
                    SamplingParams(temperature, max_tokens=arguments.tokens, seed=number, ignore_eos=True),
                )
                for number in range(batch)
            ]
            target = TargetConfig(dtype=arguments.dtype, max_batch=batch, cores=arguments.threads)
            found[what] = figures(measure(requests, target))
    Console(width=140).print(table_of(found))
    shares = [one["auto"]["x_plain"] / max(each["x_plain"] for each in one.values()) for one in found.values()]
    print(f"auto, of the best fixed choice: mean {fmean(shares):.3f}, worst {min(shares):.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table_of(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table("workload", "plain, tokens/s", *(f"{name}, x" for name in VARIANTS if name != "plain"), "of the best")
    for what, variants in found.items():
        cells = [
            f"{one['x_plain']:.2f} ± {one['error']:.2f} ({one['acceptance_length']:.2f})"
            for name, one in variants.items()
            if name != "plain"
        ]
        share = variants["auto"]["x_plain"] / max(one["x_plain"] for one in variants.values())
        table.add_row(what, f"{variants['plain']['tokens_per_s']:.1f}", *cells, f"{share:.2f}")
    return table


if __name__ == "__main__":
    main()
