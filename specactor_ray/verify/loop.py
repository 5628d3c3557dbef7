"""The verifier's loop: verifies the best draft tail of every running request and commits the right tokens.

A plain class around a target engine, without Ray: a drafter is a link, the rollout is an event queue. Other threads
deliver requests, drafts and lists of drafters; one thread calls `run`. Every wait for a drafter is bounded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from specactor_ray.core.clock import IDLE_WAIT_S, SYSTEM, Clock, Loop
from specactor_ray.core.machine import fallbacks
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.proof import prove
from specactor_ray.transport.messages import FinishedOutput, TailBatch, ToRollout, WeightSet
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.metrics import StepMetrics
from specactor_ray.verify.policy import Seconds
from specactor_ray.verify.requests import Requests

logger = logging.getLogger(__name__)

_NO_VERSION = -1
"""Version of an engine after a failed load of weights: no request has it, and every version is newer."""


class VerifyLoop(Loop):
    """Drives one target engine, which only the loop's thread uses after the begin of `run`. `hosted`: drafters of this
    process, run between two steps (docs/design/drafters.md); `set_drafters` sets others."""

    def __init__(
        self, engine: TargetEngine, drafting: Drafting, hosted: Sequence[HostedDrafter] = (), clock: Clock = SYSTEM
    ) -> None:
        super().__init__(clock)
        self.error: BaseException | None = None
        """Error that ended the loop, if the engine failed."""
        self._engine, self._drafting, self._hosted = engine, drafting, hosted
        self._suspension = drafting.policy.suspension
        self._requests = Requests(engine, drafting, clock)
        self._asleep = False
        self._unproved: Callable[[], None] | None = None
        """Check of weights that came while the engine slept, without memory for a forward."""
        self._lookups_s = 0.0
        """Seconds of lookups and messages in the step, which `Seconds.own` includes."""
        self._has_models = any(not drafter.spec.traits.looks_up for drafter in hosted)
        self._resting = False
        self.drafter_links: Mapping[str, DrafterLink] = {}
        """The latest list of drafters in other processes."""
        if hosted:
            self.set_drafters({})

    # ---- called from other threads ----

    def submit(self, requests: Sequence[TargetRequest]) -> None:
        """Queue requests. A request that can never run ends as `Finished` with its reason; one for other weights ends
        as `Refused`. An attempt that runs, has ended, or is older than such an attempt is ignored; a newer one replaces
        the older without a `Finished` for it."""
        for request in requests:
            self.put(functools.partial(self._requests.add, request))

    def cancel(self, items: Sequence[tuple[str, int]], has_ended: bool = False) -> None:
        """Drop attempts, and older ones, without a `Finished`; a later submission of them is ignored. `has_ended`:
        whether the outputs are complete, so that drafters may learn from them."""
        for request_id, attempt in items:
            self.put(functools.partial(self._requests.cancel, request_id, attempt, has_ended))

    def deliver(self, message: TailBatch) -> None:
        """Queue a message of a drafter; returns at once."""
        self._drafting.inbox.put(message)
        self._wake.set()

    def set_drafters(self, links: Mapping[str, DrafterLink]) -> None:
        """Set the complete list of drafters in other processes, by id."""
        for drafter in links.values():
            drafter.link.on_free = self._wake.set  # a step that waits for tails may have more messages to send
        self.drafter_links = links
        mine = {drafter.runner.drafter_id: drafter for drafter in self._hosted}
        self.put(lambda: self._drafting.set_drafters({**mine, **links}))

    def reset_metrics(self) -> None:
        """Set all counters to zero."""
        self.put(self._requests.reset_metrics)

    def load_weights(self, weights: WeightSet, state_dict: Mapping[str, Any]) -> Future[None]:
        """Replace the weights of a drafter of this process, or those of the target, between two steps. Those of the
        target must be newer than the loaded ones, else nothing is done. With them running requests are dropped without
        a `Finished`: an output never mixes two versions."""
        return self.call(functools.partial(self._load_weights, weights, state_dict))

    def forget_history(self) -> Future[None]:
        """Clear the histories of the drafters of this process, and the engine's prefix cache."""

        def forget() -> None:
            self._engine.reset_prefix_cache()
            for one in self._hosted:
                one.runner.proposer.forget_history()

        return self.call(forget)

    def learn(self, outputs: Sequence[FinishedOutput]) -> Future[None]:
        """Add outputs of other verifiers to the histories of the drafters of this process."""
        return self.call(lambda: [one.runner.learn(outputs) for one in self._hosted])  # type: ignore[func-returns-value]

    def sleep(self, keep_weights: bool = True) -> Future[None]:
        """Free the memory of the engine, and that of the drafters of this process, until `wake`; `keep_weights`: see
        `TargetEngine.sleep`."""
        return self.call(functools.partial(self._sleep, keep_weights))

    def wake(self) -> Future[None]:
        """Allocate the memory again. WeightsError: weights that came meanwhile are not in the engine."""
        return self.call(self._wake_up)

    def poll(self, after: int, timeout_s: float, linger_s: float = 0.0) -> tuple[int, list[ToRollout]]:
        """Events for the rollout; see `EventQueue.read`. All events except `Progress` are urgent."""
        return self._requests.events.read(after, timeout_s, linger_s)

    @property
    def metrics(self) -> StepMetrics:
        """Counters since the last `reset_metrics`."""
        return self._requests.metrics

    @property
    def running(self) -> int:
        """Number of running and waiting requests; for any thread."""
        return len(self._requests)

    def snapshot(self) -> dict[str, Any]:
        """Counters of the loop and of the drafts; `inbox`: queued messages of drafters; `busy_s`: see `Loop`."""
        return {
            **self.metrics.to_dict(),
            "plain_s": self._requests.plain.seconds,
            **self._drafting.snapshot(),
            "running": self.running,
            "inbox": len(self._drafting.inbox),
            "weight_version": self._engine.weight_version,
            "busy_s": self.busy_s,
            "fallbacks": fallbacks(),
            "cost": self._drafting.policy.cost.points(),
            "hosted": {one.runner.drafter_id: one.runner.snapshot() for one in self._hosted},
        }

    # ---- the loop ----

    def run(self) -> None:
        """Loop until `stop`, then close the engine. An error of the engine ends the loop and is kept in `error`."""
        try:
            while not self._stopping.is_set():
                if not self.run_once():
                    self._wake.wait(IDLE_WAIT_S)
        except BaseException as error:  # the engine may run foreign code, which may call sys.exit
            self.error = error
            logger.exception("the verifier's engine failed")
        finally:
            try:  # its ranks and shared memory outside this process would outlive a killed process
                self._engine.close()
            except Exception:
                logger.exception("the verifier's engine did not close in order")

    def _step(self, begin: float) -> bool:
        self._requests.publish()
        if not self._engine.has_work():
            self._drafting.take_messages()
            self._drafting.flush()
            if not self._resting:
                self._drafting.rest()
            self._resting = True
            self._suspension.end()  # the next requests may be different
            return False
        rows, self._resting = self._engine.decoding(), False
        waiting_s = self._await_drafts(rows)
        seats, drafts = self._drafting.choose(rows)
        result = self._engine.step(drafts, self._drafting.window)
        accepted = self._requests.commit(result, rows, seats)
        self._requests.publish()
        if not self._suspension.is_quiet:
            self._drafting.flush()
        seconds = Seconds(self._clock.now() - begin, result.forward_s + result.sampling_s, waiting_s)
        self.metrics.record_step(result, seconds, len(self._drafting) > 0 and self._suspension.is_on)
        self._requests.plain.record(result, seconds, self._lookups_s)
        positions, prefill = result.num_tokens, result.num_prefill_tokens
        self._drafting.policy.record(len(rows), positions, prefill, accepted, seconds)
        return True

    # ---- drafts ----

    def _await_drafts(self, rows: np.ndarray) -> float:
        """Process tails, and let models of this thread draft as far as that pays. Returns the seconds of both."""
        drafting, begin, self._lookups_s = self._drafting, self._clock.now(), 0.0
        if not len(drafting) or self._suspension.is_quiet:
            return 0.0
        drafting.look_up()
        drafting.take_messages()
        drafting.revise(rows)
        self._lookups_s = self._clock.now() - begin
        if not len(rows) or self._suspension.is_on:
            return 0.0
        begin += self._lookups_s
        self._await_tails(rows, begin)
        if self._has_models:
            drafting.take_turns(rows, self._clock.now)
        return self._clock.now() - begin

    def _await_tails(self, rows: np.ndarray, begin: float) -> None:
        """Wait up to `speculation.draft_wait_s` for tails of requests without one, since drafters of other processes
        run ahead."""
        until = begin + self._drafting.policy.wait_s
        while (left := until - self._clock.now()) > 0.0 and not self._stopping.is_set():
            if not self._drafting.policy.silent(rows).any():
                return
            self._drafting.flush()
            self._wake.wait(left)
            self._wake.clear()
            self._drafting.take_messages()

    def _load_weights(self, weights: WeightSet, state_dict: Mapping[str, Any]) -> None:
        for drafter in self._hosted:
            if drafter.spec.method == weights.method:
                drafter.runner.load_weights(weights.version, state_dict)
        engine = self._engine
        if weights.method or weights.version <= engine.weight_version:
            return
        self._requests.clear()
        engine.weight_version = _NO_VERSION  # unless all goes well
        self._unproved = None
        engine.load_weights(weights.version, state_dict)
        what = f"weights of version {weights.version} did not arrive"
        self._unproved = functools.partial(prove, engine, weights.probe, what)
        if not self._asleep:
            self._prove()

    def _prove(self) -> None:
        """Check the weights that were loaded last, if that is still to be done."""
        proof, self._unproved = self._unproved, None
        if proof is not None:
            version, self._engine.weight_version = self._engine.weight_version, _NO_VERSION
            proof()
            self._engine.weight_version = version

    def _sleep(self, keep_weights: bool) -> None:
        self._engine.sleep(keep_weights)
        for one in self._hosted:
            one.runner.proposer.sleep()
        self._asleep = True

    def _wake_up(self) -> None:
        self._engine.wake()
        for one in self._hosted if self._asleep else ():
            one.runner.proposer.wake()
        self._asleep = False
        try:
            self._prove()
        except Exception as error:
            self.error = error  # the controller, which has taken them for loaded, replaces the verifier
            raise
