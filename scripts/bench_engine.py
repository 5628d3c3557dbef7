#!/usr/bin/env python3
"""What the `hf` engine costs on this machine: decoding against `transformers.generate`, and the price of verifying.

Prints ratios within one run; absolute figures belong to the machine they were taken on.

    python scripts/bench_engine.py --threads 1 --batches 1,4,16
    python scripts/bench_engine.py --linears --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specactor_ray.messages import SamplingParams
from specactor_ray.models.loading import load_model
from specactor_ray.models.packed_linear import PackedLinear
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.base import Drafts, TargetRequest
from specactor_ray.target.hf import HfEngine


def make_prompts(count: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(10, vocab_size) for _ in range(length)) for _ in range(count)]


def generate_tokens_per_s(model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> float:
    """`transformers.generate` on the same prompts; every row decodes exactly `tokens` tokens."""
    batch = torch.tensor([list(prompt) for prompt in prompts])
    sampling: dict[str, Any] = (
        {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature}
    )
    begin = time.perf_counter()
    model.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, min_new_tokens=tokens, **sampling
    )
    return len(prompts) * tokens / (time.perf_counter() - begin)


def engine_tokens_per_s(engine: HfEngine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> float:
    """The engine without drafts, prefill included as in `generate`."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature, max_tokens=tokens, seed=i, ignore_eos=True)
        engine.add(i, TargetRequest(str(i), tuple(prompt), params))
    begin = time.perf_counter()
    while engine.has_work():
        engine.step()
    return len(prompts) * tokens / (time.perf_counter() - begin)


def step_ms(
    engine: HfEngine, prompts: Sequence[Sequence[int]], tails: Sequence[Sequence[int]], steps: int
) -> list[float]:
    """Median milliseconds of a step that verifies this wrong tail in every row (so that all steps are alike), for each
    of `tails`. They take turns, so that a slow spell of the machine meets all of them."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(1.0, max_tokens=steps * len(tails) + max(map(len, tails)) + 8, seed=i, ignore_eos=True)
        engine.add(i, TargetRequest(str(i), tuple(prompt), params))
    while len(engine.decoding()) < len(prompts):
        engine.step()
    times: list[list[float]] = [[] for _ in tails]
    for step in range(steps * len(tails)):
        which = step % len(tails)
        begin = time.perf_counter()
        engine.step(Drafts.of(dict.fromkeys(range(len(prompts)), tails[which])))
        times[which].append(time.perf_counter() - begin)
    for i in range(len(prompts)):
        engine.remove(i)
    return [statistics.median(column) * 1e3 for column in times]


def decode_table(model_name: str, args: argparse.Namespace) -> Table:
    table = Table(title="plain decoding, tokens/s")
    for column in ("batch", "T", "transformers.generate", "hf engine", "ratio"):
        table.add_column(column, justify="right")
    reference = load_model(model_name)
    engine = HfEngine(RaggedModel(load_model(model_name), 1 << 30))
    for batch in track(args.batches, description="decoding"):
        prompts = make_prompts(batch, args.prompt_tokens, engine.vocab_size)
        for temperature in (0.0, 1.0):
            pairs = [
                (
                    generate_tokens_per_s(reference, prompts, args.tokens, temperature),
                    engine_tokens_per_s(engine, prompts, args.tokens, temperature),
                )
                for _ in range(args.repeats)
            ]
            ratio = statistics.median(ours / theirs for theirs, ours in pairs)
            theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
            table.add_row(str(batch), f"{temperature:g}", f"{theirs:.1f}", f"{ours:.1f}", f"{ratio:.2f}x")
    return table


def verify_table(model_name: str, args: argparse.Namespace) -> Table:
    table = Table(title="verify step, ms (ratio to no drafts)")
    table.add_column("batch", justify="right")
    for drafts in args.drafts:
        table.add_column(f"d={drafts}", justify="right")
    engine = HfEngine(RaggedModel(load_model(model_name), 1 << 30), max_step_tokens=2048)
    for batch in track(args.batches, description="verifying"):
        prompts = make_prompts(batch, args.prompt_tokens, engine.vocab_size)
        times = step_ms(engine, prompts, [[1] * drafts for drafts in args.drafts], args.steps)
        table.add_row(str(batch), *(f"{t:.1f} ({t / times[0]:.2f})" for t in times))
    return table


def linears_table(model_name: str, args: argparse.Namespace) -> Table:
    """A plain step beside its linear layers alone, by turns: the same layers, packed, on as many rows."""
    table = Table(title="plain step and its linears alone, ms (median, CPU time of all threads in parentheses)")
    for column in ("batch", "step", "linears", "ratio", "ratio by CPU time"):
        table.add_column(column, justify="right")
    model = RaggedModel(load_model(model_name, dtype=args.dtype), 1 << 30)
    engine, linears = HfEngine(model), [one for one in model.model.modules() if isinstance(one, PackedLinear)]

    @torch.inference_mode()
    def linears_alone(rows: int) -> None:
        for linear in linears:
            linear(torch.zeros(rows, linear.in_features, dtype=linear.dtype))

    for batch in track(args.batches, description="linears"):
        for i, prompt in enumerate(make_prompts(batch, args.prompt_tokens, engine.vocab_size)):
            params = SamplingParams(1.0, max_tokens=args.tokens + 8, seed=i, ignore_eos=True)
            engine.add(i, TargetRequest(str(i), tuple(prompt), params))
        while len(engine.decoding()) < batch:
            engine.step()
        rows = batch + model._padding(batch)
        times = []
        for _ in range(args.tokens):
            step = timed(engine.step)
            linears_alone(rows)  # the caches as it leaves them
            times.append((*step, *timed(functools.partial(linears_alone, rows))))
        for i in range(batch):
            engine.remove(i)
        step_s, step_cpu, alone_s, alone_cpu = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        ratios = [statistics.median(one[i] / one[2 + i] for one in times) for i in range(2)]
        steps = (f"{step_s:.1f} ({step_cpu:.1f})", f"{alone_s:.1f} ({alone_cpu:.1f})")
        table.add_row(str(batch), *steps, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", help="of the table of linears")
    parser.add_argument("--linears", action="store_true", help="a plain step beside its linear layers, nothing else")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], help="default 1,4,16")
    parser.add_argument("--drafts", type=numbers, default=[0, 1, 2, 4, 8, 15], help="draft tokens per row")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per row and run (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="steps per verify figure (default 15)")
    parser.add_argument("--repeats", type=int, default=3, help="paired runs per decode figure (default 3)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    machine = platform.processor() or platform.machine()
    console.print(f"{args.model}, {args.dtype}, {args.threads} thread(s), torch {torch.__version__}, {machine}")
    if args.linears:
        console.print(linears_table(args.model, args))
        return
    console.print(verify_table(args.model, args))
    console.print(decode_table(args.model, args))


if __name__ == "__main__":
    main()
