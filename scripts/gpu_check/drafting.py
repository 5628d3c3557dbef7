"""Stage `drafting`: a draft token of the product's drafter with random weights, with and without what a commit adds."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from gpu_check.models import random_model
from gpu_check.stage import Stage
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.burst import LONGEST
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView

_OUTPUT = 800
"""Most tokens of a request: more than the timed calls draft and commit."""


def measure_drafting(stage: Stage) -> None:
    """Fill a point per number of rows: ms of a draft token of all rows, eager and (on a GPU) as a captured step: in an
    `extend` of one token and of `LONGEST`; and in turns, in which the target commits the whole tail of every row and a
    token more, and the drafter reads two of these and fills its window. `fallbacks`: why there is no graph, as in the
    log."""
    settings = stage.settings
    shape = max(settings.rows), settings.drafting_prompt
    prompts = np.random.default_rng(7).integers(0, settings.drafter["vocab_size"], shape)
    tokens = (max(settings.rows) + 8) * (settings.drafting_prompt + _OUTPUT + 256)
    model = random_model(settings.drafter, settings.dtype, settings.device, tokens)

    @functools.lru_cache(1)
    def drafter_of(rows: int) -> DraftModelProposer:
        return DraftModelProposer(model, max_batch=rows)  # captures its steps

    def measure(rows: int, way: str, work: str) -> str:
        drafter = drafter_of(rows)
        if way == "eager":
            drafter._bursts = None
        turns, count = work == "turn", settings.window if work == "turn" else int(work[1:])
        window = count if turns else _OUTPUT
        table = RequestTable(window)
        view = TableView(table, 0, window)
        for row, prompt in enumerate(prompts[:rows].tolist()):
            table.open(TargetRequest(f"r{row}", tuple(prompt), SamplingParams(1.0, max_tokens=_OUTPUT, seed=row)))
        mine = np.arange(rows, dtype=np.int32)
        draft = functools.partial(drafter.propose, view, mine)
        drafter.burst = 1
        while not table.length[0, :rows, 0].all():
            draft()
        drafter.burst = count

        def turn() -> None:
            while len(draft()):
                pass
            commit = np.pad(table.tail[0, :rows, 0], ((0, 0), (0, 1)))
            table.follow(mine, table.committed[mine], np.full(rows, count + 1, np.int32), commit.ravel())

        try:
            ms = 1e3 * stage.median_s(turn if turns else draft) / count
        finally:
            drafter.reset()
        stage.point({"rows": rows}, **{f"{way} {work} ms": ms})
        stage.entry["figures"]["fallbacks"] = fallbacks()
        return f"{ms:.3g} ms"

    ways = ("eager",) if drafter_of(settings.rows[0])._bursts is None else ("graph", "eager")
    stage.each(itertools.product(settings.rows, ways, ("x1", f"x{LONGEST}", "turn")), measure)
