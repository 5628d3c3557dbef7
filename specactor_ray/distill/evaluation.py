"""Acceptance of a drafter: recorded rollouts of the target, replayed through a proposer.

The replay is coupled speculation without the target: the proposer drafts its whole window from the last commit, the
part that agrees with the recorded output and one token of the target's own are committed, and so on. With keyed
sampling the output does not depend on drafts, so the figures are those of verifying every draft token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import DrafterConfig
from specactor_ray.core.progress import PhaseProgress, show_tokens
from specactor_ray.core.ragged import common_prefix
from specactor_ray.distill.corpus import Corpus, CorpusRecord, target_config
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.models.weight_buckets import from_wire
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import States

_REPLAY_BATCH = 16


Step = tuple[int, int, int]
"""A verify step of a replay: drafted, accepted and committed tokens."""
Judge = Callable[[RequestTable, int, CorpusRecord, Sequence[int], int], Step]
"""Judges the tail of a row against the record, and commits: table, row, record, tail, window."""


def facts_of(steps: Sequence[Step], window: int) -> dict[str, Any]:
    """Figures of a replay as plain data; `by_position`: P(token i is right | all before it were), i = 1 to the window,
    or None if there was no such case."""
    drafted, accepted, committed = np.array(steps, np.int64).reshape(-1, 3).T
    reached, at = np.minimum(accepted + 1, drafted), np.arange(window)[:, None]
    right_and_reached = zip((accepted > at).sum(1).tolist(), (reached > at).sum(1).tolist(), strict=True)
    return {
        "window": window,
        "steps": len(steps),
        "tokens": int(committed.sum()),
        "acceptance_length": int(committed.sum()) / max(len(steps), 1),
        "acceptance_rate": int(accepted.sum()) / max(int(drafted.sum()), 1),
        "supply": int(drafted.sum()) / max(len(steps), 1),
        "by_position": [right / count if count else None for right, count in right_and_reached],
    }


@dataclass(slots=True)
class _Replayed:
    """A record in replay."""

    record: CorpusRecord
    states: torch.Tensor | None
    """The target's hidden states, if the proposer reads them."""
    handed_out: int = 0
    """Number of positions whose states the proposer has."""


def replay(
    proposer: Proposer,
    records: Iterable[CorpusRecord],
    window: int,
    batch: int = 16,
    on_progress: Callable[[int], None] | None = None,
    width: int | None = None,
    judge: Judge | None = None,
) -> list[Step]:
    """Replay recorded rollouts through a proposer, `batch` at once, with `window` draft tokens per step. The step that
    reads a prompt and yields the first token is left out. Proposers that read states get the first `width` values of
    each recorded one (None: all). `on_progress` is called with the number of output tokens committed so far. `judge`
    verifies and commits instead of the target."""
    steps, waiting, running = list[Step](), deque(records), dict[int, _Replayed]()
    table = RequestTable(window)
    view = TableView(table, 0, window)
    while waiting or running:
        while waiting and len(running) < batch:
            record = waiting.popleft()
            states = from_wire(record.states()[:, :width]) if proposer.traits.reads_features else None
            running[_open(table, record)] = _Replayed(record, states)
        rows = [row for row, one in running.items() if table.committed[row] < len(one.record.output_token_ids)]
        view.states += [new for row in rows if (new := _new_states(table, row, running[row])) is not None]
        at = np.array(rows, np.int32)
        while len(proposer.propose(view, at)) and (table.length[view.seat, at, 0] < window).any():
            pass  # until all tails are full or none can be lengthened
        steps += [(judge or _verify)(table, row, running[row].record, view.tail(row).tolist(), window) for row in rows]
        for row in [row for row, one in running.items() if table.committed[row] >= len(one.record.output_token_ids)]:
            if proposer.traits.keeps_history:
                proposer.learn([view.finished(row)])
            table.close(row)
            del running[row]
        if on_progress is not None:
            on_progress(sum(committed for _, _, committed in steps))
    return steps


def _open(table: RequestTable, record: CorpusRecord) -> int:
    """A prompt of several tokens is prefilled, and its last position yields the first token, without a draft."""
    first = record.output_token_ids[: 1 if len(record.prompt_token_ids) > 1 else 0]
    name = f"replay-{record.index}"
    return table.open(TargetRequest(name, record.prompt_token_ids, record.sampling, tuple(first)))


def _verify(table: RequestTable, row: int, record: CorpusRecord, tail: Sequence[int], window: int) -> Step:
    """Compare a tail with the rest of the recorded output, and commit as a target does."""
    begin = int(table.committed[row])
    truth = record.output_token_ids[begin:]
    tail = tail[: min(max(record.sampling.max_tokens - begin - 1, 0), window)]
    accepted = common_prefix(tail, truth)
    committed = min(accepted + 1, len(truth))
    at, start, length = np.array([[row], [begin], [committed]], np.int32)
    table.follow(at, start, length, np.array(truth[:committed], np.int32))
    drafted = len(tail) if accepted < len(truth) else accepted  # no token after the end is right or wrong
    return drafted, accepted, committed


def _new_states(table: RequestTable, row: int, one: _Replayed) -> States | None:
    """States of the positions up to the one that predicted the newest token, as a verifier streams them."""
    begin, end = one.handed_out, len(one.record.prompt_token_ids) + int(table.committed[row]) - 1
    if one.states is None or end == begin:
        return None
    one.handed_out = end
    at, start, length = np.array([[row], [begin], [end - begin]], np.int32)
    return States(at, start, length, one.states[begin:end])


def measure(drafter: DrafterConfig, width: int, corpus: Corpus, console: Console) -> list[dict[str, Any]]:
    """Replay every held-out part; the head reads the first `width` values of each recorded state."""
    rows, recipe, window = [], corpus.recipe, corpus.recipe.window
    settled = replace(drafter, dtype="float32", kv_cache_gb=recipe.kv_cache_gb, max_batch=_REPLAY_BATCH, window=window)
    section = DrafterSpec(**vars(settled), traits=traits(drafter.method))
    for part, records in corpus.held_out().items():
        temperature = records[0].sampling.temperature
        proposer = build_proposer(section, target_config(recipe), recipe.device)
        total = sum(len(record.output_token_ids) for record in records)
        with PhaseProgress(console, f"replay, T={temperature:g}", total) as progress:
            steps = replay(proposer, records, window, _REPLAY_BATCH, show_tokens(progress), width)
        rows.append({"part": part, "temperature": temperature, **facts_of(steps, window)})
    return rows
