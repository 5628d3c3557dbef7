"""The requests of a run: single ones and streams, from any thread and event loop, and new weights between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from specactor_ray.cluster.calls import Calls
from specactor_ray.config.methods import hosted_drafters
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import InputError, OverloadedError
from specactor_ray.core.metrics import DRIVER, Row, row
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.detokenizer import StopFinder
from specactor_ray.rollout.dispatch import Dispatcher, WeightPolicy, policy_of
from specactor_ray.rollout.dispatch_thread import CLOSED, DispatchThread
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.operations import ASK_S, ask, call_all
from specactor_ray.rollout.prompts import Prompt, encode_prompt, is_token_ids, text_options
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory, trajectory_of
from specactor_ray.transport.messages import WeightSet

_COUNTERS_S, _PAUSE_S = 2.0, 0.05
"""Longest wait for the final counters of verifiers, and time between two calls for them."""


class RequestQueue:
    """Runs streams and single requests, at the same time and for any thread and event loop. `config` is that of the
    controller. Independent of models and of Ray."""

    def __init__(self, config: Config, controller: Any, calls: Calls) -> None:
        cluster = config.cluster
        self.max_waiting = 4096
        """Most single requests that wait for a verifier."""
        self.tokenizer: Any = None
        """Encodes prompts that are not token ids, and decodes outputs."""
        self.chat, self.text_options = config.data.chat, text_options(config.data)
        """Wrap text as a user message if the tokenizer has a chat template; options of `encode_prompt`."""
        self.sampling = config.sampling
        """Sampling parameters of requests without their own."""
        self.context: int | None = None
        """Most tokens of prompt and output together; a text that is too long for it is refused unread."""
        self.weight_version = 0
        """Version of the policy's weights for new requests."""
        self._syncs, self._sync_s = 0, 0.0
        """Number of updates of the policy's weights, and their seconds in total."""
        self._sync_timeout_s, self._asleep = cluster.start_timeout_s, False
        """The latter: verifiers received `sleep`."""
        self._calls, self._ask = calls, partial(ask, calls, controller)
        self.dispatcher = Dispatcher(
            controller,
            calls,
            outstanding_per_verifier=2 * config.target.max_batch,
            no_verifier_timeout_s=cluster.start_timeout_s + cluster.placement_timeout_s,
            shares_outputs=any(one.traits.keeps_history for one in hosted_drafters(config)),
        )
        self._thread = DispatchThread(self.dispatcher, calls.clock)
        self._lock = calls.clock.condition()
        self.open_streams = 0
        self.beginning = set[object]()
        """Calls of `begin` that submit in another thread."""
        self._arriving = self._numbers = self._streams = 0
        """Number of single requests in the inbox; of single requests and streams so far."""
        self._handles: dict[str, Handle] = {}
        """Key → single request that has not ended."""

    @property
    def closed(self) -> bool:
        """Whether no further request is accepted."""
        return self._thread.closed

    # ---- requests ----

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        session: str | None = None,
        priority: int = 0,
        stream: int = 0,
    ) -> Handle:
        """Begin a request; for any thread. Returns at once, except for the time that a text takes to be encoded and
        verifiers to wake: an event loop awaits `begin`.

        Args:
            prompt: Text, chat messages or token ids.
            sampling: Default: the configuration's. Its seed is used unchanged.
            request_id: Name for `running`. Default: a new one.
            session: Name of a conversation; its turns run on one verifier while that lives.
            priority: Requests with a smaller number begin first.
            stream: Number of an open stream to which the request belongs; any number of its requests may wait.

        Raises:
            InputError: The prompt or the sampling cannot be used, or the rollout is closed.
            OverloadedError: Too many requests wait already.
        """
        sampling = self.sampling if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise InputError(f"sampling must be SamplingParams, not {sampling!r}")
        for what, name in (("request_id", request_id), ("session", session)):
            if name is not None and not isinstance(name, str):
                raise InputError(f"{what} must be a text, not {name!r}")
        if not isinstance(priority, int):
            raise InputError(f"priority must be a whole number, not {priority!r}")
        token_ids = self.encoded(prompt)
        stops = self._stops(sampling)
        self.wake_verifiers()
        with self._lock:
            if not stream and self._arriving + self.dispatcher.backlog.single >= self.max_waiting:
                raise OverloadedError(f"{self.max_waiting} requests wait already; try again later")
            self._numbers += 1
            key = f"request-{self._numbers}"
            handle = self._handles[key] = Handle(self._thread, self._read, key, request_id)
            self._arriving += not stream
        entry = JournalEntry(key, token_ids, sampling, session, priority, stream, handle.request_id, stops=stops)
        try:
            self._thread.put(partial(self._admit_one, handle, entry))
        except InputError:
            self._forget(handle)
            raise
        return handle

    def encoded(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InputError."""
        return encode_prompt(self.tokenizer, prompt, self.chat, most=self.context, **self.text_options)

    async def begin(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        """`submit`, in another thread if it may take long; the request is aborted if this is cancelled."""
        submit = partial(self.submit, prompt, sampling, **options)
        if is_token_ids(prompt) and not self._asleep:
            return submit()
        begun, started, left = list[Handle](), self._calls.clock.event(), self._calls.clock.event()

        def begin() -> Handle:
            started.set()
            try:
                begun.append(submit())
            finally:
                self.beginning.discard(left)
            if left.is_set():
                begun[0].drop()
            return begun[0]

        self.beginning.add(left)
        try:
            return await asyncio.to_thread(begin)
        except asyncio.CancelledError:
            left.set()
            if not started.is_set():
                self.beginning.discard(left)
            for handle in begun:
                handle.drop()
            raise

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Trajectory:
        """Submit a request and await its output; it is aborted if this is cancelled. Arguments as in `submit`."""
        handle = await self.begin(prompt, sampling, **options)
        try:
            return await handle
        finally:
            handle.drop()

    def running(self, request_id: str | None = None) -> list[Handle]:
        """Running and waiting single requests with this name, or all."""
        with self._lock:
            return [handle for handle in self._handles.values() if request_id in (None, handle.request_id)]

    def run(self, entries: Sequence[JournalEntry], stream: int) -> Generator[JournalEntry, None, None]:
        """Yield each entry when it has ended, in the order they end; closing this aborts the rest. The ids must be new,
        and `stream` the number of an open stream.

        Raises:
            ActorLostError: The controller, or all verifiers, were gone for longer than allowed.
            InputError: There are stop texts, but no tokenizer.
        """
        ended: deque[JournalEntry | BaseException] = deque()
        ready = self._calls.clock.event()

        def put(one: JournalEntry | BaseException) -> None:
            ended.append(one)
            ready.set()

        self.wake_verifiers()
        for entry in entries:
            entry.stream, entry.stops = stream, self._stops(entry.sampling)
        self._thread.put(partial(self._thread.admit, entries, put))
        left = dict.fromkeys(entry.request_id for entry in entries)  # in order: faults replay exactly
        try:
            while left:
                ready.clear()
                if not ended:
                    ready.wait()
                while ended:
                    one = ended.popleft()
                    if isinstance(one, BaseException):
                        left.clear()
                        raise one
                    left.pop(one.request_id, None)
                    yield one
        finally:
            if left and not self.closed:
                self._thread.put(partial(self._thread.abort, list(left)))

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[int]:
        """Within this context one more stream is open; yields its number."""
        with self._lock:
            self._streams += 1
            self.open_streams += 1
            number = self._streams
        try:
            yield number
        finally:
            with self._lock:
                self.open_streams -= 1

    # ---- between requests ----

    def pause(self, policy: WeightPolicy) -> Future[None]:
        """Hold new requests until `resume`; the policy applies to running ones. The future is done when none runs."""
        self._thread.put(partial(self.dispatcher.hold, policy))
        return self._thread.when(lambda: self.dispatcher.is_drained)

    def resume(self) -> None:
        """End one `pause`."""
        self._thread.put(self.dispatcher.backlog.release)

    def update_weights(self, weights: WeightSet, policy: WeightPolicy | str | None = None) -> int:
        """See `Rollout.update_weights`."""
        self.require_open()
        if policy is None:
            self.require_no_stream("weights cannot change")
        policy = policy_of(policy or WeightPolicy.WAIT)
        if weights.version < self.weight_version:
            raise InputError(f"weights of version {weights.version} come after version {self.weight_version}")
        # From this call on the controller may be updating actors, even if its answer is late.
        self.weight_version = weights.version
        limit_s, begin = self._sync_timeout_s + weights.load_s, self._calls.clock.now()
        if self._asleep:
            self._ask("hold", False)  # of a lost verifier another one takes the weights
        drained = self.pause(policy)
        try:
            self._await(drained)
            self._thread.put(partial(self.dispatcher.journal.raise_version, weights.version))
            self._ask("set_weights", weights, limit_s, deadline_s=limit_s + ASK_S)
        finally:
            self.resume()
        self._syncs, self._sync_s = self._syncs + 1, self._sync_s + self._calls.clock.now() - begin
        return weights.version

    def call_verifiers(self, method: str, *arguments: Any) -> None:
        """Call a method of every verifier that is not lost; a replacement of a lost one starts in a fresh state.

        Raises:
            InputError: A stream is open, or requests run.
            SpecActorError: A live verifier did not do it.
        """
        self.require_no_stream(method)
        if self.running():
            raise InputError(f"{method} while requests run; abort them or await their ends first")
        self.settle()
        self._command(method, *arguments)

    def wake_verifiers(self) -> None:
        """End a sleep of the verifiers, before requests begin."""
        if self._asleep:
            self._command("wake")

    def settle(self) -> None:
        """Wait until nothing runs and verifiers have received all cancellations."""
        self._await(self._thread.when(lambda: self.dispatcher.is_idle))

    def require_open(self) -> None:
        if self.closed:
            raise InputError(CLOSED)

    def require_no_stream(self, what: str) -> None:
        if self.open_streams:
            raise InputError(f"{what} while a stream is open; exhaust or close it first")

    def close(self) -> None:
        """End all requests and the thread."""
        self._thread.close()

    # ---- counters ----

    def reset_metrics(self) -> None:
        """Set the verifiers' counters to zero (after a warm-up)."""
        self.call_verifiers("reset_metrics")
        self._thread.put(self.dispatcher.verifiers.forget_counters)

    def metrics(self) -> RolloutMetrics:
        """Counters over all verifiers since the start or the last `reset_metrics`. Those of running requests are a
        second old; without running requests they are complete."""
        self._take_final_counters()
        # A copy: progress is shown from another thread, while verifiers may join.
        return RolloutMetrics.merge(self.dispatcher.verifiers.counters.copy().values())

    def metric_rows(self, verifiers: bool = True) -> Iterator[Row]:
        """Metrics of the driver and, as new as those of `metrics`, of the verifiers; for any thread."""
        if verifiers:
            self._take_final_counters()
        yield row("specactor_weight_version", self.weight_version, actor=DRIVER)
        yield row("specactor_weight_syncs_total", self._syncs)
        yield row("specactor_weight_sync_seconds_total", self._sync_s)
        yield from self.dispatcher.metric_rows(verifiers)

    def _take_final_counters(self) -> None:
        """Ask verifiers for their counters until they run no request; while requests run, polls bring them."""
        clock, dispatcher = self._calls.clock, self.dispatcher
        end = clock.now() + _COUNTERS_S
        with contextlib.suppress(Exception):  # the queue is closed, or its thread does not answer
            clock.result(self._thread.when(lambda: True), _COUNTERS_S)  # a request that ends now has left the journal
        while not (self.closed or dispatcher.journal.entries) and (left_s := end - clock.now()) > 0.0:
            if dispatcher.verifiers.ask_counters(left_s):
                return
            clock.sleep(_PAUSE_S)

    # ---- parts ----

    def _await(self, future: Future[None]) -> None:
        self._calls.clock.result(future, float("inf"))

    def _command(self, method: str, *arguments: Any) -> None:
        if method == "sleep":
            self._asleep = True
            self._ask("hold", True, deadline_s=self._sync_timeout_s + ASK_S)
        elif method == "wake":
            self._ask("hold", False)
        call_all(self._calls, list(self._ask("view").verifiers.values()), method, *arguments)
        self._asleep = self._asleep and method != "wake"

    def _stops(self, sampling: SamplingParams) -> StopFinder | None:
        if not sampling.stop:
            return None
        sampling.check()  # not checked yet if it comes from another process
        return StopFinder(self.tokenizer, sampling)

    def _read(self, ended: JournalEntry) -> Trajectory:
        return trajectory_of(ended, self.tokenizer)

    def _admit_one(self, handle: Handle, entry: JournalEntry) -> None:
        self._thread.admit([entry], partial(self._finish, handle))
        with self._lock:
            self._arriving -= not entry.stream

    def _finish(self, handle: Handle, ended: JournalEntry | BaseException) -> None:
        self._forget(handle)
        handle.end(ended)

    def _forget(self, handle: Handle) -> None:
        with self._lock:
            del self._handles[handle.key]
