"""Acceptance of a drafter: recorded rollouts of the target, replayed through a proposer.

The replay is coupled speculation without the target: the proposer drafts its whole window from the last commit, the
part that agrees with the recorded output and one token of the target's own are committed, and so on. With keyed
sampling the output does not depend on drafts, so the figures are those of verifying every draft token.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console

from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import DrafterConfig
from specactor_ray.core.progress import PhaseProgress, show_tokens
from specactor_ray.core.ragged import common_prefix
from specactor_ray.distill.corpus import Corpus, CorpusRecord, target_config
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import States

_REPLAY_BATCH = 16


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts of drafts by result, without the step that reads the prompt and yields the first token."""

    window: int
    steps: int = 0
    """Number of verify steps."""
    committed: int = 0
    """Number of output tokens they committed: accepted ones and one of the target's own each (none after a stop)."""
    drafted: int = 0
    accepted: int = 0
    possible: list[int] = field(init=False)
    """Per draft position: number of steps at which a draft token could be right there, drafted or not."""
    reached: list[int] = field(init=False)
    """Per draft position: number of steps with a draft token there after only right ones."""
    right: list[int] = field(init=False)
    """Per draft position: number of these steps at which that token was right too."""

    def __post_init__(self) -> None:
        self.possible, self.reached, self.right = ([0] * self.window for _ in range(3))

    def add_step(self, tail: Sequence[int], truth: Sequence[int], room: int) -> int:
        """Compare a tail of at most `room` draft tokens (fewer than the window near the end of max_tokens) with the
        rest of the recorded output; returns the number of committed tokens."""
        accepted = common_prefix(tail, truth)
        committed = min(accepted + 1, len(truth))
        self.steps += 1
        self.committed += committed
        self.drafted += len(tail) if accepted < len(truth) else accepted  # no token after the end is right or wrong
        self.accepted += accepted
        for position in range(min(room, len(truth))):
            self.possible[position] += 1
        for position in range(min(accepted + 1, len(tail), len(truth))):
            self.reached[position] += 1
            self.right[position] += position < accepted
        return committed

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, including the target's own."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def survival(self) -> tuple[float, ...]:
        """S_1, S_2, ...: share of steps at which the first i draft tokens existed and were right. Depths beyond the end
        of an output are not counted at that step; depths that no step reaches are left out."""
        rates = [right / possible for right, possible in zip(self.right, self.possible, strict=True) if possible]
        return tuple(itertools.accumulate(rates, min))  # fewer steps reach greater depths, by chance with higher rates

    def facts(self) -> dict[str, Any]:
        """The figures as plain data; `by_position`: P(token i is right | all before it were), i = 1 to the window, or
        None if there was no such case."""
        pairs = zip(self.right, self.reached, strict=True)
        return {
            "window": self.window,
            "steps": self.steps,
            "tokens": self.committed,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "supply": self.drafted / self.steps if self.steps else 0.0,
            "by_position": [right / reached if reached else None for right, reached in pairs],
        }


class _Replay:
    """One record in replay through a proposer, in a row of a table."""

    def __init__(self, table: RequestTable, record: CorpusRecord, states: Any) -> None:
        self._table, self.record = table, record
        self._states, self._handed_out = states, 0
        # A prompt of several tokens is prefilled, and its last position yields the first token, without a draft.
        first = record.output_token_ids[: 1 if len(record.prompt_token_ids) > 1 else 0]
        name = f"replay-{record.index}"
        self.row = table.open(TargetRequest(name, record.prompt_token_ids, record.sampling, tuple(first)))

    @property
    def committed(self) -> int:
        return int(self._table.committed[self.row])

    @property
    def done(self) -> bool:
        return self.committed >= len(self.record.output_token_ids)

    def verify(self, tail: Sequence[int], counts: AcceptanceCounts) -> None:
        """Compare the tail, and commit as a target does."""
        output, begin = self.record.output_token_ids, self.committed
        room = min(max(self.record.sampling.max_tokens - begin - 1, 0), counts.window)
        count = counts.add_step(tail[:room], output[begin:], room)
        row, start, length = np.array([[self.row], [begin], [count]], np.int32)
        self._table.follow(row, start, length, np.array(output[begin : begin + count], np.int32))

    def states(self) -> States | None:
        """States of the positions up to the one that predicted the newest token, as a verifier streams them."""
        begin, end = self._handed_out, len(self.record.prompt_token_ids) + self.committed - 1
        if self._states is None or end == begin:
            return None
        from specactor_ray.models.weight_buckets import from_wire

        row, start, length = np.array([[self.row], [begin], [end - begin]], np.int32)
        self._handed_out = end
        return States(row, start, length, from_wire(self._states[begin:end]))

    def end(self, proposer: Proposer, view: TableView) -> None:
        """Close the row."""
        if proposer.traits.keeps_history:
            proposer.learn([view.finished(self.row)])
        self._table.close(self.row)


def draft_all(proposer: Proposer, view: TableView, rows: np.ndarray) -> None:
    """Draft until all tails are full or none can be lengthened."""
    while len(proposer.propose(view, rows)) and (view.table.length[view.seat, rows, 0] < view.window).any():
        pass


def replay(
    proposer: Proposer,
    records: Iterable[CorpusRecord],
    window: int,
    batch: int = 16,
    on_progress: Callable[[int], None] | None = None,
    width: int | None = None,
) -> AcceptanceCounts:
    """Replay recorded rollouts through a proposer, `batch` at once, with `window` draft tokens per step. Proposers that
    read states get the first `width` values of each recorded one (None: all). `on_progress` is called with the number
    of output tokens committed so far."""
    reads = proposer.traits.reads_features
    counts, waiting, running = AcceptanceCounts(window), deque(records), list[_Replay]()
    table = RequestTable(window)
    view = TableView(table, 0, window)
    while waiting or running:
        while waiting and len(running) < batch:
            record = waiting.popleft()
            states = record.states()[:, :width] if reads and record.source is not None else None
            running.append(_Replay(table, record, states))
        under_way = [entry for entry in running if not entry.done]
        view.states += [new for entry in under_way if (new := entry.states()) is not None]
        draft_all(proposer, view, np.array([entry.row for entry in under_way], np.int32))
        for entry in under_way:
            entry.verify(view.tail(entry.row).tolist(), counts)
        for entry in running:
            if entry.done:
                entry.end(proposer, view)
        running = [entry for entry in running if not entry.done]
        if on_progress is not None:
            on_progress(counts.committed)
    return counts


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
            counts = replay(proposer, records, window, _REPLAY_BATCH, show_tokens(progress), width)
        rows.append({"part": part, "temperature": temperature, **counts.facts()})
    return rows
