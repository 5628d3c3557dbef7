"""The requests that a drafter follows: what verifiers say reaches the proposer, and its tails reach the verifiers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specactor_ray.drafters.base import Commits, Proposer
from specactor_ray.messages import CommitBatch, DraftOpen, TailBatch
from specactor_ray.queues.link import Link

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Verifier:
    """A verifier that is drafted for."""

    session: int
    """The newest of its sessions; see `CommitBatch`."""
    mirrors: dict[int, str] = field(default_factory=dict)
    """Row → request."""
    changed: dict[str, _Place] = field(default_factory=dict)
    """Requests whose tails it has yet to be told."""
    lost: dict[int, int] = field(default_factory=dict)
    """Rows that have to be opened again → generation."""


class _Place(NamedTuple):
    """Where a request runs."""

    verifier: _Verifier
    row: int
    generation: int


class Mirrors:
    """Keeps the proposer consistent with what verifiers say. For the loop's thread.

    Args:
        drafter_id: Incarnation id of the draft actor; goes into every message.
        proposer: The draft method.
    """

    def __init__(self, drafter_id: str, proposer: Proposer) -> None:
        self.counters = dict.fromkeys(("opens", "resyncs", "extends", "tails", "failures"), 0)
        """What was done so far, by the loop and here."""
        self._drafter_id, self._proposer = drafter_id, proposer
        self._verifiers: dict[str, _Verifier] = {}
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        """Open requests."""
        return len(self._places)

    # ---- what verifiers say ----

    def take(self, message: CommitBatch) -> None:
        """Follow a message, unless it is of an old session; where that fails, only its request is lost."""
        verifier = self._verifiers.get(message.verifier_id)
        if verifier is None or message.session > verifier.session:
            self._drop(message.verifier_id)
            verifier = self._verifiers[message.verifier_id] = _Verifier(message.session)
        elif message.session < verifier.session:
            return
        self._commit(verifier, message)
        for row, generation, finished in message.closed:
            request_id = self._find(verifier, row, generation)
            if request_id is not None:
                self._close(request_id, finished)
        for opened in message.opened:
            try:
                self._open(verifier, opened)
            except Exception as error:  # noqa: BLE001 - it is logged
                self._fail(opened.request_id, error)

    def _find(self, verifier: _Verifier, row: int, generation: int) -> str | None:
        request_id = verifier.mirrors.get(row)
        return request_id if request_id is not None and self._places[request_id].generation == generation else None

    def _open(self, verifier: _Verifier, opened: DraftOpen) -> None:
        self.counters["opens"] += 1
        # What had the row is over, without a word of how it ended; the request may have moved here from another row.
        for over in (verifier.mirrors.get(opened.row), opened.request_id):
            if over is not None and over in self._places:
                self._close(over)
        verifier.mirrors[opened.row] = opened.request_id
        verifier.lost.pop(opened.row, None)
        self._places[opened.request_id] = _Place(verifier, opened.row, opened.generation)
        self._proposer.open(
            opened.request_id, opened.prompt_token_ids, opened.committed_token_ids, opened.sampling, opened.window
        )
        if opened.features:
            self._proposer.add_features(opened.request_id, opened.features)

    def _commit(self, verifier: _Verifier, message: CommitBatch) -> None:
        handles = list(zip(message.rows.tolist(), message.generations.tolist(), strict=True))
        requests = [self._find(verifier, *handle) for handle in handles]
        followed = np.array([request_id is not None for request_id in requests], np.bool_)
        commits = Commits(
            [request_id for request_id in requests if request_id is not None],
            message.starts[followed],
            message.lengths[followed],
            message.tokens[np.repeat(followed, message.lengths)],
        )
        followed[followed] = taken = self._follow(commits)
        verifier.lost.update(handles[index] for index in np.flatnonzero(~followed).tolist())
        if message.features:
            features = {verifier.mirrors.get(row): states for row, states in message.features}
            for request_id, is_taken in zip(commits.request_ids, taken.tolist(), strict=True):
                if is_taken and request_id in features:
                    try:
                        self._proposer.add_features(request_id, features[request_id])
                    except Exception as error:  # noqa: BLE001 - it is logged
                        self._fail(request_id, error)

    def _follow(self, commits: Commits) -> np.ndarray:
        """`Proposer.commit_batch`. Where it fails each request is tried alone (commits may be repeated), and only those
        that it fails for are lost."""
        try:
            return self._proposer.commit_batch(commits)
        except Exception as error:  # noqa: BLE001 - it is logged with the request that it is about
            if len(commits.request_ids) > 1:
                return np.concatenate([self._follow(one) for one in commits.split()])
            self._fail(commits.request_ids[0], error)
            return np.zeros(1, np.bool_)

    # ---- requests that are followed no more ----

    def _close(self, request_id: str, finished: bool = False) -> None:
        """`finished`: its output is complete."""
        place = self._places.pop(request_id)
        del place.verifier.mirrors[place.row]
        place.verifier.changed.pop(request_id, None)
        try:
            self._proposer.close(request_id, finished)
        except Exception as error:  # noqa: BLE001 - it is logged
            self._fail(request_id, error)

    def _drop(self, verifier_id: str) -> None:
        """Close all requests of a verifier, if it has any."""
        if (verifier := self._verifiers.pop(verifier_id, None)) is not None:
            for request_id in list(verifier.mirrors.values()):
                self._close(request_id)

    def _fail(self, request_id: str, error: Exception) -> None:
        """What was to be done for this request has failed, which costs this request alone."""
        self.counters["failures"] += 1
        logger.error("%s: request %s has failed and is dropped", self._drafter_id, request_id, exc_info=error)
        self._lose(request_id)

    def lose_all(self) -> None:
        """Drop all requests, and ask for them again."""
        for request_id in list(self._places):
            self._lose(request_id)

    def _lose(self, request_id: str) -> None:
        place = self._places.get(request_id)
        if place is not None:
            self._close(request_id)
            place.verifier.lost[place.row] = place.generation

    # ---- what verifiers are told ----

    def publish(
        self, changed: Iterable[str], links: Mapping[str, Link[TailBatch]], cut_off: Container[str], token_s: float
    ) -> None:
        """Tell verifiers what has changed, unless they are still busy with the last delivery.

        Requests of verifiers that are not in `links`, or are cut off, are dropped. If a verifier's messages arrive
        before the list that names it, its next commits are of unknown requests, and the verifier opens those again.

        Args:
            changed: Requests whose tails have changed.
            links: The verifiers there are now, id → where to send tails.
            token_s: See `TailBatch`.
        """
        for request_id in changed:
            if (place := self._places.get(request_id)) is not None:
                place.verifier.changed[request_id] = place
        for verifier_id, verifier in list(self._verifiers.items()):
            link = links.get(verifier_id)
            if link is None or verifier_id in cut_off:
                self._drop(verifier_id)
            elif verifier.changed or verifier.lost:
                link.offer(functools.partial(self._tails, verifier, token_s))

    def _tails(self, verifier: _Verifier, token_s: float) -> TailBatch:
        """Whole tails of all requests that have changed."""
        changed, verifier.changed = verifier.changed, {}
        lost, verifier.lost = verifier.lost, {}
        _, rows, generations = zip(*changed.values(), strict=True) if changed else ((), (), ())
        self.counters["tails"] += len(rows)
        self.counters["resyncs"] += len(lost)
        return TailBatch(
            self._drafter_id,
            np.array(rows, np.int32),
            np.array(generations, np.int32),
            *self._proposer.tails(list(changed)),
            token_s,
            tuple(lost.items()),
        )
