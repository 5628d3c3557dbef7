#!/usr/bin/env python3
"""Speed of a verifier, a draft model and a trainer on a quiet machine, and beside busy processes.

    python scripts/bench_busy.py            # quiet, then beside one process that never rests; five minutes on two cores

Verifiers decode by turns in one process: plain with one thread, with a thread on every core, with the number that the
product chooses, and `mode: auto`. The draft model and the trainer run in processes of their own,
with the spins of OpenMP that the product sets and with OpenMP's default. Do not start it beside other work.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from specactor_ray.cluster.cores import SPINS, bind_to_cores, limit_spins

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m"
BUSY = "while True: pass"
ALONE = {
    "draft model, 1 core": "\n".join(
        (
            "model = RaggedModel(load_model(MODEL), 1 << 28)",
            "rows, one = np.array([model.cache.open(64) for _ in range(4)]), np.ones(4, np.int64)",
            "model.forward(rows, 32 * one, np.full(128, 5), one)",
            "def work():",
            "    model.forward(rows, one, np.full(4, 7), one)",
            "    model.cache.truncate(rows, 32)",
        )
    ),
    "trainer, all cores": "\n".join(
        (
            "model = load_model(MODEL).requires_grad_(True)",
            "tokens = torch.arange(10, 522).reshape(4, 128)",
            "def work():",
            "    model(input_ids=tokens, labels=tokens).loss.backward()",
            "    model.zero_grad()",
        )
    ),
}
TIMED = """
import sys, time, torch
import numpy as np
from specactor_ray.cluster.cores import bind_to_cores
bind_to_cores([int(core) for core in sys.argv[1].split(",")])
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
MODEL = {model!r}
{setup}
work()
end, times = time.perf_counter() + {seconds}, []
while time.perf_counter() < end or len(times) < 3:
    begin = time.perf_counter()
    work()
    times.append(time.perf_counter() - begin)
print(sorted(times)[len(times) // 2])
"""


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that never rest."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def verifier_speeds(prompts_file: Path, batch: int, tokens: int, cores: int, slices: int) -> dict[str, float]:
    """Variant → tokens per second."""
    import torch

    from specactor_ray.bench.by_turns import TurnTaker
    from specactor_ray.config.schema import DrafterConfig, TargetConfig
    from specactor_ray.core.types import SamplingParams
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.rollout.planning import DEFAULT_METHOD
    from specactor_ray.rollout.prompts import encode_prompt, read_prompts
    from specactor_ray.target.base import TargetRequest

    tokenizer = load_tokenizer(MODEL)
    target = TargetConfig(dtype="float32", max_batch=batch, cores=cores, kv_cache_gb=0.5)
    prompts = read_prompts(prompts_file, batch)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    encoded = [encode_prompt(tokenizer, prompts[number % len(prompts)], chat=True) for number in range(batch)]
    takers = {
        "plain, 1 thread": TurnTaker((), target),
        f"plain, {cores} threads": TurnTaker((), target),
        "plain": TurnTaker((), target),
        "auto": TurnTaker((DrafterConfig(DEFAULT_METHOD),), target),
    }
    fixed = dict(zip(takers, (1, cores), strict=False))
    for name, taker in takers.items():
        if name in fixed:
            taker.loop._engine._model._threads = None
        taker.loop.submit([TargetRequest(str(number), prompt, sampling) for number, prompt in enumerate(encoded)])
    orders = itertools.cycle(itertools.permutations(takers))
    for number, order in zip(range(1, slices + 1), orders, strict=False):
        for name in order:
            if name in fixed:
                torch.set_num_threads(fixed[name])
            takers[name].run(math.ceil(batch * tokens * number / slices))
    return {name: batch * tokens / sum(taker.seconds) for name, taker in takers.items()}


def seconds_alone(setup: str, cores: Sequence[int], spins: dict[str, str], seconds: float) -> float:
    """Median seconds of one piece of work in a process of its own."""
    code = TIMED.format(model=MODEL, setup=setup, seconds=seconds)
    environment = {**os.environ, "GOMP_SPINCOUNT": "300000", **spins}
    command = [sys.executable, "-c", code, ",".join(map(str, cores))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "conf" / "prompts" / "editing.jsonl"
    parser.add_argument("--prompts", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="of each output; default: %(default)s")
    parser.add_argument("--slices", type=int, default=24, help="turns of a variant; default: %(default)s")
    parser.add_argument("--busy", type=int, default=1, help="processes that never rest; default: %(default)s")
    arguments = parser.parse_args()
    spins = limit_spins()
    os.environ.update(spins)
    cores = sorted(os.sched_getaffinity(0))
    shares = []
    for count in (0, arguments.busy):
        print(f"\n{'quiet' if not count else f'beside {count} busy process(es)'}", flush=True)
        with neighbours(count):
            for name, setup in ALONE.items():
                own = cores[:1] if "1 core" in name else cores
                ours, default = (seconds_alone(setup, own, each, 8.0) for each in (spins, {}))
                print(
                    f"  {name}: {1e3 * ours:.0f} ms with {SPINS} spins, {1e3 * default:.0f} ms with 300000", flush=True
                )
            bind_to_cores(cores)
            time.sleep(1.0)
            for batch in arguments.batch:
                speeds = verifier_speeds(arguments.prompts, batch, arguments.tokens, len(cores), arguments.slices)
                shares.append(speeds["auto"] / max(speed for name, speed in speeds.items() if name != "auto"))
                cells = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
                print(f"  verifier, batch {batch}, tokens/s: {cells}; auto / best plain {shares[-1]:.2f}", flush=True)
    print(f"\nauto / best plain: median {median(shares):.2f}, mean {fmean(shares):.2f}, worst {min(shares):.2f}")


if __name__ == "__main__":
    main()
