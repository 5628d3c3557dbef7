#!/usr/bin/env python3
"""What a target engine costs on this machine: plain decoding beside its peer, and the price of verifying.

The peer of `hf` is `transformers.generate`, that of `vllm` is `vllm.LLM` without speculation, which the engine has
configured. Both take turns in one process; run it in both orders of loading (`--peer-first`) and take the mean. Prints
ratios within one run; absolute figures belong to the machine they were taken on.

    python scripts/bench_engine.py --threads 1 --batches 1,4,16
    python scripts/bench_engine.py --linears --dtype bfloat16 --threads 2
    python scripts/bench_engine.py --backend vllm --threads 2 --dtype bfloat16 --tokens 128
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

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_model
from specactor_ray.models.packed_linear import PackedLinear
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.target.base import Drafts, TargetEngine, TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.target.registry import BACKENDS, build_engine

Prompts = Sequence[tuple[int, ...]]
Decode = Callable[[Prompts, int, float], object]
"""Decodes so many tokens of every prompt at a temperature, prefill included."""


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [tuple(rng.randrange(10, vocab_size) for _ in range(length)) for _ in range(count)]


def transformers_peer(config: TargetConfig) -> Decode:
    model = load_model(config.model, dtype=config.dtype)

    def decode(prompts: Prompts, tokens: int, temperature: float) -> object:
        batch = torch.tensor([list(prompt) for prompt in prompts])
        sampling = {"temperature": temperature} if temperature else {}
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        mask = torch.ones_like(batch)
        return model.generate(batch, attention_mask=mask, do_sample=temperature > 0, **limits, **sampling)

    return decode


def vllm_peer(config: TargetConfig) -> Decode:
    from specactor_ray.bench.vllm_peer import generate, start

    llm = start(config, config.max_batch, None)

    def decode(prompts: Prompts, tokens: int, temperature: float) -> object:
        sampling = SamplingParams(temperature, max_tokens=tokens, ignore_eos=True)
        return generate(llm, prompts, [sampling] * len(prompts))

    return decode


def decode_of(engine: TargetEngine) -> Decode:
    """The engine without drafts."""

    def decode(prompts: Prompts, tokens: int, temperature: float) -> object:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature, max_tokens=tokens, seed=i, ignore_eos=True)
            engine.add(i, TargetRequest(str(i), prompt, params))
        while engine.has_work():
            engine.step()
        return None

    return decode


def step_ms(engine: TargetEngine, prompts: Prompts, tails: Sequence[Sequence[int]], steps: int) -> list[float]:
    """Median milliseconds of a step that verifies this wrong tail in every row (so that all steps are alike), for each
    of `tails`. They take turns, so that a slow spell of the machine meets all of them."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(1.0, max_tokens=steps * len(tails) + max(map(len, tails)) + 8, seed=i, ignore_eos=True)
        engine.add(i, TargetRequest(str(i), prompt, params))
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


def decode_table(peer: Decode, engine: TargetEngine, args: argparse.Namespace) -> Table:
    table = Table(title="plain decoding: ms of a step, ratios of paired rounds (median, quartiles)")
    for column in ("batch", "T", "peer", "engine", "speed by wall clock", "speed by CPU time"):
        table.add_column(column, justify="right")
    ours = decode_of(engine)
    for batch in track(args.batches, description="decoding"):
        for temperature in (0.0, 1.0):
            rounds = []
            for i in range(args.repeats + 1):
                prompts = make_prompts(batch, args.prompt_tokens, engine.vocab_size, i)
                sides = (peer, ours) if i % 2 else (ours, peer)
                times = {side: timed(functools.partial(side, prompts, args.tokens, temperature)) for side in sides}
                rounds.append((*times[peer], *times[ours]))
            walls, cpus, our_walls, our_cpus = zip(*rounds[1:], strict=True)  # the first one warms up
            steps = [f"{statistics.median(times) * 1e3 / args.tokens:.2f}" for times in (walls, our_walls)]
            ratios = [spread(*pair) for pair in ((walls, our_walls), (cpus, our_cpus))]
            table.add_row(str(batch), f"{temperature:g}", *steps, *ratios)
    return table


def spread(theirs: Sequence[float], ours: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def verify_table(engine: TargetEngine, args: argparse.Namespace) -> Table:
    table = Table(title="verify step, ms (ratio to no drafts)")
    table.add_column("batch", justify="right")
    for drafts in args.drafts:
        table.add_column(f"d={drafts}", justify="right")
    for batch in track(args.batches, description="verifying"):
        prompts = make_prompts(batch, args.prompt_tokens, engine.vocab_size, 0)
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
        for i, prompt in enumerate(make_prompts(batch, args.prompt_tokens, engine.vocab_size, 0)):
            params = SamplingParams(1.0, max_tokens=args.tokens + 8, seed=i, ignore_eos=True)
            engine.add(i, TargetRequest(str(i), prompt, params))
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
    """Wall-clock and process CPU seconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--linears", action="store_true", help="hf: a plain step beside its linear layers, nothing else"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="hf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], help="default 1,4,16")
    parser.add_argument("--drafts", type=numbers, default=[0, 1, 2, 4, 8, 15], help="draft tokens per row")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per row and run (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="steps per verify figure (default 15; 0: no table)")
    parser.add_argument("--repeats", type=int, default=3, help="paired runs per decode figure (default 3)")
    parser.add_argument(
        "--peer-first", action="store_true", help="load the peer first (the later one has up to 4%% faster memory)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    environment = {"ENABLE_V1_MULTIPROCESSING": "0", "CPU_OMP_THREADS_BIND": "nobind", "USE_V2_MODEL_RUNNER": "0"}
    os.environ.update({f"VLLM_{name}": value for name, value in {**environment, "LOGGING_LEVEL": "ERROR"}.items()})
    config = TargetConfig(
        args.model,
        args.backend,
        dtype=args.dtype,
        compiled=args.compiled,
        max_model_len=max(1024, args.prompt_tokens + args.tokens),
        max_batch=max(args.batches),
        max_step_tokens=2048,
    )
    console = Console()
    machine = platform.processor() or platform.machine()
    console.print(
        f"{args.backend}, {args.model}, {args.dtype}, {args.threads} thread(s), {torch.__version__}, {machine}"
    )
    if args.linears:
        console.print(linears_table(args.model, args))
        return
    make_peer = vllm_peer if args.backend == "vllm" else transformers_peer
    peer = make_peer(config) if args.peer_first else None
    engine = build_engine(config, "cpu", max(args.drafts))
    if args.steps:
        console.print(verify_table(engine, args))
    peer = peer or make_peer(config)
    console.print(decode_table(peer, engine, args))


if __name__ == "__main__":
    main()
