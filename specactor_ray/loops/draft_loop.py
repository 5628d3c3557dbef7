"""The draft loop: keep drafting ahead of the last commit that is known, publish whole tails.

A plain class around a proposer. Other threads only put messages into its mailbox and change its list of
verifiers; one thread calls `run`. It knows no Ray: a verifier is an outbox.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.drafters.base import KeepsHistory, Proposer, ReadsFeatures
from specactor_ray.loops.heartbeat import Heartbeat
from specactor_ray.loops.idle_learning import IdleLearning
from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftResync, DraftTail, Features, Mode, ToDrafter
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.outbox import Outbox
from specactor_ray.queues.screening import drafter_screen
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
class _Open:
    """A request that is drafted for."""

    verifier_id: str
    mode: Mode


class DraftLoop:
    """Drives one proposer, in a thread of its own (`run`) or in that of a verifier (`run_guarded`).

    Args:
        drafter_id: Incarnation id of this draft actor; goes into every tail.
        proposer: The draft method.
        clock: What waits and the cost of a draft token are measured by.
    """

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        self.drafter_id = drafter_id
        self.proposer = proposer
        self.counters = DraftCounters()
        self._clock = clock
        self._heartbeat = Heartbeat(clock.now)
        self._cost = DraftCost()
        self._screen = drafter_screen(proposer.vocab_size, on_cut=self._leave)
        self._inbox: Mailbox[ToDrafter] = Mailbox(for_drafter(), self._screen)
        self._commands: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._wake = clock.event()
        self._stopping = clock.event()
        self._outboxes: dict[str, Outbox[Any]] = {}
        self._left: set[str] = set()
        self._failures_in_a_row = 0
        self._unlisted: dict[str, float] = {}
        """Verifiers with open requests that are not listed → since when."""
        self._orphans_at = 0.0
        self._open: dict[str, _Open] = {}
        self._learning: IdleLearning | None = None

    # ---- called from other threads ----

    def deliver(self, messages: Sequence[ToDrafter]) -> None:
        """Take messages of verifiers; returns at once. Malformed ones are dropped and counted for their sender."""
        self._inbox.put(messages)
        self._wake.set()

    def set_verifiers(self, outboxes: Mapping[str, Outbox[Any]]) -> None:
        """The complete list of verifiers, id → where to send tails. Mirrors of those that left are dropped."""
        # An open may arrive before its verifier is listed here, so only verifiers that were listed can leave.
        self._left |= self._outboxes.keys() - outboxes.keys()
        self._outboxes = dict(outboxes)
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
        counters: dict[str, Any] = {**asdict(self.counters), **self._screen.snapshot()}
        counters |= {"open_requests": len(self._open), "inbox": len(self._inbox), "token_s": self._cost.token_s}
        counters["busy_s"] = self._heartbeat.busy_s
        counters["links"] = {verifier_id: outbox.snapshot() for verifier_id, outbox in self._outboxes.items()}
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
            self._reset()
            return False
        finally:
            self._heartbeat.end()

    def run_once(self) -> bool:
        """Drain, extend, publish; without any open request, learn for one step: that is how long a message may have to
        wait for it. Returns False when there was nothing to do."""
        self._wake.clear()
        self._run_commands()
        messages = self._inbox.drain()
        for message in messages:
            self._take(message)
        self._drop_orphans()
        changed = self._extend()
        if changed:
            self.counters.extends += 1
            self._failures_in_a_row = 0
            self._publish(changed)
        for outbox in list(self._outboxes.values()):
            outbox.flush()
        return bool(messages or changed) or (not self._open and self._learn())

    def _call(self, command: Callable[[], None]) -> Future[None]:
        """Run something in the loop's thread between two steps; the future has its outcome."""
        future: Future[None] = Future()
        self._commands.put((command, future))
        self._wake.set()
        return future

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

    def _extend(self) -> Sequence[str]:
        """One `extend` of the proposer, timed by the tokens it adds."""
        lengths = {request_id: len(self.proposer.tail(request_id)[1]) for request_id in self._open}
        begin = self._clock.now()
        changed = self.proposer.extend()
        seconds = self._clock.now() - begin
        if not changed:
            return changed
        longer = [
            grown
            for request_id in changed
            if request_id in lengths and (grown := len(self.proposer.tail(request_id)[1]) - lengths[request_id]) > 0
        ]
        self._cost.record(seconds, len(longer), sum(longer))
        return changed

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

    def _take(self, message: ToDrafter) -> None:
        """Follow a message; where that fails, only the request that it is about is lost."""
        try:
            self._follow(message)
        except Exception:
            self.counters.failures += 1
            logger.exception("%s: request %s is dropped, until it is opened again", self.drafter_id, message.request_id)
            if message.request_id in self._open:
                self._forget(message.request_id)

    def _follow(self, message: ToDrafter) -> None:
        match message:
            case DraftOpen():
                self.counters.opens += 1
                self._open[message.request_id] = _Open(message.verifier_id, message.mode)
                self.proposer.open(
                    message.request_id,
                    message.prompt_token_ids,
                    message.committed_token_ids,
                    message.sampling,
                    message.window,
                )
                self._add_features(message.request_id, message.features)
                self._with_learning(lambda learning: learning.follow(message))
            case Commit():
                self._take_commit(message)
            case DraftClose():
                if self._is_open(message):
                    del self._open[message.request_id]
                    self.proposer.close(message.request_id, message.finished)
                    self._with_learning(lambda learning: learning.follow(message))

    def _take_commit(self, message: Commit) -> None:
        self.counters.commits += 1
        taken = self._is_open(message) and self.proposer.commit(
            message.request_id, message.start, message.token_ids, message.window
        )
        if taken:
            self._open[message.request_id].mode = message.mode
            self._add_features(message.request_id, message.features)
            self._with_learning(lambda learning: learning.follow(message))
            return
        self.counters.resyncs += 1
        outbox = self._outboxes.get(message.verifier_id)
        if outbox is not None:
            outbox.post([DraftResync(message.request_id, self.drafter_id)])

    def _is_open(self, message: Commit | DraftClose) -> bool:
        """The request is drafted for on behalf of this verifier."""
        known = self._open.get(message.request_id)
        return known is not None and known.verifier_id == message.verifier_id

    def _add_features(self, request_id: str, features: Sequence[Features]) -> None:
        if features and isinstance(self.proposer, ReadsFeatures):
            self.proposer.add_features(request_id, features)

    def _publish(self, request_ids: Sequence[str]) -> None:
        tails: dict[str, list[DraftTail]] = {}
        for request_id in request_ids:
            known = self._open.get(request_id)
            if known is None:
                continue
            complete = not self.proposer.pending(request_id)
            if not complete and known.mode is Mode.COUPLED:
                continue  # its verifier waits for the whole tail
            base_len, token_ids = self.proposer.tail(request_id)
            version, token_s = self.proposer.weight_version, self._cost.token_s
            tail = DraftTail(request_id, self.drafter_id, base_len, token_ids, version, complete, token_s)
            tails.setdefault(known.verifier_id, []).append(tail)
        for verifier_id, batch in tails.items():
            outbox = self._outboxes.get(verifier_id)
            if outbox is not None:
                self.counters.tails += len(batch)
                outbox.post(batch)

    def _drop_orphans(self) -> None:
        """Forget requests of verifiers that are gone, also of those that came and went between two lists, or whose last
        messages came after the list without them."""
        now = self._clock.now()
        if not self._left and now < self._orphans_at:
            return
        self._orphans_at = now + _ORPHAN_INTERVAL_S
        left, self._left = self._left, set()
        owners = dict.fromkeys(known.verifier_id for known in self._open.values())
        self._unlisted = {name: self._unlisted.get(name, now) for name in owners if name not in self._outboxes}
        for request_id, known in list(self._open.items()):
            since = self._unlisted.get(known.verifier_id, now)
            if known.verifier_id in left or now - since >= _ORPHAN_S:
                self._forget(request_id)

    def _reset(self) -> None:
        for request_id in list(self._open):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Drop a request that did not end. Whoever verifies it is told by a resync at its next commit."""
        del self._open[request_id]
        try:
            self.proposer.close(request_id, finished=False)
        except Exception:
            self.counters.failures += 1
            logger.exception("%s: request %s could not be closed in order", self.drafter_id, request_id)
        self._with_learning(lambda learning: learning.forget(request_id))
