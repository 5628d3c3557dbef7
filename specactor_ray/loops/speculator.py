"""The verifier's side of drafting: which tails there are, which to verify, whom to tell.

Everything here is a matter of speed only. Called from the verifier's one thread, except `inbox.put` and `snapshot`.
Who drafts for what is decided in `planner.py`, how long a step waits in `waiting.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specactor_ray.clock import SYSTEM, Clock
from specactor_ray.config.schema import Candidates, SpeculationConfig, VerifyPolicy
from specactor_ray.drafters.mirror import common_prefix
from specactor_ray.loops.assignment import AssignmentChange
from specactor_ray.loops.choosing import choose_best_tails, choose_trees
from specactor_ray.loops.drafted_request import DraftedRequest
from specactor_ray.loops.drafter_table import DrafterLink, DrafterTable
from specactor_ray.loops.planner import DraftPlanner
from specactor_ray.loops.step_metrics import StepMetrics
from specactor_ray.loops.waiting import DraftWaits
from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftTail, Mode, ToVerifier
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.screening import verifier_screen
from specactor_ray.speculation.ladder import DraftLadder, MethodPrior
from specactor_ray.speculation.step_cost import StepCostModel
from specactor_ray.speculation.tails import TailBook
from specactor_ray.speculation.track_record import TrackRecord
from specactor_ray.speculation.wait_cost import WaitCost
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest


class Speculator:
    """Drafting for the requests of one verifier.

    Args:
        verifier_id: Incarnation id of the verifier; drafters answer to it.
        mode: The layout: how its requests are drafted for, unless a request's own acceptance calls for another mode.
        config: Windows, waits, races and the circuit breaker.
        vocab_size: Tails with tokens outside `[0, vocab_size)` are malformed.
        clock: What waits and breakers are measured by; the same as of the loop that calls it.
        max_batch: Most requests the verifier runs at once.
        priors: Draft method → what is known about it offline.
        trees: The engine can verify draft trees.
    """

    def __init__(
        self,
        verifier_id: str,
        mode: Mode,
        config: SpeculationConfig,
        vocab_size: int,
        clock: Clock = SYSTEM,
        max_batch: int = 16,
        priors: Mapping[str, MethodPrior] | None = None,
        trees: bool = False,
    ) -> None:
        self._screen = verifier_screen(vocab_size)
        self.inbox: Mailbox[ToVerifier] = Mailbox(for_verifier(), self._screen)
        self.verifier_id, self._clock = verifier_id, clock
        self._trees = trees and config.candidates is Candidates.tree
        self._whole_trees = config.verify == VerifyPolicy.all
        self._book = TailBook()
        self._acceptance = TrackRecord(DraftLadder(priors))
        self._drafters = DrafterTable(config.breaker, clock.now, self._screen.cut_off)
        self._requests: dict[str, DraftedRequest] = {}
        self._cost, wait_cost = StepCostModel(), WaitCost()
        self._metrics = StepMetrics()
        self._planner = DraftPlanner(mode, config, max_batch, self._drafters, self._acceptance, self._cost, wait_cost)
        self._waits = DraftWaits(
            mode, config, self._drafters, self._book, self._planner, self._acceptance, self._cost, wait_cost, clock.now
        )

    def use_metrics(self, metrics: StepMetrics) -> None:
        """Count into these metrics from now on."""
        self._metrics = metrics

    # ---- requests and drafters ----

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters now."""
        for drafter_id in self._drafters.set(links):
            self._book.forget_drafter(drafter_id)
        self._tell(self._planner.set_drafters())

    def open(self, request: TargetRequest) -> None:
        """A request was added to the engine."""
        self._requests[request.request_id] = DraftedRequest(request)
        self._book.open(request.request_id, request.committed_token_ids)
        self._acceptance.reach(request.request_id, len(request.committed_token_ids))
        self._tell(self._planner.add(request.request_id))

    def close(self, request_id: str, finished: bool) -> None:
        """A request left the engine."""
        if self._requests.pop(request_id, None) is None:
            return
        self._book.close(request_id)
        self._acceptance.forget_request(request_id)
        for drafter_id, _ in self._planner.remove(request_id).closed:
            self._drafters.post(drafter_id, DraftClose(request_id, self.verifier_id, finished))

    def _tell(self, change: AssignmentChange) -> None:
        for drafter_id, request_id in change.closed:
            self._drafters.post(drafter_id, DraftClose(request_id, self.verifier_id, finished=False))
            self._book.forget_tail(request_id, drafter_id)
        for drafter_id, request_id in change.opened:
            self._open_at(drafter_id, request_id)

    def _open_at(self, drafter_id: str, request_id: str) -> None:
        drafter, state = self._drafters.get(drafter_id), self._requests[request_id]
        if drafter is None:
            return
        request, plan = state.request, self._planner.plan(request_id, drafter_id)
        message = DraftOpen(
            request_id,
            self.verifier_id,
            request.prompt_token_ids,
            self._book.committed(request_id),
            request.sampling,
            plan.window,
            plan.mode,
            tuple(state.features) if drafter.link.reads_features else (),
        )
        self._drafters.post(drafter_id, message)

    def flush(self) -> None:
        """Send off what is queued for drafters that are not still busy with the last delivery."""
        self._drafters.flush()

    # ---- before a step ----

    def take_messages(self) -> None:
        """Take in what drafters sent since the last call."""
        for message in self.inbox.drain():
            drafter = self._drafters.get(message.drafter_id)
            if drafter is None or message.drafter_id not in self._planner.drafters(message.request_id):
                continue
            if not isinstance(message, DraftTail):
                drafter.heard = True
                self._open_at(message.drafter_id, message.request_id)
                continue
            drafter.hear(message)
            if self._book.offer(message, drafter.link.window):
                drafter.breaker.record_answer()

    def plan_waits(self, decoding: Sequence[str]) -> float:
        """Look at who drafts for what, if it is time, and decide how long to wait for drafts.

        Returns:
            Clock time until which the step may wait; now, when no wait pays.
        """
        if len(self._drafters):
            change = self._planner.step(decoding, self._book.committed_len)
            if change is not None:
                self._tell(change)
        return self._waits.plan(decoding)

    def all_answered(self, decoding: Sequence[str]) -> bool:
        """Whether no wait would bring anything: every request has what its drafters can say about its newest commit."""
        return self._waits.all_answered(decoding)

    def record_wait(self, decoding: Sequence[str], answered: bool) -> None:
        """A wait has ended; drafters that were waited for in vain are noted as silent."""
        self._waits.record(decoding, answered)

    def _healthy(self, request_id: str, now: float) -> list[str]:
        return self._waits.healthy(request_id, now)

    def choose_tails(self, decoding: Sequence[str]) -> dict[str, Tail]:
        """What to verify for each request that has a usable tail: the one with the most expected accepted tokens, or
        a tree of all of them."""
        if not self._drafters:
            return {}
        now, requests = self._clock.now(), {request_id: self._requests[request_id] for request_id in decoding}
        for request_id, state in requests.items():
            usable, healthy = self._book.usable(request_id), self._healthy(request_id, now)
            state.usable = {drafter_id: usable[drafter_id] for drafter_id in healthy if drafter_id in usable}
            state.answered = tuple(d for d in healthy if self._book.answered(request_id, d))
        if self._waits.plain_step:
            return {}
        if self._trees:
            return choose_trees(requests, self._acceptance, None if self._whole_trees else self._cost.seconds)
        return choose_best_tails(requests, self._acceptance, self._waits.verify_lengths)

    # ---- after a step ----

    def supplied(self, request_id: str) -> int:
        """Usable draft tokens that were there for this request when the step began."""
        state = self._requests[request_id]
        return len(state.usable[state.chosen]) if state.chosen else 0

    def depth(self, output: RowOutput) -> int:
        """Most draft tokens in a row that were verified: all of them, unless they were a tree."""
        branches = self._requests[output.request_id].branches
        return min(output.num_drafted, max(branches.values())) if branches else output.num_drafted

    def commit(self, output: RowOutput) -> None:
        """A step committed tokens: judge the tails that were there by them, and tell the request's drafters."""
        request_id, fresh = output.request_id, tuple(output.token_ids)
        state = self._requests[request_id]
        for drafter_id in state.answered:
            if self._planner.plan(request_id, drafter_id).window:
                self._acceptance.record_answer(request_id, drafter_id, drafter_id in state.usable)
        for drafter_id, tail in state.usable.items():
            # Also tails that were not verified are put to the test by what was committed, as far as that reaches.
            drafted, accepted = min(len(tail), len(fresh)), common_prefix(tail, fresh)
            self._acceptance.record(request_id, drafter_id, drafted, accepted)
            drafter = self._drafters.get(drafter_id)
            if drafter is not None:
                drafter.step_drafted += drafted
                drafter.step_accepted += accepted
        for drafter_id, drafted, accepted in state.credit(output):
            self._metrics.record_drafter(drafter_id, drafted, accepted)
            drafter = self._drafters.get(drafter_id)
            if drafter is not None:
                version = self._book.weight_version(request_id, drafter_id)
                self._metrics.record_version(drafter.link.method, version, drafted, accepted)
        features = state.keep_features(output)
        state.end_step()
        self._book.commit(request_id, fresh)
        self._acceptance.reach(request_id, output.start + len(fresh))
        for drafter_id in self._planner.drafters(request_id):
            window, mode = self._planner.plan(request_id, drafter_id)
            drafter = self._drafters.get(drafter_id)
            sent = features if drafter is not None and drafter.link.reads_features else ()
            commit = Commit(request_id, self.verifier_id, output.start, fresh, window, mode, sent)
            self._drafters.post(drafter_id, commit)

    def observe_step(self, result: StepResult) -> None:
        """Learn from a whole step: its cost, and how each drafter did in it."""
        if result.num_prefill_tokens == 0 and result.num_tokens:
            self._cost.record(result.num_tokens, result.forward_s + result.sampling_s)
        self._drafters.end_step()

    def accepted_by_drafter(self, request_id: str) -> dict[str, tuple[int, int]]:
        """Drafter id → (drafted, accepted) of one request so far."""
        return {name: (pair[0], pair[1]) for name, pair in self._requests[request_id].by_drafter.items()}

    def snapshot(self) -> dict[str, Any]:
        """What became of tails, breakers, deliveries to drafters, malformed messages of theirs and the ladder's
        standings, for status displays and the controller."""
        return {
            "tails": asdict(self._book.counters),
            "breakers": self._drafters.snapshot(),
            "links": self._drafters.links_snapshot(),
            **self._screen.snapshot(),
            "ladder": self._planner.standings,
        }
