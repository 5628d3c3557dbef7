"""Cost of keyed sampling per row of logits on one CPU thread, beside torch's softmax and argmax."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import sample_rows, verify_arrays, warm_up
from specactor_ray.sampling.rules import Rules

CASES: dict[str, dict[str, float]] = {
    "T=0": {"temperature": 0.0},
    "T=0.6": {"temperature": 0.6},
    "T=1": {"temperature": 1.0},
    "T=1, top-k 50": {"top_k": 50},
    "T=1, top-p 0.95": {"top_p": 0.95},
    "T=1, top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}


def peaked_logits(rows: int, vocab_size: int) -> torch.Tensor:
    """Gaussian logits of standard deviation 3 with five strong peaks per row, float32."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(rows, vocab_size, generator=generator)
    peaks = torch.randint(vocab_size, (rows, 5), generator=generator)
    return logits.scatter_add(1, peaks, torch.tensor([[14.0, 12.0, 11.0, 10.0, 9.0]]).expand(rows, 5))


def median_ms(call: Callable[[], object], repeats: int, rows: int) -> float:
    """Median CPU milliseconds per row over `repeats` calls that each do `rows` rows."""
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times[2:]) * 1e3 / rows


def costs(vocab_size: int, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds per row of every case at one vocabulary size."""
    logits = peaked_logits(rows, vocab_size)
    positions = list(range(rows))
    result = {}
    for name, rule in CASES.items():
        params = [SamplingParams(seed=i, **rule) for i in range(rows)]  # type: ignore[arg-type]
        result[name] = median_ms(lambda params=params: sample_rows(logits, params, positions), repeats, rows)
    params = [SamplingParams(seed=i) for i in range(rows)]
    margins = median_ms(lambda: sample_rows(logits, params, positions, record_margins=True), repeats, rows)
    result["T=1, with margins"] = margins
    half, wrong, rules = np.arange(rows // 2), np.full(rows // 2, -1, np.int32), Rules(rows)
    rules.write(range(rows), params, [0] * rows)
    offsets = np.arange(len(half) + 1)
    missed = median_ms(lambda: verify_arrays(logits, 2 * half, offsets, wrong, 2 * half, half, rules), repeats, rows)
    result["T=1, verify, half of the rows past a mismatch"] = missed
    result["torch softmax"] = median_ms(lambda: torch.softmax(logits, dim=-1), repeats, rows)
    result["torch argmax"] = median_ms(lambda: torch.argmax(logits, dim=-1), repeats, rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[49_152, 151_936], help="vocabulary sizes")
    parser.add_argument("--rows", type=int, default=16, help="rows per call (default 16)")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls per figure (default 30)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    columns = {size: costs(size, args.rows, args.repeats) for size in args.vocab_size}
    table = Table(title=f"CPU ms per row, median of {args.repeats} calls of {args.rows} rows, 1 thread")
    table.add_column("")
    for size in columns:
        table.add_column(f"V={size:,}", justify="right")
    for name in next(iter(columns.values())):
        table.add_row(name, *(f"{column[name]:.3f}" for column in columns.values()))
    console = Console()
    console.print(table)
    overhead = median_ms(
        lambda: sample_rows(torch.zeros(16, 8), [SamplingParams(seed=i) for i in range(16)], list(range(16))), 200, 1
    )
    console.print(f"Python around the kernel (16 rows, V=8): {overhead:.3f} ms per call")


if __name__ == "__main__":
    main()
