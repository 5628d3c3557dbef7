"""The verifier's side of drafting: which tails there are, how long to wait for them, which to verify, whom to tell.

Everything here is a matter of speed only. Called from the verifier's one thread, except `inbox.put`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from specactor_ray.config.schema import Candidates, SpeculationConfig, VerifyPolicy
from specactor_ray.drafters.mirror import common_prefix
from specactor_ray.loops.assignment import AssignmentChange, DrafterAssignment
from specactor_ray.loops.step_metrics import StepMetrics
from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftTail, Features, Mode, ToDrafter, ToVerifier
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.acceptance import AcceptanceTable, CircuitBreaker, expected_accepted
from specactor_ray.speculation.step_cost import StepCostModel
from specactor_ray.speculation.tails import TailBook
from specactor_ray.speculation.tree import choose_tree_nodes, tree_candidate
from specactor_ray.speculation.window import VerifyCandidate, choose_verify_lengths, choose_wait_s
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest

_PROBE_EVERY = 32
"""Every so many steps a decoupled verifier waits as if drafters always answered in time, to see whether they do."""
_KEPT_POSITIONS = 2048
"""Hidden states kept per request, at least those of so many of the newest positions, for drafters that join later."""
_MEMORY = 0.9
"""Weight of the past in moving shares: of waits answered in time, of answers that hold a guess."""


@dataclass(slots=True)
class DrafterLink:
    """How to reach one drafter."""

    method: str
    window: int
    outbox: Outbox[ToDrafter]
    reads_features: bool = False
    """It is sent the target's hidden states."""


@dataclass(slots=True)
class _Drafter:
    """What the verifier knows about one drafter."""

    link: DrafterLink
    breaker: CircuitBreaker
    step_drafted: int = 0
    """Draft tokens of this step that were put to the test."""
    step_accepted: int = 0
    heard: bool = True
    """It has sent anything, however stale, since the last wait for it that was in vain."""
    guessing: float = 1.0
    """Moving share of its answers that held a guess at all; an n-gram drafter often has none."""


class _Hope(NamedTuple):
    """What a drafter may bring for one request."""

    probability: float
    """Chance that a draft token is right given that those before it are."""
    window: int
    guessing: float
    """Chance that it has a guess at all."""


@dataclass(slots=True)
class _Request:
    """The drafting side of one running request."""

    request: TargetRequest
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    """Drafter id → [drafted, accepted], of tails that were verified."""
    chosen: str | None = None
    """Drafter whose tail is in the step under way; of a tree, one with the longest tail."""
    branches: dict[str, int] = field(default_factory=dict)
    """If a tree is in the step under way: drafter id → how many tokens of its tail the tree holds."""
    usable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Usable tails of its drafters when the step under way began."""
    worthwhile: int = 0
    """Draft tokens that would be verified if they were there; 0: no use in waiting."""
    features: list[Features] = field(default_factory=list)
    """Hidden states of the newest positions, for drafters that join later."""


class Speculator:
    """Drafting for the requests of one verifier.

    Args:
        verifier_id: Incarnation id of the verifier; drafters answer to it.
        mode: How all of its requests are drafted for.
        config: Windows, waits and the circuit breaker.
        vocab_size: Draft tokens outside `[0, vocab_size)` are dropped.
        clock: Monotonic seconds.
        trees: The engine can verify draft trees.
    """

    def __init__(
        self,
        verifier_id: str,
        mode: Mode,
        config: SpeculationConfig,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        trees: bool = False,
    ) -> None:
        self.inbox: Mailbox[ToVerifier] = Mailbox(for_verifier())
        self._verifier_id, self._mode, self._config, self._clock = verifier_id, mode, config, clock
        self._trees = trees and config.candidates is Candidates.tree
        self._book = TailBook(vocab_size)
        self._assignment = DrafterAssignment()
        self._acceptance = AcceptanceTable()
        self._drafters: dict[str, _Drafter] = {}
        self._requests: dict[str, _Request] = {}
        self._cost = StepCostModel()
        self._metrics = StepMetrics()
        self._timely = 1.0
        """Moving share of the decoupled waits that were answered in time."""
        self._steps = 0

    def use_metrics(self, metrics: StepMetrics) -> None:
        """Count into these metrics from now on."""
        self._metrics = metrics

    # ---- requests and drafters ----

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """The complete list of drafters now."""
        for drafter_id in self._drafters.keys() - links.keys():
            self._book.forget_drafter(drafter_id)
            self._acceptance.forget_drafter(drafter_id)
        self._drafters = {
            drafter_id: self._drafters.get(drafter_id) or _Drafter(link, CircuitBreaker(self._config.breaker))
            for drafter_id, link in links.items()
        }
        self._tell(self._assignment.set_drafters({drafter_id: link.method for drafter_id, link in links.items()}))

    def open(self, request: TargetRequest) -> None:
        """A request was added to the engine."""
        self._requests[request.request_id] = _Request(request)
        self._book.open(request.request_id, request.committed_token_ids)
        self._tell(self._assignment.add(request.request_id))

    def close(self, request_id: str, finished: bool) -> None:
        """A request left the engine."""
        if self._requests.pop(request_id, None) is None:
            return
        self._book.close(request_id)
        self._acceptance.forget_request(request_id)
        for drafter_id, _ in self._assignment.remove(request_id).closed:
            self._post(drafter_id, DraftClose(request_id, self._verifier_id, finished))

    def _tell(self, change: AssignmentChange) -> None:
        for drafter_id, request_id in change.closed:
            self._post(drafter_id, DraftClose(request_id, self._verifier_id, finished=False))
        for drafter_id, request_id in change.opened:
            self._open_at(drafter_id, request_id)

    def _open_at(self, drafter_id: str, request_id: str) -> None:
        state, link = self._requests[request_id], self._drafters[drafter_id].link
        request = state.request
        message = DraftOpen(
            request_id,
            self._verifier_id,
            request.prompt_token_ids,
            self._book.committed(request_id),
            request.sampling,
            link.window,
            self._mode,
            tuple(state.features) if link.reads_features else (),
        )
        self._post(drafter_id, message)

    def _post(self, drafter_id: str, message: ToDrafter) -> None:
        drafter = self._drafters.get(drafter_id)
        if drafter is not None:
            drafter.link.outbox.queue([message])

    def flush(self) -> None:
        """Send off what is queued for drafters that are not still busy with the last delivery."""
        for drafter in self._drafters.values():
            drafter.link.outbox.flush()

    # ---- before a step ----

    def take_messages(self) -> None:
        """Take in what drafters sent since the last call."""
        for message in self.inbox.drain():
            drafter = self._drafters.get(message.drafter_id)
            if drafter is None or message.drafter_id not in self._assignment.of(message.request_id):
                continue
            drafter.heard = True
            if not isinstance(message, DraftTail):
                self._open_at(message.drafter_id, message.request_id)
                continue
            drafter.guessing = _fade(drafter.guessing, bool(message.token_ids))
            if self._book.offer(message, drafter.link.window):
                drafter.breaker.record_answer()

    def plan_waits(self, decoding: Sequence[str]) -> float:
        """Decide how many draft tokens of each request are worth having, and how long to wait for them.

        Returns:
            Clock time until which the step may wait; now, when no wait pays.
        """
        now = self._clock()
        self._steps += 1
        if not self._drafters or not decoding:
            return now
        hopes = {request_id: self._potential(request_id, now) for request_id in decoding}
        candidates = [VerifyCandidate(request_id, hope.probability, hope.window) for request_id, hope in hopes.items()]
        lengths = self._lengths(candidates)
        for request_id in decoding:
            self._requests[request_id].worthwhile = lengths[request_id]
        if self._mode is Mode.COUPLED:
            return now + self._config.coupled_wait_s
        if self._config.draft_wait_s is not None:
            return now + self._config.draft_wait_s
        return now + self._worthwhile_wait_s(hopes, lengths, now)

    def _potential(self, request_id: str, now: float) -> _Hope:
        """The most that one of the request's healthy drafters can be hoped to bring."""
        hopes = [_Hope(0.0, 0, 0.0)]
        for drafter_id in self._healthy(request_id, now):
            probability = self._acceptance.probability(request_id, drafter_id)
            hopes.append(_Hope(probability, self._window(drafter_id), self._drafters[drafter_id].guessing))
        return max(hopes)

    def _window(self, drafter_id: str) -> int:
        return self._drafters[drafter_id].link.window

    def _healthy(self, request_id: str, now: float) -> list[str]:
        """Drafters of the request that are reachable and whose breaker lets them be asked."""
        result = []
        for drafter_id in self._assignment.of(request_id):
            drafter = self._drafters[drafter_id]
            if drafter.link.outbox.failed is None and drafter.breaker.allows(now):
                result.append(drafter_id)
        return result

    def _lengths(self, candidates: Sequence[VerifyCandidate]) -> dict[str, int]:
        if self._config.verify == VerifyPolicy.all:
            return {candidate.request_id: candidate.supply for candidate in candidates}
        return choose_verify_lengths(candidates, self._cost.seconds)

    def _worthwhile_wait_s(self, hopes: Mapping[str, _Hope], lengths: Mapping[str, int], now: float) -> float:
        extra = sum(
            hope.guessing * expected_accepted(hope.probability, lengths[request_id])
            for request_id, hope in hopes.items()
            if not self._is_answered(request_id, now)
        )
        timely = 1.0 if self._steps % _PROBE_EVERY == 0 else self._timely
        step_s = self._cost.seconds(len(hopes), len(hopes) + sum(lengths.values()))
        return choose_wait_s(extra * timely, float(len(hopes)), step_s)

    def all_answered(self, decoding: Sequence[str]) -> bool:
        """Whether no wait would bring anything: every request has what its drafters can say about its newest commit."""
        if not self._drafters:
            return True
        now = self._clock()
        return all(self._is_answered(request_id, now) for request_id in decoding)

    def _is_answered(self, request_id: str, now: float) -> bool:
        """Coupled: every healthy drafter is done with the newest commit. Decoupled: one has a token, or none has."""
        if self._requests[request_id].worthwhile == 0:
            return True
        healthy = self._healthy(request_id, now)
        if self._mode is Mode.COUPLED:
            return all(self._book.complete(request_id, drafter_id) for drafter_id in healthy)
        if self._book.usable(request_id).keys() & set(healthy):
            return True
        return all(self._book.answered(request_id, drafter_id) for drafter_id in healthy)

    def record_wait(self, decoding: Sequence[str], answered: bool) -> None:
        """A wait has ended; drafters that were waited for in vain are noted as silent.

        Decoupled waits are short: a drafter that has sent anything since the last one is late, not silent, and the
        waits adapt to that.
        """
        self._timely = _fade(self._timely, answered)
        if answered:
            return
        now = self._clock()
        missed = {
            drafter_id
            for request_id in decoding
            if self._requests[request_id].worthwhile
            for drafter_id in self._healthy(request_id, now)
            if not self._book.answered(request_id, drafter_id)
        }
        for drafter_id in missed:
            drafter = self._drafters[drafter_id]
            if self._mode is Mode.COUPLED or not drafter.heard:
                drafter.breaker.record_silence()
            drafter.heard = False

    def choose_tails(self, decoding: Sequence[str]) -> dict[str, Tail]:
        """What to verify for each request that has a usable tail: the one with the most expected accepted tokens, or
        a tree of all of them."""
        if not self._drafters:
            return {}
        now = self._clock()
        for request_id in decoding:
            usable, healthy = self._book.usable(request_id), self._healthy(request_id, now)
            state = self._requests[request_id]
            state.usable = {drafter_id: usable[drafter_id] for drafter_id in healthy if drafter_id in usable}
        return self._choose_trees(decoding) if self._trees else self._choose_best_tails(decoding)

    def _choose_best_tails(self, decoding: Sequence[str]) -> dict[str, Tail]:
        tails, candidates = {}, []
        for request_id in decoding:
            state = self._requests[request_id]
            state.chosen = self._best(request_id, state.usable)
            tail = state.usable.get(state.chosen, ()) if state.chosen else ()
            probability = self._acceptance.probability(request_id, state.chosen) if state.chosen else 0.0
            tails[request_id] = tail
            candidates.append(VerifyCandidate(request_id, probability, len(tail)))
        lengths = self._lengths(candidates)
        return {request_id: tail[: lengths[request_id]] for request_id, tail in tails.items() if lengths[request_id]}

    def _choose_trees(self, decoding: Sequence[str]) -> dict[str, Tail]:
        """All usable tails of a request as one tree, cut to what pays; a tree of a single branch is a tail again."""
        candidates = []
        for request_id in decoding:
            usable = self._requests[request_id].usable
            probabilities = {drafter_id: self._acceptance.probability(request_id, drafter_id) for drafter_id in usable}
            candidates.append(tree_candidate(request_id, usable, probabilities))
        if self._config.verify == VerifyPolicy.all:
            trees = {candidate.request_id: candidate.tree for candidate in candidates}
        else:
            trees = choose_tree_nodes(candidates, self._cost.seconds)
        for request_id, tree in trees.items():
            state = self._requests[request_id]
            state.chosen = max(state.usable, key=lambda d: len(state.usable[d]), default=None)
            state.branches = {drafter_id: len(tree.walk(tail)) for drafter_id, tail in state.usable.items()}
        return {
            request_id: tree.token_ids if tree.is_chain else tree for request_id, tree in trees.items() if len(tree)
        }

    def _best(self, request_id: str, usable: Mapping[str, tuple[int, ...]]) -> str | None:
        if len(usable) <= 1:
            return next(iter(usable), None)
        return max(usable, key=lambda d: self._acceptance.expected_accepted(request_id, d, len(usable[d])))

    # ---- after a step ----

    def supplied(self, request_id: str) -> int:
        """Usable draft tokens that were there for this request when the step began."""
        state = self._requests[request_id]
        return len(state.usable[state.chosen]) if state.chosen else 0

    def commit(self, output: RowOutput) -> None:
        """A step committed tokens: judge the tails that were there by them, and tell the request's drafters."""
        request_id, fresh = output.request_id, tuple(output.token_ids)
        state = self._requests[request_id]
        for drafter_id, tail in state.usable.items():
            # Also tails that were not verified are put to the test by what was committed, as far as that reaches.
            drafted, accepted = min(len(tail), len(fresh)), common_prefix(tail, fresh)
            self._acceptance.record(request_id, drafter_id, drafted, accepted)
            drafter = self._drafters.get(drafter_id)
            if drafter is not None:
                drafter.step_drafted += drafted
                drafter.step_accepted += accepted
        self._credit(state, output)
        state.usable, state.chosen, state.branches = {}, None, {}
        self._book.commit(request_id, fresh)
        features = self._keep_features(state, output)
        for drafter_id in self._assignment.of(request_id):
            link = self._drafters[drafter_id].link
            sent = features if link.reads_features else ()
            self._post(
                drafter_id,
                Commit(request_id, self._verifier_id, output.start, fresh, link.window, self._mode, sent),
            )

    def _keep_features(self, state: _Request, output: RowOutput) -> tuple[Features, ...]:
        """What the step exported of this request, as it travels; also kept for drafters that join later."""
        if output.hidden_states is None:
            return ()
        features = Features(output.hidden_start, output.hidden_states)
        state.features.append(features)
        while features.end - state.features[0].end >= _KEPT_POSITIONS:
            state.features.pop(0)
        return (features,)

    def _credit(self, state: _Request, output: RowOutput) -> None:
        """Count what was verified for those who drafted it. A node of a tree counts for each drafter it came from, so
        these counts may add up to more than those of the request."""
        if not state.chosen or not output.num_drafted:
            return
        accepted = output.token_ids[: output.num_accepted]
        for drafter_id, length in (state.branches or {state.chosen: output.num_drafted}).items():
            tail = state.usable[drafter_id][: min(length, output.num_drafted)]
            if tail:
                right = common_prefix(tail, accepted)
                self._metrics.record_drafter(drafter_id, len(tail), right)
                pair = state.by_drafter.setdefault(drafter_id, [0, 0])
                pair[0] += len(tail)
                pair[1] += right

    def observe_step(self, result: StepResult) -> None:
        """Learn from a whole step: its cost, and how each drafter did in it."""
        if result.num_prefill_tokens == 0 and result.num_tokens:
            self._cost.record(result.num_tokens, result.forward_s + result.sampling_s)
        for drafter in self._drafters.values():
            drafter.breaker.record(drafter.step_drafted, drafter.step_accepted)
            drafter.step_drafted = drafter.step_accepted = 0

    def accepted_by_drafter(self, request_id: str) -> dict[str, tuple[int, int]]:
        """Drafter id → (drafted, accepted) of one request so far."""
        return {name: (pair[0], pair[1]) for name, pair in self._requests[request_id].by_drafter.items()}

    def snapshot(self) -> dict[str, Any]:
        """State of the breakers and what became of tails, for status displays."""
        return {
            "tails": asdict(self._book.counters),
            "breakers": {
                drafter_id: {
                    "state": str(drafter.breaker.state),
                    "openings": drafter.breaker.openings,
                    "reason": drafter.breaker.reason,
                }
                for drafter_id, drafter in list(self._drafters.items())
            },
        }


def _fade(share: float, happened: bool) -> float:
    return _MEMORY * share + (1 - _MEMORY) * happened
