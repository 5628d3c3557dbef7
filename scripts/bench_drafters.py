#!/usr/bin/env python3
"""The history drafters `ngram` and `suffix`: what they cost, and how much they guess right.

`--cost`: CPU microseconds per committed and per drafted token, and bytes per token, over a history of made-up outputs.
Every answer of `extend` is counted, also one without a guess. With NUMBA_DISABLE_JIT=1 the same without numba.

`--acceptance`: records what a model answers (groups of samples of the same prompts, several epochs, same weights)
and replays it through the proposers: each step drafts, keeps what agrees with the recording and commits it with the
token that follows. Keyed sampling makes that exactly what a verifier would have committed.

    python scripts/bench_drafters.py --cost
    python scripts/bench_drafters.py --acceptance --temperature 1.0 --save outputs.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console
from rich.progress import track
from rich.table import Table

from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.evaluation import replay
from specactor_ray.draft.lookup import NgramProposer, SuffixProposer
from specactor_ray.draft.proposer import packed

HistoryProposer = NgramProposer | SuffixProposer
WINDOW = 8
GROUP = 8
COMMIT = 2


# ---- cost ----


class Writer:
    """Made-up outputs: each prompt has sentences of its own, samples say them in their own order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._phrases = [self._sentence() for _ in range(3000)]

    def _sentence(self) -> list[int]:
        return [min(49_000, int(self._rng.paretovariate(0.6))) for _ in range(self._rng.randint(4, 20))]

    def group(self, length: int) -> tuple[list[int], list[list[int]]]:
        """(prompt, outputs)."""
        known = self._rng.sample(self._phrases, 12) + [self._sentence() for _ in range(12)]
        outputs = []
        for _ in range(GROUP):
            output: list[int] = []
            while len(output) < length:
                output += self._rng.choice(known)
            outputs.append(output[:length])
        return self._sentence() * 3, outputs


@dataclass
class Spent:
    """Seconds and tokens."""

    commit_s: float = 0.0
    committed: int = 0
    draft_s: float = 0.0
    drafted: int = 0
    drafts: int = 0


def generate(proposer: HistoryProposer, writer: Writer, tokens: int, length: int) -> Spent:
    """Groups that grow in turns, two tokens a step, until `tokens` are committed."""
    spent = Spent()
    while spent.committed < tokens:
        prompt, outputs = writer.group(length)
        for slot in range(GROUP):
            proposer.open(slot, str(slot), prompt, [], SamplingParams(max_tokens=10**6, seed=slot), WINDOW)
        proposer.extend()
        for start in range(0, length, COMMIT):
            commits = packed([(slot, start, output[start : start + COMMIT]) for slot, output in enumerate(outputs)])
            begin = time.process_time()
            proposer.commit(*commits)
            middle = time.process_time()
            before = proposer.tails(commits[0]).lengths.sum()
            drafts = len(proposer.extend())
            spent.draft_s += time.process_time() - middle
            spent.commit_s += middle - begin
            spent.drafts += drafts
            spent.drafted += proposer.tails(commits[0]).lengths.sum() - before
        spent.committed += length * GROUP
        for slot in range(GROUP):
            proposer.close(slot, finished=True)
    return spent


def fill(proposer: HistoryProposer, tokens: int) -> None:
    """Bring in finished outputs, without drafting."""
    writer = Writer(1)
    while proposer.history_tokens < tokens - 5000:
        prompt, outputs = writer.group(500)
        for output in outputs:
            proposer.open(0, "filling", prompt, output, SamplingParams(), WINDOW)
            proposer.close(0, finished=True)


def traced_bytes(make: Callable[[], HistoryProposer], tokens: int) -> float:
    """Bytes that a filled history takes, per token."""
    make()  # compiling is not part of it
    tracemalloc.start()
    proposer = make()
    fill(proposer, tokens)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / proposer.history_tokens


def cost_table(sizes: Sequence[int]) -> Table:
    table = Table(title=f"cost (windows of {WINDOW}, commits of {COMMIT} tokens, groups of {GROUP})")
    for column in ("method", "history", "µs / committed token", "µs / drafted token", "µs / answer", "bytes / token"):
        table.add_column(column, justify="right")
    for size in sizes:
        for name, proposer_class in (("ngram", NgramProposer), ("suffix", SuffixProposer)):

            def make(proposer_class: Any = proposer_class, size: int = size) -> HistoryProposer:
                return proposer_class(history_tokens=size)

            per_token = traced_bytes(make, size)
            proposer = make()
            fill(proposer, size)
            spent = generate(proposer, Writer(2), min(size, 40_000), 500)
            table.add_row(
                name, f"{size:,}", f"{spent.commit_s / spent.committed * 1e6:.2f}",
                f"{spent.draft_s / max(spent.drafted, 1) * 1e6:.2f}", f"{spent.draft_s / spent.drafts * 1e6:.1f}",
                f"{per_token:.0f}",
            )  # fmt: skip
    return table


# ---- acceptance ----


Epochs = list[list[CorpusRecord]]
"""What the model answered in each epoch."""


def record(args: argparse.Namespace, console: Console) -> Epochs:
    """Let the model answer every prompt `GROUP` times in every epoch."""
    import torch

    from specactor_ray.config.schema import TargetConfig
    from specactor_ray.distill.corpus import RecordStore, RolloutRequest, collect
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.rollout.prompts import encode_prompt, read_prompts
    from specactor_ray.sampling.seeds import derive_seed
    from specactor_ray.target.registry import build_engine

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    prompts = [encode_prompt(tokenizer, prompt, chat=True) for prompt in read_prompts(args.prompts, args.limit)]
    engine = build_engine(TargetConfig(model=args.model, dtype="float32"), "cpu", 0)
    base = SamplingParams(args.temperature, max_tokens=args.tokens)
    epochs = []
    with console.status("recording outputs"):
        for epoch in range(args.epochs):
            requests = []
            for number, sample in itertools.product(range(len(prompts)), range(GROUP)):
                sampling = replace(base, seed=derive_seed(100 + epoch, number, sample))
                requests.append(RolloutRequest(number * GROUP + sample, prompts[number], sampling))
            epochs.append(collect(engine, requests, RecordStore(None, f"epoch-{epoch}")))
    return epochs


def load(path: Path) -> Epochs:
    """What `--save` wrote."""
    epochs = json.loads(path.read_text())
    for row in itertools.chain(*epochs):
        row["sampling"] = SamplingParams(**row["sampling"])
    return [[CorpusRecord(**row) for row in epoch] for epoch in epochs]


CONTENDERS: dict[str, Callable[[], HistoryProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "suffix, majority instead of noise": lambda: SuffixProposer(shared_noise=False),
    "suffix, own text only": lambda: SuffixProposer(history_tokens=0),
    "suffix, min_probability 0.3": lambda: SuffixProposer(min_probability=0.3),
    "suffix, min_probability 0.05": lambda: SuffixProposer(min_probability=0.05),
    "suffix, length_factor 4": lambda: SuffixProposer(length_factor=4.0),
    "suffix, length_factor 1": lambda: SuffixProposer(length_factor=1.0),
    "suffix, min_match 1": lambda: SuffixProposer(1),
    "ngram, min_match 1": lambda: NgramProposer(1),
}


def acceptance_table(epochs: Epochs, batch: int) -> Table:
    records = [record for epoch in epochs for record in epoch]
    tokens = sum(len(one.output_token_ids) for one in records)
    size = f"{len(records) // len(epochs)} outputs x {len(epochs)} epochs, {tokens:,} tokens"
    table = Table(title=f"{size}, T={records[0].sampling.temperature:g}")
    table.add_column("method")
    for number in range(len(epochs)):
        table.add_column(f"epoch {number + 1}: tokens/step", justify="right")
        table.add_column("drafted/step", justify="right")
        table.add_column("accepted", justify="right")
    for name, make in track(CONTENDERS.items(), description="replaying"):
        proposer, cells = make(), []
        for epoch in epochs:
            facts = replay(proposer, epoch, WINDOW, batch).facts()
            cells += [
                f"{facts['acceptance_length']:.3f}",
                f"{facts['supply']:.2f}",
                f"{facts['acceptance_rate']:.0%}",
            ]
        table.add_row(name, *cells)
    return table


def main() -> None:
    numbers = lambda text: [int(float(part)) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--sizes", type=numbers, default=[100_000, 1_000_000], help="history tokens, default 1e5,1e6")
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default="conf/prompts/demo.jsonl")
    parser.add_argument("--limit", type=int, default=None, help="use only the first so many prompts")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output (default 96)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16, help="outputs that grow at once (default 16)")
    parser.add_argument("--save", type=Path, help="keep the recorded outputs here (JSON)")
    parser.add_argument("--load", type=Path, help="replay these instead of recording")
    args = parser.parse_args()
    if not args.cost and not args.acceptance:
        parser.error("name what to measure: --cost, --acceptance")
    console = Console()
    console.print(f"Python {platform.python_version()}, {platform.processor() or platform.machine()}")
    if args.cost:
        console.print(cost_table(args.sizes))
    if args.acceptance:
        epochs = load(args.load) if args.load else record(args, console)
        if args.save:
            args.save.write_text(json.dumps([[asdict(one) for one in epoch] for epoch in epochs]))
        console.print(acceptance_table(epochs, args.batch))


if __name__ == "__main__":
    main()
