"""The requests that a drafter follows: what verifiers say reaches the proposer, and its tails reach the verifiers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.drafters.base import Commits, Proposer, ReadsFeatures
from specactor_ray.messages import CommitBatch, DraftOpen, TailBatch
from specactor_ray.queues.link import Link

logger = logging.getLogger(__name__)

_ORPHAN_S = 30.0
"""Requests of a verifier that has not been listed for this long are dropped."""
_ORPHAN_INTERVAL_S = 5.0


@dataclass(slots=True)
class DraftCounters:
    """What a draft actor has done since it started."""

    steps: int = 0
    """Rounds of the loop in which there was something to do."""
    opens: int = 0
    commits: int = 0
    resyncs: int = 0
    extends: int = 0
    tails: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Verifier:
    """A verifier that is drafted for."""

    link: Link[TailBatch] | None = None
    """None: it is not listed (yet, or any more)."""
    mirrors: dict[int, str] = field(default_factory=dict)
    """Row → request."""
    changed: dict[str, _Place] = field(default_factory=dict)
    """Requests whose tails it has yet to be told."""
    lost: dict[int, int] = field(default_factory=dict)
    """Rows that have to be opened again → generation."""
    unlisted_since: float | None = None


class _Place(NamedTuple):
    """Where a request runs."""

    verifier: _Verifier
    row: int
    generation: int


class Mirrors:
    """Keeps the proposer at one with what verifiers say. For the loop's thread; `set_verifiers` and `leave` for any.

    Args:
        drafter_id: Incarnation id of the draft actor; goes into every message.
        proposer: The draft method.
        clock: What it is measured by how long a verifier has not been listed.
    """

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        self.counters = DraftCounters()
        self.links: Mapping[str, Link[TailBatch]] = {}
        """Verifier → where to send tails, as listed last."""
        self._drafter_id, self._proposer, self._clock = drafter_id, proposer, clock
        self._left: set[str] = set()
        self._verifiers: dict[str, _Verifier] = {}
        self._places: dict[str, _Place] = {}
        self._orphans_at = 0.0

    def __len__(self) -> int:
        """Open requests."""
        return len(self._places)

    # ---- called from other threads ----

    def set_verifiers(self, links: Mapping[str, Link[TailBatch]]) -> None:
        """The complete list of verifiers. Mirrors of those that left are dropped."""
        # An open may arrive before its verifier is listed here, so only verifiers that were listed can leave.
        self._left |= self.links.keys() - links.keys()
        self.links = dict(links)

    def leave(self, verifier_id: str) -> None:
        """Nothing will come of this verifier any more."""
        self._left.add(verifier_id)

    # ---- what verifiers say ----

    def take(self, message: CommitBatch) -> None:
        """Follow a message; where that fails, only the request that it is about is lost."""
        verifier = self._verifiers.get(message.verifier_id)
        if verifier is None:
            verifier = self._verifiers[message.verifier_id] = _Verifier()
        verifier.link = self.links.get(message.verifier_id)
        self._commit(verifier, message)
        for row, generation, finished in message.closed:
            if (closed := self._find(verifier, row, generation)) is not None:
                self._guarded(closed, functools.partial(self._close, closed, finished))
        for opened in message.opened:
            self._guarded(opened.request_id, functools.partial(self._open, verifier, opened))

    def _find(self, verifier: _Verifier, row: int, generation: int) -> str | None:
        request_id = verifier.mirrors.get(row)
        return request_id if request_id is not None and self._places[request_id].generation == generation else None

    def _guarded(self, request_id: str, follow: Callable[[], None]) -> None:
        try:
            follow()
        except Exception as error:  # noqa: BLE001 - it is logged
            self._give_up(request_id, error)

    def _give_up(self, request_id: str, error: Exception) -> None:
        self.counters.failures += 1
        text = "%s: request %s is dropped, until it is opened again"
        logger.error(text, self._drafter_id, request_id, exc_info=error)
        self._lose(request_id)

    def _open(self, verifier: _Verifier, opened: DraftOpen) -> None:
        self.counters.opens += 1
        self._let_go(verifier, opened.row)
        if opened.request_id in self._places:  # it has moved here from another verifier, or from another row
            self._forget(opened.request_id)
        verifier.mirrors[opened.row] = opened.request_id
        verifier.lost.pop(opened.row, None)
        self._places[opened.request_id] = _Place(verifier, opened.row, opened.generation)
        self._proposer.open(
            opened.request_id, opened.prompt_token_ids, opened.committed_token_ids, opened.sampling, opened.window
        )
        if opened.features and isinstance(self._proposer, ReadsFeatures):
            self._proposer.add_features(opened.request_id, opened.features)

    def _commit(self, verifier: _Verifier, message: CommitBatch) -> None:
        handles = list(zip(message.rows.tolist(), message.generations.tolist(), strict=True))
        requests = [self._find(verifier, *handle) for handle in handles]
        followed = np.array([request_id is not None for request_id in requests], np.bool_)
        commits = Commits(
            [request_id for request_id in requests if request_id is not None],
            message.starts[followed],
            message.lengths[followed],
            message.windows[followed],
            message.tokens[np.repeat(followed, message.lengths)],
        )
        self.counters.commits += len(commits.request_ids)
        followed[followed] = taken = self._follow(commits)
        for index in np.flatnonzero(~followed).tolist():
            self._ask_again(verifier, *handles[index])
        if message.features and isinstance(self._proposer, ReadsFeatures):
            features = dict(message.features)
            for request_id, is_taken in zip(commits.request_ids, taken.tolist(), strict=True):
                place = self._places.get(request_id)
                if is_taken and place is not None and place.row in features:
                    add = functools.partial(self._proposer.add_features, request_id, features[place.row])
                    self._guarded(request_id, add)

    def _follow(self, commits: Commits) -> np.ndarray:
        """`Proposer.commit_batch`. Where it fails each request is tried alone (commits may be repeated), and only those
        that it fails for are lost."""
        try:
            return self._proposer.commit_batch(commits)
        except Exception as error:  # noqa: BLE001 - it is logged with the request that it is about
            if len(commits.request_ids) > 1:
                return np.concatenate([self._follow(one) for one in commits.split()])
            self._give_up(commits.request_ids[0], error)
            return np.ones(1, np.bool_)

    def _close(self, request_id: str, finished: bool) -> None:
        self._leave_place(request_id)
        self._proposer.close(request_id, finished)

    def _leave_place(self, request_id: str) -> None:
        place = self._places.pop(request_id)
        del place.verifier.mirrors[place.row]
        place.verifier.changed.pop(request_id, None)

    def _ask_again(self, verifier: _Verifier, row: int, generation: int) -> None:
        self.counters.resyncs += 1
        verifier.lost[row] = generation

    # ---- what they are told ----

    def note_changed(self, request_ids: Iterable[str]) -> None:
        """The tails of these have changed."""
        for request_id in request_ids:
            if (place := self._places.get(request_id)) is not None:
                place.verifier.changed[request_id] = place

    def offer(self, token_s: float) -> None:
        """Tell verifiers what has changed, unless they are still busy with the last delivery.

        Args:
            token_s: Seconds per draft token for one request.
        """
        for verifier in self._verifiers.values():
            if verifier.link is not None and (verifier.changed or verifier.lost):
                verifier.link.offer(functools.partial(self._tails, verifier, token_s))

    def _tails(self, verifier: _Verifier, token_s: float) -> TailBatch:
        """Whole tails of all requests that have changed."""
        changed, verifier.changed = verifier.changed, {}
        lost, verifier.lost = verifier.lost, {}
        _, rows, generations = zip(*changed.values(), strict=True) if changed else ((), (), ())
        self.counters.tails += len(rows)
        return TailBatch(
            self._drafter_id,
            np.array(rows, np.int32),
            np.array(generations, np.int32),
            *self._proposer.tails(list(changed)),
            self._proposer.weight_version,
            token_s,
            tuple(lost.items()),
        )

    # ---- requests that did not end ----

    def drop_orphans(self) -> None:
        """Forget requests of verifiers that are gone, also of those that came and went between two lists, or whose last
        messages came after the list without them."""
        now = self._clock.now()
        if not self._left and now < self._orphans_at:
            return
        self._orphans_at = now + _ORPHAN_INTERVAL_S
        left, self._left = self._left, set()
        for verifier_id, verifier in list(self._verifiers.items()):
            verifier.link = self.links.get(verifier_id)
            if verifier.link is not None:
                verifier.unlisted_since = None
                continue
            if verifier.unlisted_since is None:
                verifier.unlisted_since = now
            if verifier_id in left or now - verifier.unlisted_since >= _ORPHAN_S:
                del self._verifiers[verifier_id]
                for request_id in list(verifier.mirrors.values()):
                    self._forget(request_id)

    def lose_all(self) -> None:
        """Drop all requests, and ask for them again."""
        for request_id in list(self._places):
            self._lose(request_id)

    def _lose(self, request_id: str) -> None:
        """Drop a request, and ask for it again."""
        place = self._places.get(request_id)
        if place is not None:
            self._forget(request_id)
            self._ask_again(*place)

    def _let_go(self, verifier: _Verifier, row: int) -> None:
        """The row is used again: whatever was there is over, without a word of how it ended."""
        if row in verifier.mirrors:
            self._forget(verifier.mirrors[row])

    def _forget(self, request_id: str) -> None:
        """Drop a request that did not end."""
        self._leave_place(request_id)
        try:
            self._proposer.close(request_id, finished=False)
        except Exception:
            self.counters.failures += 1
            logger.exception("%s: request %s could not be closed in order", self._drafter_id, request_id)
