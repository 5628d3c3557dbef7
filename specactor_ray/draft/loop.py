"""The draft loop: keep drafting ahead of the last commit that is known, publish whole tails.

A plain class around a proposer. Other threads only put messages into its inbox and change its list of verifiers; one
thread calls `run`. It knows no Ray: a verifier is a link.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.drafters.base import Commits, KeepsHistory, Proposer, ReadsFeatures
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.loops.idle_learning import IdleLearning
from specactor_ray.messages import CommitBatch, DraftOpen, TailBatch
from specactor_ray.queues import inbox
from specactor_ray.queues.link import Link
from specactor_ray.speculation.draft_cost import DraftCost

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""Longest sleep without work; messages wake the loop at once."""
_MAX_FAILURES = 8
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


class DraftLoop:
    """Drives one proposer, in a thread of its own (`run`) or in that of a verifier (`run_guarded`).

    Args:
        drafter_id: Incarnation id of this draft actor; goes into every message.
        proposer: The draft method.
        clock: What waits and the cost of a draft token are measured by.
    """

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        self.drafter_id = drafter_id
        self.proposer = proposer
        self.counters = DraftCounters()
        self._clock = clock
        self._looks_up = isinstance(proposer, KeepsHistory)
        self._heartbeat = Heartbeat(clock.now)
        self._cost = DraftCost()
        self._inbox = inbox.for_drafter(proposer.vocab_size, on_cut=self._leave)
        self._commands: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._wake = clock.event()
        self._stopping = clock.event()
        self._links: Mapping[str, Link[TailBatch]] = {}
        self._left: set[str] = set()
        self._verifiers: dict[str, _Verifier] = {}
        self._places: dict[str, _Place] = {}
        self._failures_in_a_row = 0
        self._orphans_at = 0.0
        self._learning: IdleLearning | None = None

    # ---- called from other threads ----

    def deliver(self, message: CommitBatch) -> None:
        """Take a message of a verifier; returns at once. A malformed one is dropped and counted for its sender."""
        self._inbox.put(message)
        self._wake.set()

    def set_verifiers(self, links: Mapping[str, Link[TailBatch]]) -> None:
        """The complete list of verifiers, id → where to send tails. Mirrors of those that left are dropped."""
        # An open may arrive before its verifier is listed here, so only verifiers that were listed can leave.
        self._left |= self._links.keys() - links.keys()
        self._links = dict(links)
        for link in links.values():
            link.on_free = self._wake.set
        self._wake.set()

    def _leave(self, verifier_id: str) -> None:
        """Nothing will come of this verifier any more."""
        self._left.add(verifier_id)
        self._wake.set()

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the proposer's weights between two steps; the future raises what it raises."""
        return self._call(functools.partial(self.proposer.load_weights, version, state_dict))

    def forget_history(self) -> Future[None]:
        """Let the proposer forget earlier outputs, if it keeps any."""
        forget = self.proposer.forget_history if isinstance(self.proposer, KeepsHistory) else lambda: None
        return self._call(forget)

    def learn(self, make_learning: Callable[[], IdleLearning]) -> Future[None]:
        """From now on, follow requests to learn from them, and learn whenever none is open. It is made in the loop's
        thread; the future raises what making it raises."""

        def begin() -> None:
            self._learning = make_learning()

        return self._call(begin)

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """Counters, the number of open requests and of messages that wait (`inbox`), what a draft token costs
        (seconds), how long the step under way has taken so far (`busy_s`, 0 when there is none), what a proposer that
        remembers outputs takes for them, and how far learning has come."""
        memory = {
            name: getattr(self.proposer, name)
            for name in ("history_tokens", "history_bytes")
            if hasattr(self.proposer, name)
        }
        counters: dict[str, Any] = {**asdict(self.counters), **self._inbox.snapshot()}
        counters |= {"open_requests": len(self._places), "inbox": len(self._inbox), "token_s": self._cost.token_s}
        counters["busy_s"] = self._heartbeat.busy_s
        counters["links"] = {verifier_id: link.snapshot() for verifier_id, link in self._links.items()}
        learning = self._learning
        return {**counters, **memory, **({"learning": learning.snapshot()} if learning is not None else {})}

    # ---- the loop ----

    def run(self) -> None:
        """Loop until `stop`. A failing proposer is logged and counted; drafts are only a matter of speed. If steps fail
        again and again without drafting in between (a broken device stays broken), the loop ends."""
        while not self._stopping.is_set():
            if not self.run_guarded():
                self._wake.wait(_IDLE_WAIT_S)
            if self._failures_in_a_row >= _MAX_FAILURES:
                logger.error("%s: %d draft steps failed in a row; the loop ends", self.drafter_id, _MAX_FAILURES)
                return

    def run_guarded(self) -> bool:
        """`run_once`; a failure is logged and counted, and loses the open requests."""
        self._heartbeat.begin()
        try:
            worked = self.run_once()
            self.counters.steps += worked
            return worked
        except Exception:
            self.counters.failures += 1
            self._failures_in_a_row += 1
            logger.exception("%s: a draft step failed; its requests will be opened again", self.drafter_id)
            for request_id in list(self._places):
                self._lose(request_id)
            return False
        finally:
            self._heartbeat.end()

    def run_once(self) -> bool:
        """Drain, extend, publish; without any open request, learn for one step: that is how long a message may have to
        wait for it. Returns False when there was nothing to do."""
        self._wake.clear()
        self._run_commands()
        messages = self._inbox.drain()
        for message, _ in messages:
            self._take(message)
        self._drop_orphans()
        begin = self._clock.now()
        changed = self.proposer.extend()
        if changed:
            self._note_cost(self._clock.now() - begin, changed)
            self.counters.extends += 1
            self._failures_in_a_row = 0
            for request_id in changed:
                if (place := self._places.get(request_id)) is not None:
                    place.verifier.changed[request_id] = place
        for verifier in self._verifiers.values():
            if verifier.link is not None and (verifier.changed or verifier.lost):
                verifier.link.offer(functools.partial(self._tails, verifier))
        return bool(messages or changed) or (not self._places and self._learn())

    def _note_cost(self, seconds: float, changed: Sequence[str]) -> None:
        """Models add a token to each request, lookups whole tails."""
        tokens = len(self.proposer.tails(changed).tokens) if self._looks_up else len(changed)
        self._cost.record(seconds, len(changed), tokens)

    def _call(self, command: Callable[[], None]) -> Future[None]:
        """Run something in the loop's thread between two steps; the future has its outcome."""
        future: Future[None] = Future()
        self._commands.put((command, future))
        self._wake.set()
        return future

    def _run_commands(self) -> None:
        while not self._commands.empty():
            command, future = self._commands.get()
            self._heartbeat.begin()
            try:
                command()
            except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(None)
            self._heartbeat.begin()

    def _learn(self) -> bool:
        return bool(self._with_learning(lambda learning: learning.learn()))

    def _with_learning(self, do: Callable[[IdleLearning], Any]) -> Any:
        """If learning fails, it stops for good and drafting continues without it."""
        if self._learning is None:
            return None
        try:
            return do(self._learning)
        except Exception:
            self.counters.failures += 1
            self._learning = None
            logger.exception("%s: learning failed and has stopped; drafting continues", self.drafter_id)
            return None

    # ---- what verifiers say ----

    def _take(self, message: CommitBatch) -> None:
        """Follow a message; where that fails, only the request that it is about is lost."""
        verifier = self._verifiers.get(message.verifier_id)
        if verifier is None:
            verifier = self._verifiers[message.verifier_id] = _Verifier()
        verifier.link = self._links.get(message.verifier_id)
        for row, generation, finished in message.closed:
            if (closed := self._find(verifier, row, generation)) is not None:
                self._guarded(closed, functools.partial(self._close, closed, finished))
        for opened in message.opened:
            self._guarded(opened.request_id, functools.partial(self._open, verifier, opened))
        self._commit(verifier, message)

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
        logger.error(text, self.drafter_id, request_id, exc_info=error)
        self._lose(request_id)

    def _open(self, verifier: _Verifier, opened: DraftOpen) -> None:
        self.counters.opens += 1
        self._let_go(verifier, opened.row)
        if opened.request_id in self._places:  # it has moved here from another verifier, or from another row
            self._forget(opened.request_id)
        verifier.mirrors[opened.row] = opened.request_id
        verifier.lost.pop(opened.row, None)
        self._places[opened.request_id] = _Place(verifier, opened.row, opened.generation)
        self.proposer.open(
            opened.request_id, opened.prompt_token_ids, opened.committed_token_ids, opened.sampling, opened.window
        )
        if opened.features and isinstance(self.proposer, ReadsFeatures):
            self.proposer.add_features(opened.request_id, opened.features)
        self._with_learning(lambda learning: learning.open(opened))

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
        if message.features or self._learning is not None:
            features = dict(message.features)
            for (request_id, start, tokens, _), is_taken in zip(commits.rows(), taken.tolist(), strict=True):
                place = self._places.get(request_id)
                if is_taken and place is not None:
                    news = (request_id, start, tokens, features.get(place.row, ()))
                    self._guarded(request_id, functools.partial(self._learn_from, *news))

    def _follow(self, commits: Commits) -> np.ndarray:
        """`Proposer.commit_batch`. Where it fails each request is tried alone (commits may be repeated), and only those
        that it fails for are lost."""
        try:
            return self.proposer.commit_batch(commits)
        except Exception as error:  # noqa: BLE001 - it is logged with the request that it is about
            if len(commits.request_ids) > 1:
                return np.concatenate([self._follow(one) for one in commits.split()])
            self._give_up(commits.request_ids[0], error)
            return np.ones(1, np.bool_)

    def _learn_from(self, request_id: str, start: int, tokens: Sequence[int], states: Sequence[Any]) -> None:
        if states and isinstance(self.proposer, ReadsFeatures):
            self.proposer.add_features(request_id, states)
        self._with_learning(lambda learning: learning.commit(request_id, start, tokens, states))

    def _close(self, request_id: str, finished: bool) -> None:
        self._leave_place(request_id)
        self.proposer.close(request_id, finished)
        self._with_learning(lambda learning: learning.close(request_id, finished))

    def _leave_place(self, request_id: str) -> None:
        place = self._places.pop(request_id)
        del place.verifier.mirrors[place.row]
        place.verifier.changed.pop(request_id, None)

    def _ask_again(self, verifier: _Verifier, row: int, generation: int) -> None:
        self.counters.resyncs += 1
        verifier.lost[row] = generation

    # ---- what they are told ----

    def _tails(self, verifier: _Verifier) -> TailBatch:
        """Whole tails of all requests that have changed."""
        changed, verifier.changed = verifier.changed, {}
        lost, verifier.lost = verifier.lost, {}
        _, rows, generations = zip(*changed.values(), strict=True) if changed else ((), (), ())
        self.counters.tails += len(rows)
        return TailBatch(
            self.drafter_id,
            np.array(rows, np.int32),
            np.array(generations, np.int32),
            *self.proposer.tails(list(changed)),
            self.proposer.weight_version,
            self._cost.token_s,
            tuple(lost.items()),
        )

    # ---- requests that did not end ----

    def _drop_orphans(self) -> None:
        """Forget requests of verifiers that are gone, also of those that came and went between two lists, or whose last
        messages came after the list without them."""
        now = self._clock.now()
        if not self._left and now < self._orphans_at:
            return
        self._orphans_at = now + _ORPHAN_INTERVAL_S
        left, self._left = self._left, set()
        for verifier_id, verifier in list(self._verifiers.items()):
            verifier.link = self._links.get(verifier_id)
            if verifier.link is not None:
                verifier.unlisted_since = None
                continue
            if verifier.unlisted_since is None:
                verifier.unlisted_since = now
            if verifier_id in left or now - verifier.unlisted_since >= _ORPHAN_S:
                del self._verifiers[verifier_id]
                for request_id in list(verifier.mirrors.values()):
                    self._forget(request_id)

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
            self.proposer.close(request_id, finished=False)
        except Exception:
            self.counters.failures += 1
            logger.exception("%s: request %s could not be closed in order", self.drafter_id, request_id)
        self._with_learning(lambda learning: learning.forget(request_id))
