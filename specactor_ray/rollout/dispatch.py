"""Hands requests to verifiers, journals their commits, and takes requests off verifiers that die or are full.

Every admitted request is returned exactly once: finished, aborted, or failed with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from specactor_ray.actors.specs import Departure
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import InputError
from specactor_ray.core.metrics import Row, row, verifier_rows
from specactor_ray.rollout.backlog import Backlog
from specactor_ray.rollout.journal import MAX_UNCONFIRMED, Journal, JournalEntry
from specactor_ray.rollout.verifiers import OutputSharing, VerifierLink, Verifiers
from specactor_ray.transport.messages import Finished, Progress, PromptScores, Refused, ToRollout

logger = logging.getLogger(__name__)

_REFUSED_S = 1.0
"""Seconds for which a verifier that refused a request is given none."""
_LOOK_INTERVAL_S = 0.1
"""Time between two checks of notices, shared outputs and loads."""


class WeightPolicy(StrEnum):
    """Policy for running requests when new weights arrive."""

    WAIT = "wait"
    """Running requests end first; others do not begin meanwhile."""
    KEEP = "keep"
    """Running requests stop, and continue after their committed tokens with the new weights."""
    ABORT = "abort"
    """Running requests end with their committed tokens."""


def policy_of(name: str) -> WeightPolicy:
    """The policy with this name; InputError if there is none."""
    if name not in list(WeightPolicy):
        raise InputError(f"policy is {name!r}; it must be {', '.join(WeightPolicy)}")
    return WeightPolicy(name)


class Dispatcher:
    """Runs journaled requests on the controller's verifiers. For one thread; `verifiers.wake` ends its waits.

    Args:
        outstanding_per_verifier: Most requests handed to one verifier at a time; the rest wait here, for others.
        no_verifier_timeout_s: Longest time without any verifier, or an answer of the controller, before a failure.
        shares_outputs: Verifiers get the outputs finished by others, for the histories of the lookups they host.
    """

    def __init__(
        self,
        controller: Any,
        calls: Calls,
        outstanding_per_verifier: int,
        no_verifier_timeout_s: float,
        shares_outputs: bool = False,
    ) -> None:
        self.journal = Journal()
        self.reissues = 0
        """Number of requests issued again since the start because their verifier was gone or did not run them."""
        self._clock = calls.clock
        self.verifiers = Verifiers(controller, calls, no_verifier_timeout_s)
        self._links = self.verifiers.links
        self._sharing = OutputSharing(calls, self._links, shares_outputs)
        self.backlog = Backlog(self.journal, outstanding_per_verifier)
        self._quarantine = self.backlog.quarantine
        self._ended: list[JournalEntry] = []
        """Requests that have ended since the last step."""
        self._batch = outstanding_per_verifier // 2
        """Requests that a verifier runs at once; the others that it holds wait there."""
        self._looked = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and all cancellations have arrived."""
        return not self.journal.entries and not self._ended and not self.verifiers.has_notices

    def metric_rows(self, verifiers: bool) -> Iterator[Row]:
        """Metrics of the requests, and the latest ones of the verifiers; for any thread."""
        journal = self.journal
        yield row("specactor_requests_in_flight", in_flight := journal.owned)
        yield row("specactor_requests_waiting", max(len(journal.entries) - in_flight, 0))
        yield row("specactor_requests_reissued_total", self.reissues)
        yield row("specactor_journaled_tokens_total", journal.committed_tokens)
        yield row("specactor_discarded_tokens_total", journal.discarded_tokens)
        for verifier_id in list(self._links) if verifiers else []:
            if (counters := self.verifiers.counters.get(verifier_id)) is not None:
                yield from verifier_rows(verifier_id, counters)

    def admit(self, entries: Sequence[JournalEntry]) -> None:
        """Admit requests with new ids. They run with the newest version of the weights at their beginning."""
        if not self.journal.entries:
            self.verifiers.begin()
        for entry in entries:
            entry.weight_version = self.journal.weight_version
            self.journal.add(entry)
        self.backlog.add(entry.request_id for entry in entries)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests with their committed tokens, unless they have ended."""
        batches: dict[str, list[tuple[str, int]]] = {}
        for request_id in request_ids:
            if (entry := self.journal.entries.get(request_id)) is None:
                continue
            if entry.owner is None:
                self.backlog.discard(entry)
            else:
                batches.setdefault(entry.owner, []).append((request_id, entry.attempt))
            self._finish(request_id, "abort")
        for verifier_id, attempts in batches.items():
            if link := self._links.get(verifier_id):
                self.verifiers.cancel(link, attempts)

    def step(self, is_read: bool = False) -> list[JournalEntry]:
        """Hand out requests, wait for answers (or `verifiers.wake`), and journal them. Returns requests that ended.
        `is_read`: tokens are read as they come. ActorLostError: the controller, or all verifiers, were gone for longer
        than allowed."""
        if self.journal.entries:
            for gone in self.verifiers.refresh(len(self.journal.entries)):
                self._release_all(*gone)
            if self.backlog:
                now = self._clock.now()
                names = [name for name, link in self._links.items() if link.is_open(now)]
                for verifier_id, batch in self.backlog.hand_out(names).items():
                    self.verifiers.submit(self._links[verifier_id], batch)
            self.verifiers.poll(is_read)
        self._look_after_requests()
        if not self._ended:
            self.verifiers.wait()
        for link, lost in self.verifiers.failed_submits():
            self._take_back(link, lost)
        for link, events in self.verifiers.events():
            self._journal_events(link, events)
        ended, self._ended = self._ended, []
        if ended and not self.journal.entries:
            self._sharing.send()
        return ended

    def abandon(self) -> None:
        """Forget all requests; their verifiers drop them."""
        self._cancel_all()
        self.journal.clear()
        self.backlog.clear()
        self._ended.clear()

    def hold(self, policy: WeightPolicy) -> None:
        """Hand out no new requests until `backlog.release`; the policy decides whether running ones continue, stop or
        end."""
        self.backlog.holds += 1
        running = [entry for entry in self.journal.entries.values() if entry.attempt]
        if policy is WeightPolicy.ABORT:
            self.abort([entry.request_id for entry in running])
        elif policy is WeightPolicy.KEEP:
            self.backlog.is_frozen = True
            self._cancel_all()
            self._put_back([entry.request_id for entry in running if entry.owner is not None])

    def _cancel_all(self) -> None:
        for verifier_id, link in self._links.items():
            if left := [(entry.request_id, entry.attempt) for entry in self.journal.owned_by(verifier_id)]:
                self.verifiers.cancel(link, left)

    @property
    def is_drained(self) -> bool:
        """While held: whether no request has a verifier, or gets one before `backlog.release`."""
        return self.backlog.is_frozen or not self.journal.begun

    def _take_back(self, link: VerifierLink, attempts: Sequence[tuple[str, int]]) -> None:
        """Take back requests that have not arrived at their verifier, as far as this process can determine."""
        self.verifiers.cancel(link, attempts)  # they may have arrived nevertheless
        link.free_at = self._clock.now() + _REFUSED_S
        lost = [request_id for request_id, attempt in attempts if self.journal.is_current(request_id, attempt)]
        self._reissue(lost, f"verifier {link.verifier_id} could not be handed requests")

    def _release_all(self, link: VerifierLink, departure: Departure | None) -> None:
        """Release the requests of a verifier that is gone. Those that it did not confirm are suspected only if
        that happened to them before: a request may end a process before it answers."""
        verifier_id = link.verifier_id
        positions = {entry.request_id: entry.num_tokens for entry in self.journal.owned_by(verifier_id)}
        failed, why = departure is Departure.FAILED, f"verifier {verifier_id} is gone"
        unseen = [name for name in link.unconfirmed() if name in positions]
        for entry in map(self.journal.entries.__getitem__, unseen):
            entry.unconfirmed += failed
        excused = [name for name in unseen if self.journal.entries[name].unconfirmed < MAX_UNCONFIRMED or not failed]
        self._reissue([name for name in excused if positions.pop(name, None) is not None], why)
        if failed:
            for request_id in self._quarantine.accuse(verifier_id, positions):
                del positions[request_id]
                self._finish(request_id, "error", "its verifiers failed again and again while it ran alone")
        else:
            self._quarantine.excuse(verifier_id)
        self._reissue(list(positions), why)

    def _reissue(self, request_ids: Sequence[str], why: str, link: VerifierLink | None = None) -> None:
        """Take requests off their verifier, which drops them if its link is given; they wait for another one."""
        if not request_ids:
            return
        if link is not None:
            self.verifiers.cancel(link, [(name, self.journal.entries[name].attempt) for name in request_ids])
        self.reissues += len(request_ids)
        when = "" if self._links else " when a verifier is ready"
        logger.warning("%s; %d requests are issued again%s", why, len(request_ids), when)
        self._put_back(request_ids)

    def _put_back(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.journal.release(request_id)
        self.backlog.put_back(request_ids)

    def _finish(self, request_id: str, reason: str, error: str = "") -> JournalEntry:
        """End a request with its committed tokens, on the rollout's side."""
        tokens = self.journal.entries[request_id].num_tokens
        entry = self.journal.end(Finished(request_id, reason, error, tokens))
        self._end(entry)
        return entry

    def _end_stopped(self) -> list[JournalEntry]:
        """End the requests with outputs that a stop text has completed; returns them."""
        stopped, self.journal.stopped = self.journal.stopped, {}
        return [self._finish(name, "error" if error else "stop", error) for name, error in stopped.items()]

    def _end(self, entry: JournalEntry) -> None:
        self._quarantine.forget(entry.request_id)
        self._ended.append(entry)

    def _journal_events(self, link: VerifierLink, events: Sequence[ToRollout]) -> None:
        for event in events:
            if isinstance(event, Progress):
                self._journal_progress(link, event)
                continue
            request_id = event.request_id
            if not self.journal.is_current(request_id, event.attempt):
                continue
            if isinstance(event, Finished) and (ended := self.journal.finish(event)) is not None:
                self._sharing.add(link.verifier_id, ended)
                self._end(ended)
            elif isinstance(event, PromptScores):
                self.journal.entries[request_id].prompt_scores = event.scores
            elif isinstance(event, Refused):
                link.free_at = self._clock.now() + _REFUSED_S
                self._reissue([request_id], f"verifier {link.verifier_id} refused: {event.reason}")
            else:
                self._miss(link, request_id)

    def _journal_progress(self, link: VerifierLink, event: Progress) -> None:
        """Journal commits, and end requests at a stop text: their verifier drops them."""
        for request_id in self.journal.progress(event):
            self._miss(link, request_id)
        for request_id in self._quarantine.members_at(link.verifier_id):
            self._quarantine.progress(request_id, self.journal.entries[request_id].num_tokens)
        if not self.journal.stopped:
            return
        ended = self._end_stopped()
        self.verifiers.cancel(link, [(entry.request_id, entry.attempt) for entry in ended], has_ended=True)
        for entry in ended:
            self._sharing.add(link.verifier_id, entry)

    def _miss(self, link: VerifierLink, request_id: str) -> None:
        self._reissue([request_id], f"verifier {link.verifier_id} reported {request_id} with a gap", link)

    def _look_after_requests(self) -> None:
        """Send lost notices and finished outputs, and balance the loads."""
        now = self._clock.now()
        if now - self._looked < _LOOK_INTERVAL_S:
            return
        self._looked = now
        self.verifiers.retry_notices()
        if self.journal.entries:
            self._sharing.send()
            self._balance(now)

    def _balance(self, now: float) -> None:
        """Move a request from the fullest to the emptiest verifier, if none waits, it runs there, and that pays."""
        names = [name for name, link in self._links.items() if link.is_open(now)]
        loads = {name: self.journal.load(name) for name in names if not self._quarantine.occupies(name)}
        if self.backlog or len(loads) < 2 or min(loads.values()) >= self._batch:
            return
        fullest, emptiest = max(loads, key=loads.__getitem__), min(loads.values())
        gain = partial(gain_of_move, gap=loads[fullest] - 1 - emptiest, load=emptiest)
        movable = [entry for entry in self.journal.owned_by(fullest) if entry.session is None]
        best = max(movable, key=gain, default=None)
        if best is not None and gain(best) > 0:
            logger.debug("request %s moves from %s, which has %d", best.request_id, fullest, loads[fullest])
            self.verifiers.cancel(self._links[fullest], [(best.request_id, best.attempt)])
            self._put_back([best.request_id])


def gain_of_move(entry: JournalEntry, gap: int, load: int) -> int:
    """Saving of a move minus its cost, in positions of a forward pass; a move pays above 0.

    A verify step of b requests takes about `b * v + c` seconds (SpecActor, arXiv 2511.16193, section 4), and a position
    of a prefill about `v`. The move saves `gap * v` per remaining token of the request, and as much for all others. It
    costs `v` for each token to read, for the request and the `load` others of its new verifier. Output lengths are
    heavy-tailed: as many tokens are expected as there are, up to `max_tokens`.
    """
    remaining = min(entry.sampling.max_tokens - entry.num_tokens, entry.num_tokens)
    return 2 * remaining * gap - (len(entry.prompt_token_ids) + entry.num_tokens) * (1 + load)
