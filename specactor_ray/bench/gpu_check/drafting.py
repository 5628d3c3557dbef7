"""Stage `drafting`: a draft token of the product's drafter with random weights, with and without what a commit adds."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from specactor_ray.bench.gpu_check.models import random_model
from specactor_ray.bench.gpu_check.stage import Settings, Stage
from specactor_ray.core.environment import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.burst import LONGEST
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import packed

_OUTPUT = 800
"""Most tokens of a request: more than the timed calls draft and commit."""
_ACCEPTED = ("no row", "one row", "all rows")
"""Number of rows that accept their whole tail."""


def measure_drafting(stage: Stage) -> None:
    """Fill a point per number of rows: ms of a draft token of all rows, eager and (on a GPU) as a captured step: in an
    `extend` of one token and of `LONGEST`; and in turns of a commit and the window after it, in which the target has
    accepted the whole tail of no row, one, or all. `fallbacks`: why there is no graph, as in the log."""
    settings = stage.settings
    tokens = (max(settings.rows) + 8) * (settings.drafting_prompt + _OUTPUT + 256)
    model = random_model(settings.drafter, settings.dtype, settings.device, tokens)

    @functools.lru_cache(1)
    def drafter_of(rows: int) -> DraftModelProposer:
        return DraftModelProposer(model, max_batch=rows)  # captures its steps

    def measure(rows: int, way: str, work: int | str) -> str:
        drafter = drafter_of(rows)
        if way == "eager":
            drafter._bursts = None
        if isinstance(work, int):
            name, ms = f"{way} x{work} ms", _token_ms(stage, drafter, rows, work)
        else:
            name, ms = f"{way}, {work} accepted ms", _turn_ms(stage, drafter, rows, work)
        for slot in range(rows):
            drafter.close(slot, False)
        stage.point({"rows": rows}, **{name: ms})
        stage.entry["figures"]["fallbacks"] = fallbacks()
        return f"{name} {ms:.3g}"

    ways = ("eager",) if drafter_of(settings.rows[0])._bursts is None else ("graph", "eager")
    stage.each(itertools.product(settings.rows, ways, (1, LONGEST, *_ACCEPTED)), measure)


def _token_ms(stage: Stage, drafter: DraftModelProposer, rows: int, most: int) -> float:
    """Median ms of a token of every row, after random prompts."""
    _open(stage.settings, drafter, rows, _OUTPUT)
    drafter.burst = 1
    while (drafter.mirrors.ends[:rows] == stage.settings.drafting_prompt).any():  # compiles
        drafter.extend()
    drafter.burst = most
    return 1e3 * stage.median_s(drafter.extend) / most


def _turn_ms(stage: Stage, drafter: DraftModelProposer, rows: int, accepted: str) -> float:
    """Median ms of a token in turns of a commit and a window."""
    settings = stage.settings
    window, slots = settings.window, np.arange(rows, dtype=np.int32)
    _open(settings, drafter, rows, window)
    drafter.budget, drafter.burst = rows, window
    turns = itertools.count()

    def fill() -> None:
        while len(drafter.extend()):
            pass

    def turn() -> None:
        turn, commits = next(turns), list[tuple[int, int, list[int]]]()
        for row, (base, tail) in enumerate(drafter.tails(slots).rows()):
            whole = accepted == "all rows" or (accepted == "one row" and row == turn % rows)
            commits.append((row, base, [*tail, 0] if whole else [(tail[0] + 1) % settings.drafter["vocab_size"]]))
        drafter.commit(*packed(commits))
        fill()

    fill()
    return 1e3 * stage.median_s(turn) / window


def _open(settings: Settings, drafter: DraftModelProposer, rows: int, window: int) -> None:
    """Open a request with a random prompt in each of the first `rows` slots."""
    shape = rows, settings.drafting_prompt
    for slot, prompt in enumerate(np.random.default_rng(7).integers(0, settings.drafter["vocab_size"], shape)):
        sampling = SamplingParams(1.0, max_tokens=_OUTPUT, seed=slot)
        drafter.open(slot, f"r{slot}", tuple(prompt.tolist()), (), sampling, window)
