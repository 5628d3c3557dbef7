"""A drafter as its verifier sees it: how to reach it, what it has been told, how long it takes to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from specactor_ray.messages import CommitBatch, DraftOpen, Features, TailBatch
from specactor_ray.queues.link import Link
from specactor_ray.spec.policy import Drafter
from specactor_ray.spec.table import RequestTable

_KEPT_POSITIONS = 2048
"""Newest positions of each request whose hidden states are kept for drafters that join later."""
MOST_READ = 4096
"""Most prompt and output tokens that one delivery opens with a model, which reads them before it drafts anything."""
_ANSWER_WEIGHT = 0.25
"""Weight of the newest answer in the moving mean of how long the drafter takes."""
_MOST_LAST = 1 << 20
"""Tokens of ended requests that wait for a drafter; an output whose end is dropped does not count as finished."""


@dataclass(slots=True)
class DrafterLink:
    """How to reach one drafter, and what it is."""

    method: str
    window: int
    link: Link[CommitBatch]
    max_batch: int = 64
    reads_features: bool = False
    """It is sent the target's hidden states."""
    looks_up: bool = False
    """It looks guesses up and learns from the outputs it follows."""
    inline: bool = False
    """It runs in the verifier's process and drafts only while a step waits for it."""


class FeatureLog:
    """Hidden states of the requests of a verifier, the newest of each."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Features]] = {}

    def keep(self, row: int, features: Features) -> None:
        """What a step exported of a request."""
        kept = self._kept.setdefault(row, [])
        kept.append(features)
        while features.end - kept[0].end >= _KEPT_POSITIONS:
            kept.pop(0)

    def since(self, row: int, position: int) -> tuple[Features, ...]:
        """Spans that reach past a sequence position."""
        return tuple(span for span in self._kept.get(row, ()) if span.end > position)

    def drop(self, row: int) -> None:
        """The request has left the row."""
        self._kept.pop(row, None)


class Seat:
    """A drafter and what it has yet to be told. For the verifier's thread.

    Args:
        number: Of the seat in the table.
        drafter_id: Incarnation id of the draft actor.
        link: How to reach it.
        table: The requests.
        features: Their hidden states.
    """

    def __init__(
        self, number: int, drafter_id: str, link: DrafterLink, table: RequestTable, features: FeatureLog
    ) -> None:
        self.link = link
        self.drafter = Drafter(drafter_id, link.method, link.window, link.max_batch, link.looks_up, link.inline)
        self._number, self._table, self._features = number, table, features
        self._closed: dict[tuple[int, int], bool] = {}
        """Row and generation of requests that it has to let go → whether they are finished."""
        self._last: list[tuple[int, int, int, np.ndarray]] = []
        """Row, generation, output position and tokens of requests that ended before it was told all of them."""
        self._last_tokens = 0
        self._told_windows = np.zeros(0, np.int16)
        self._told_features: dict[int, int] = {}
        """Row → sequence position up to which it has the target's states."""
        self._asked_at: float | None = None
        """When it was told of the newest commits; None: it has answered since."""

    # ---- what it has yet to be told ----

    def let_go(self, row: int, generation: int) -> None:
        """It does not draft for the request any more, or never should have."""
        self._closed.setdefault((row, generation), False)
        self._told_features.pop(row, None)

    def end(self, row: int, finished: bool) -> None:
        """A request that it drafts for leaves its row. A lookup learns from a finished output up to its end."""
        self._told_features.pop(row, None)
        table, told = self._table, int(self._table.told[self._number, row])
        if told < 0:
            return
        generation, tokens = int(table.generation[row]), table.output[row, told : table.committed[row]]
        if finished and self.link.looks_up and len(tokens):
            finished = self._last_tokens + len(tokens) <= _MOST_LAST
            if finished:
                self._last.append((row, generation, told, tokens.copy()))
                self._last_tokens += len(tokens)
        self._closed[row, generation] = finished

    def forget(self, handles: Sequence[tuple[int, int]]) -> None:
        """It does not know these requests: they have to be opened again."""
        table, number = self._table, self._number
        for row, generation in handles:
            if row < len(table.generation) and table.generation[row] == generation and table.assigned[number, row]:
                table.told[number, row] = -1

    def tell(self, verifier_id: str, now: float) -> None:
        """Tell it what it does not know yet, unless it is still busy with the last delivery."""
        if self.link.link.offer(lambda: self._news(verifier_id)):
            self._asked_at = now

    def _news(self, verifier_id: str) -> CommitBatch | None:
        table, number = self._table, self._number
        told, windows = table.told[number], table.windows[number]
        mine = np.flatnonzero(table.assigned[number])
        opened = tuple(self._opening(row) for row in self._to_open(mine[told[mine] < 0].tolist()))
        known = self._fit_windows(len(told))
        mine = mine[told[mine] >= 0]
        rows = mine[(told[mine] < table.committed[mine]) | (known[mine] != windows[mine])].astype(np.int32)
        closed, self._closed = tuple((*handle, finished) for handle, finished in self._closed.items()), {}
        last, self._last, self._last_tokens = self._last, [], 0
        if not (opened or closed or len(rows)):
            return None
        starts = told[rows]
        lengths, tokens = table.untold(number, rows)
        known[rows] = windows[rows]
        generations, told_windows = table.generation[rows], windows[rows].astype(np.int32)
        features = self._untold_features(rows) if self.link.reads_features else ()
        if last:
            ended = np.array([(*one[:3], len(one[3]), 0) for one in last], np.int32).T
            arrays = (rows, generations, starts, lengths, told_windows)
            rows, generations, starts, lengths, told_windows = (
                np.concatenate(pair) for pair in zip(ended, arrays, strict=True)
            )
            tokens = np.concatenate([*(one[3] for one in last), tokens])
        return CommitBatch(
            verifier_id, rows, generations, starts, lengths, told_windows, tokens, opened, closed, features
        )

    def _to_open(self, rows: list[int]) -> list[int]:
        """Those whose turn it is; the others follow with the next deliveries."""
        if self.link.looks_up:
            return rows
        requests, committed = self._table.requests, self._table.committed
        sizes = (len(requests[row].prompt_token_ids) + int(committed[row]) for row in rows)  # type: ignore[union-attr]
        return rows[: max(sum(size <= MOST_READ for size in accumulate(sizes)), 1)]

    def _opening(self, row: int) -> DraftOpen:
        table, request = self._table, self._table.requests[row]
        assert request is not None
        committed, window = int(table.committed[row]), int(table.windows[self._number, row])
        table.told[self._number, row], table.base[self._number, row] = committed, -1
        self._fit_windows(row + 1)[row] = window
        features: tuple[Features, ...] = ()
        if self.link.reads_features:
            features = self._features.since(row, -1)
            self._told_features[row] = features[-1].end if features else 0
        output = tuple(table.output[row, :committed].tolist())
        handle = (row, int(table.generation[row]), request.request_id)
        return DraftOpen(*handle, request.prompt_token_ids, output, request.sampling, window, features)

    def _fit_windows(self, size: int) -> np.ndarray:
        missing = size - len(self._told_windows)
        if missing > 0:
            self._told_windows = np.concatenate([self._told_windows, np.zeros(missing, np.int16)])
        return self._told_windows

    def _untold_features(self, rows: np.ndarray) -> tuple[tuple[int, tuple[Features, ...]], ...]:
        news = []
        for row in rows.tolist():
            if spans := self._features.since(row, self._told_features.get(row, 0)):
                self._told_features[row] = spans[-1].end
                news.append((row, spans))
        return tuple(news)

    # ---- how long it takes to answer ----

    def note_answer(self, arrived_at: float) -> None:
        """The first tail that knows the newest commit has arrived."""
        if self._asked_at is not None and not self.drafter.inline:
            took_s = max(arrived_at - self._asked_at - self.drafter.token_s, 0.0)
            self.drafter.answer_s += _ANSWER_WEIGHT * (took_s - self.drafter.answer_s)
            self._asked_at = None

    def note_silence(self, waited_s: float) -> None:
        """A wait of this length was in vain."""
        if self._asked_at is not None and not self.drafter.inline:
            self.drafter.answer_s = max(2.0 * self.drafter.answer_s, waited_s)

    def close_unknown(self, batch: TailBatch) -> None:
        """Let it close what it should not have open: an open that came late, or twice, is closed by nobody else."""
        table = self._table
        within = (batch.rows >= 0) & (batch.rows < len(table.generation))
        rows, generations = batch.rows[within], batch.generations[within]
        unwanted = (table.generation[rows] != generations) | ~table.assigned[self._number, rows]
        for handle in zip(rows[unwanted].tolist(), generations[unwanted].tolist(), strict=True):
            self.let_go(*handle)
