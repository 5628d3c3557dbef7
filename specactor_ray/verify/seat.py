"""The verifier's state of a drafter: its link, and the data sent to it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import CommitBatch, DraftOpen, Features
from specactor_ray.verify.policy import Drafter
from specactor_ray.verify.table import RequestTable

_KEPT_POSITIONS = 2048
"""Number of newest positions of each request whose hidden states are kept for drafters that join later."""
MOST_READ = 4096
"""Most prompt and output tokens of the requests that a delivery opens at a model; a single request may have more."""


@dataclass(slots=True)
class DrafterLink:
    """Link and specification of one drafter."""

    spec: DrafterSpec
    link: Link[CommitBatch]


@dataclass(slots=True)
class HostedDrafter(DrafterLink):
    """A drafter in the verifier's own process, which the verifier's loop runs; `link` leads to it."""

    loop: DraftLoop


class FeatureLog:
    """Newest hidden states of each request of a verifier."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Features]] = {}

    def keep(self, row: int, features: Features, read: int) -> None:
        """Add a step's exported states of a request. Spans of its initial `read` positions expire together."""
        kept = self._kept.setdefault(row, [])
        kept.append(features)
        while features.end - max(kept[0].end, read) >= _KEPT_POSITIONS:
            kept.pop(0)

    def since(self, row: int, position: int) -> tuple[Features, ...]:
        """Spans of states that reach past a sequence position."""
        kept = self._kept.get(row, [])
        return tuple(kept[bisect.bisect_right(kept, position, key=lambda span: span.end) :])

    def drop(self, row: int) -> None:
        """Drop the states of a row whose request has left."""
        self._kept.pop(row, None)


class DrafterSeat(Drafter):
    """A drafter and the data that is still to be sent to it. For the verifier's thread.

    `number`: index of the seat in the table; `session`: see `CommitBatch`; `drafter_id`: incarnation id of the draft
    actor.
    """

    def __init__(
        self, number: int, session: int, drafter_id: str, link: DrafterLink, table: RequestTable, features: FeatureLog
    ) -> None:
        super().__init__(drafter_id, link.spec, hosted=isinstance(link, HostedDrafter))
        self.link, self.number, self._table = link.link, number, table
        self.postponed = 0
        """Number of deliveries left out since its last turn."""
        self._session, self._begun = session, False
        self._features = features if self.spec.traits.reads_features else FeatureLog()
        # Row and generation of requests to close at the drafter → whether they are finished.
        self._closed: dict[tuple[int, int], bool] = {}
        # Row, generation, output position and tokens of the unsent ends of finished requests.
        self._last: list[tuple[int, int, int, np.ndarray]] = []

    def let_go(self, row: int, generation: int) -> None:
        """Close a request for which the drafter does not draft any more, or should not have drafted."""
        self._closed.setdefault((row, generation), False)

    def end(self, row: int, finished: bool) -> None:
        """Close a request of the drafter that leaves its row. A request that is still to be opened (again) is closed,
        too, because the drafter may keep a place for it."""
        table, told = self._table, int(self._table.told[self.number, row])
        finished = finished and told >= 0
        generation, tokens = int(table.generation[row]), table.output[row, told : table.committed[row]]
        if finished and self.spec.traits.keeps_history and len(tokens):
            self._last.append((row, generation, told, tokens.copy()))
        self._closed[row, generation] = finished

    def forget(self, handles: Sequence[tuple[int, int]]) -> None:
        """Open these requests again, which the drafter has lost."""
        table, number = self._table, self.number
        for row, generation in handles:
            if row < len(table.generation) and table.generation[row] == generation and table.assigned[number, row]:
                table.told[number, row] = -1

    def news(self, verifier_id: str) -> CommitBatch | None:
        """The batch of unsent data, which counts as sent from now on. None if there is none; the first batch, which
        begins the session, is always sent."""
        table, number = self._table, self.number
        told, mine = table.told[number], np.flatnonzero(table.assigned[number])
        deliveries, self.postponed = 1 + self.postponed, 0
        opened = tuple(self._opening(row) for row in self._to_open(mine[told[mine] < 0].tolist(), deliveries))
        rows = mine[(told[mine] >= 0) & (told[mine] < table.committed[mine])].astype(np.int32)
        closed, self._closed = tuple((*handle, finished) for handle, finished in self._closed.items()), {}
        last, self._last = self._last, []
        if self._begun and not (opened or closed or len(rows)):
            return None
        self._begun = True
        features = self._untold_features(rows)
        starts, generations = told[rows], table.generation[rows]
        lengths, tokens = table.untold(number, rows)
        if last:
            ended = np.array([(*one[:3], len(one[3])) for one in last], np.int32).T
            pairs = zip(ended, (rows, generations, starts, lengths), strict=True)
            rows, generations, starts, lengths = map(np.concatenate, pairs)
            tokens = np.concatenate([*(one[3] for one in last), tokens])
        arrays = (rows, generations, starts, lengths, tokens)
        return CommitBatch(verifier_id, *arrays, opened, closed, features, self._session)

    def _to_open(self, rows: list[int], deliveries: int) -> list[int]:
        """The first of these requests that fit into this many deliveries; the others follow with the next one."""
        if self.spec.traits.looks_up:
            return rows
        requests, committed = self._table.requests, self._table.committed
        ends = accumulate(len(requests[row].prompt_token_ids) + int(committed[row]) for row in rows)
        return rows[: max(len(list(takewhile(lambda end: end <= deliveries * MOST_READ, ends))), 1)]

    def _opening(self, row: int) -> DraftOpen:
        table, request = self._table, self._table.requests[row]
        committed = int(table.committed[row])
        table.told[self.number, row], table.base[self.number, row] = committed, -1
        output = tuple(table.output[row, :committed].tolist())
        handle, features = (row, int(table.generation[row]), request.request_id), self._features.since(row, -1)
        return DraftOpen(*handle, request.prompt_token_ids, output, request.sampling, self.spec.window, features)

    def _untold_features(self, rows: np.ndarray) -> tuple[tuple[int, tuple[Features, ...]], ...]:
        """States from the newest sent token on, whose own state becomes known with the next commit."""
        if not self.spec.traits.reads_features:
            return ()
        requests, told = self._table.requests, self._table.told[self.number]
        known = ((row, len(requests[row].prompt_token_ids) + int(told[row]) - 1) for row in rows.tolist())
        return tuple((row, spans) for row, position in known if (spans := self._features.since(row, position)))
