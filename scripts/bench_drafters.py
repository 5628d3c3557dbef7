#!/usr/bin/env python3
"""What the lookups `ngram` and `suffix` cost: CPU microseconds per committed and per drafted token and per answer of
`extend` (also one without a guess), and bytes per token, over a history of made-up outputs.

    python scripts/bench_drafters.py --sizes 100000,1000000
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Annotated

import typer

from specactor_ray.bench.micro import JsonFile, Point, refuse_existing, run_script, show_points
from specactor_ray.cli.options import parse_numbers
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup.proposer import NgramProposer, SuffixProposer
from specactor_ray.draft.proposer import packed

Lookup = NgramProposer | SuffixProposer
WINDOW, GROUP, COMMIT, LENGTH = 8, 8, 2, 500
"""Draft tokens, samples of a prompt, tokens of a commit, and tokens of an output."""


class Writer:
    """Made-up outputs: each prompt has sentences of its own, which its samples repeat in their own order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._phrases = [self._sentence() for _ in range(3000)]

    def _sentence(self) -> list[int]:
        return [min(49_000, int(self._rng.paretovariate(0.6))) for _ in range(self._rng.randint(4, 20))]

    def group(self) -> tuple[list[int], list[list[int]]]:
        """A prompt and its outputs."""
        known = self._rng.sample(self._phrases, 12) + [self._sentence() for _ in range(12)]
        outputs = []
        for _ in range(GROUP):
            output: list[int] = []
            while len(output) < LENGTH:
                output += self._rng.choice(known)
            outputs.append(output[:LENGTH])
        return self._sentence() * 3, outputs


def timed(proposer: Lookup, tokens: int) -> Point:
    """Groups of outputs that grow side by side, until `tokens` are committed."""
    writer, commit_s, draft_s = Writer(2), 0.0, 0.0
    committed = drafted = answers = 0
    while committed < tokens:
        prompt, outputs = writer.group()
        for slot in range(GROUP):
            proposer.open(slot, str(slot), prompt, [], SamplingParams(max_tokens=10**6, seed=slot), WINDOW)
        proposer.extend()
        for start in range(0, LENGTH, COMMIT):
            commits = packed([(slot, start, output[start : start + COMMIT]) for slot, output in enumerate(outputs)])
            begin = time.process_time()
            proposer.commit(*commits)
            commit_s += time.process_time() - begin
            before = proposer.tails(commits[0]).lengths.sum()
            begin = time.process_time()
            answers += len(proposer.extend())
            draft_s += time.process_time() - begin
            drafted += int(proposer.tails(commits[0]).lengths.sum() - before)
        committed += LENGTH * GROUP
        for slot in range(GROUP):
            proposer.close(slot, finished=True)
    return {
        "us / committed token": 1e6 * commit_s / committed,
        "us / drafted token": 1e6 * draft_s / max(drafted, 1),
        "us / answer": 1e6 * draft_s / answers,
    }


def filled(make: Callable[[], Lookup], tokens: int) -> Lookup:
    """A proposer whose history holds about so many tokens of finished outputs."""
    writer, proposer = Writer(1), make()
    while proposer.history_tokens < tokens - 5000:
        prompt, outputs = writer.group()
        for output in outputs:
            proposer.open(0, "filling", prompt, output, SamplingParams(), WINDOW)
            proposer.close(0, finished=True)
    return proposer


def bytes_per_token(make: Callable[[], Lookup], tokens: int) -> float:
    make()  # compiling is not part of it
    tracemalloc.start()
    proposer = filled(make, tokens)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / proposer.history_tokens


def main(
    sizes: Annotated[str, typer.Option(help="Tokens of the history.")] = "100000,1000000", json_file: JsonFile = None
) -> None:
    refuse_existing(json_file, "--json")
    points = []
    for size in parse_numbers("--sizes", sizes):
        for kind in (NgramProposer, SuffixProposer):

            def make(kind: type[Lookup] = kind, size: int = size) -> Lookup:
                return kind(history_tokens=size)

            figures = timed(filled(make, size), min(size, 40_000))
            points.append(
                {"method": make().method, "history": size, **figures, "bytes / token": bytes_per_token(make, size)}
            )
    show_points(f"cost (windows of {WINDOW}, commits of {COMMIT} tokens, groups of {GROUP})", points, json_file)


if __name__ == "__main__":
    run_script(main)
