"""Requests at any time: one dispatch thread serves submissions from any thread, event loop and stream.

The thread starts with the first request and sleeps while there is no work. All other threads send it commands, so only
this thread uses the dispatcher and the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from specactor_ray.core.clock import Clock, Thread
from specactor_ray.core.errors import ActorLostError, InputError, OverloadedError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.dispatch import Dispatcher, WeightPolicy
from specactor_ray.rollout.handle import Handle, Reader, wake
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.prompts import Prompt, encode_prompt, is_token_ids
from specactor_ray.rollout.stops import StopFinder
from specactor_ray.rollout.trajectory import Trajectory, trajectory_of

logger = logging.getLogger(__name__)

CLOSED = "this rollout is closed; start another one"
OnEnd = Callable[[JournalEntry | BaseException], None]
"""Called when a request has ended. The requests of a stream have no handles: a handle costs 7 us (AMD EPYC)."""
_CLOSE_S = 10.0
"""Longest wait for the dispatch thread to end."""


class Engine:
    """Runs streams and single requests, at the same time and for any thread and event loop. `before_submit` is called
    in the caller's thread before a request or a stream is submitted; `must_wait`: whether that takes long now."""

    def __init__(
        self, dispatcher: Dispatcher, clock: Clock, before_submit: Callable[[], None], must_wait: Callable[[], bool]
    ) -> None:
        self.clock = clock
        self.max_waiting = 4096
        """Most single requests that wait for a verifier."""
        self.tokenizer: Any = None
        """Encodes prompts that are not token ids, and decodes outputs."""
        self.chat = True
        """Wrap text as a user message if the tokenizer has a chat template."""
        self.sampling = SamplingParams()
        """Sampling parameters of requests without their own."""
        self.text_options: Mapping[str, bool] = {}
        """Options of `encode_prompt` for plain text."""
        self.context: int | None = None
        """Most tokens of prompt and output together; a text that is too long for it is refused unread."""
        self._before_submit, self._must_wait = before_submit, must_wait
        self._work = DispatchThread(dispatcher, clock)
        self._lock = clock.condition()
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
        return self._work.closed

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        session: str | None = None,
        priority: int = 0,
    ) -> Handle:
        """Begin a request; for any thread. Returns at once, except for the time that a text takes to be encoded and
        verifiers to wake: an event loop awaits `begin`.

        Args:
            prompt: Text, chat messages or token ids.
            sampling: Default: the configuration's. Its seed is used unchanged.
            request_id: Name for `running`. Default: a new one.
            session: Name of a conversation; its turns run on one verifier while that lives.
            priority: Requests with a smaller number begin first.

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
        token_ids = encode_prompt(self.tokenizer, prompt, self.chat, most=self.context, **self.text_options)
        stops = self._stops(sampling)
        self._before_submit()
        with self._lock:
            if self._arriving + self._work.dispatcher.waiting >= self.max_waiting:
                raise OverloadedError(f"{self.max_waiting} requests wait already; try again later")
            self._numbers += 1
            key = f"request-{self._numbers}"
            handle = self._handles[key] = Handle(self, key, request_id)
            self._arriving += 1
        entry = JournalEntry(key, token_ids, sampling, session, priority, name=handle.request_id, stops=stops)
        try:
            self._work.put(partial(self._admit_one, handle, entry))
        except InputError:
            self._forget(handle)
            raise
        return handle

    def _stops(self, sampling: SamplingParams) -> StopFinder | None:
        if not sampling.stop:
            return None
        sampling.check()  # not checked yet if it comes from another process
        return StopFinder(self.tokenizer, sampling)

    async def begin(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        """`submit`, in another thread if it may take long; the request is aborted if this is cancelled."""
        submit = partial(self.submit, prompt, sampling, **options)
        if is_token_ids(prompt) and not self._must_wait():
            return submit()
        begun, started, left = list[Handle](), self.clock.event(), self.clock.event()

        def begin() -> Handle:
            started.set()
            try:
                begun.append(submit())
            finally:
                self.beginning.discard(left)
            if left.is_set():
                self.drop(begun[0])
            return begun[0]

        self.beginning.add(left)
        try:
            return await asyncio.to_thread(begin)
        except asyncio.CancelledError:
            left.set()
            if not started.is_set():
                self.beginning.discard(left)
            for handle in begun:
                self.drop(handle)
            raise

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Trajectory:
        """Submit a request and await its output; it is aborted if this is cancelled. Arguments as in `submit`."""
        handle = await self.begin(prompt, sampling, **options)
        try:
            return await handle
        finally:
            self.drop(handle)

    def running(self, request_id: str | None = None) -> list[Handle]:
        """Running and waiting single requests with this name, or all."""
        with self._lock:
            return [handle for handle in self._handles.values() if request_id in (None, handle.request_id)]

    def drop(self, handle: Handle) -> None:
        """Abort the request, unless it has ended; returns at once."""
        if not handle.done() and not self.closed:
            self._work.put(partial(self._work.dispatcher.abort, [handle.key]))

    def watch(self, handle: Handle) -> None:
        """Push committed tokens to the handle from now on."""
        if not handle.done():
            self._work.put(partial(self._work.watch, handle))

    def trajectory(self, ended: JournalEntry) -> Trajectory:
        """Output of a request that has ended; `ended` is the result of its handle's future."""
        return trajectory_of(ended, self.tokenizer)

    def run(self, entries: Sequence[JournalEntry], stream: int) -> Generator[JournalEntry, None, None]:
        """Yield each entry when it has ended, in the order they end; closing this aborts the rest. The ids must be new,
        and `stream` the number of an open stream.

        Raises:
            ActorLostError: The controller, or all verifiers, were gone for longer than allowed.
            InputError: There are stop texts, but no tokenizer.
        """
        ended: deque[JournalEntry | BaseException] = deque()
        ready = self.clock.event()

        def put(one: JournalEntry | BaseException) -> None:
            ended.append(one)
            ready.set()

        self._before_submit()
        for entry in entries:
            entry.stream, entry.stops = stream, self._stops(entry.sampling)
        self._work.put(partial(self._work.admit, entries, put))
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
                self._work.put(partial(self._work.abort, list(left)))

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

    @contextlib.contextmanager
    def between_versions(self, version: int, policy: WeightPolicy) -> Iterator[None]:
        """Within this context no request runs; afterwards, all run with this version of the weights. The policy decides
        what happens to requests that run before."""
        drained = self.pause(policy)
        try:
            self.clock.result(drained, float("inf"))
            self._work.put(partial(self._work.dispatcher.journal.raise_version, version))
            yield
        finally:
            self.resume()

    def pause(self, policy: WeightPolicy) -> Future[None]:
        """Hold new requests until `resume`; the policy applies to running ones. The future is done when none runs."""
        self._work.put(partial(self._work.dispatcher.hold, policy))
        return self._work.when(lambda: self._work.dispatcher.is_drained)

    def resume(self) -> None:
        """End one `pause`."""
        self._work.put(self._work.dispatcher.backlog.release)

    def settle(self) -> None:
        """Wait until nothing runs and verifiers have received all cancellations."""
        self.clock.result(self._work.when(lambda: self._work.dispatcher.is_idle), float("inf"))

    def forget_counters(self) -> None:
        """Drop the verifiers' counters."""
        self._work.put(self._work.dispatcher.verifiers.forget_counters)

    def close(self) -> None:
        """End all requests and the thread."""
        self._work.close()

    def _admit_one(self, handle: Handle, entry: JournalEntry) -> None:
        self._work.admit([entry], partial(self._finish, handle))
        with self._lock:
            self._arriving -= 1

    def _finish(self, handle: Handle, ended: JournalEntry | BaseException) -> None:
        self._forget(handle)
        handle.end(ended)

    def _forget(self, handle: Handle) -> None:
        with self._lock:
            del self._handles[handle.key]


class DispatchThread:
    """Runs the dispatcher, which only this thread uses from now on, except for its counters, and commands of other
    threads. The thread starts with the first command."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self.dispatcher, self._clock = dispatcher, clock
        self.closed = False
        self._lock = clock.condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread: Thread | None = None
        self._on_end: dict[str, OnEnd] = {}
        """Request in the journal → callback at its end. For the dispatch thread, like the next two."""
        self._watched: dict[str, Handle] = {}
        self._awaited: list[tuple[Callable[[], bool], Future[None]]] = []
        """Conditions, and futures that are done when they hold."""

    def put(self, command: Callable[[], None]) -> None:
        """Run a command in the dispatch thread, in the order of these calls; for any thread."""
        with self._lock:
            if self.closed:
                raise InputError(CLOSED)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = self._clock.spawn(self._run, "dispatch")
        self.dispatcher.verifiers.wake.set()

    def when(self, condition: Callable[[], bool]) -> Future[None]:
        """A future that is done when the condition holds after a step and all earlier commands; for any thread."""
        future: Future[None] = Future()
        self.put(lambda: self._awaited.append((condition, future)))
        return future

    def close(self) -> None:
        """End all requests and the thread; for any thread."""
        with self._lock:
            self.closed = True
            thread = self._thread
        self.dispatcher.verifiers.wake.set()
        if thread is not None:
            thread.join(_CLOSE_S)

    def admit(self, entries: Sequence[JournalEntry], on_end: OnEnd) -> None:
        """Admit requests; `on_end` is called with each when it has ended, or once with an error."""
        names = [entry.request_id for entry in entries]
        if len(set(names)) < len(names) or not self._on_end.keys().isdisjoint(names):
            on_end(InputError("two requests that run have the same id"))
            return
        self._on_end.update(dict.fromkeys(names, on_end))
        self.dispatcher.admit(entries)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without their callbacks."""
        for request_id in request_ids:
            self._on_end.pop(request_id, None)
        self.dispatcher.abort(request_ids)

    def watch(self, handle: Handle) -> None:
        """Push committed tokens to the handle from now on."""
        if handle.key in self._on_end:
            self._watched[handle.key] = handle
            wake(self._push(handle))

    def _run(self) -> None:
        try:
            while not self.closed:
                self._look()
            self._run_inbox()
            self._fail_all(InputError(CLOSED))
        except Exception as error:
            logger.exception("requests could not be dispatched")
            self._fail_all(error)
        finally:
            with self._lock:
                more = self._inbox and not self.closed
                self._thread = self._clock.spawn(self._run, "dispatch") if more else None

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _look(self) -> None:
        """Run the queued commands, then take a step, or sleep while there is no work."""
        dispatcher = self.dispatcher
        self._run_inbox()
        if dispatcher.is_idle and dispatcher.verifiers.at_rest:
            self._resolve()
            if not self._inbox:
                dispatcher.verifiers.wake.wait()
                dispatcher.verifiers.wake.clear()  # before the inbox is read
            return
        try:
            ended = dispatcher.step(bool(self._watched))
        except ActorLostError as error:  # no verifier is available; a later request may find one
            self._fail_requests(error)
            ended = []
        wake([reader for handle in self._watched.values() for reader in self._push(handle)])
        for entry in ended:
            self._watched.pop(entry.request_id, None)
            if (on_end := self._on_end.pop(entry.request_id, None)) is not None:
                on_end(entry)
        self._resolve()

    def _resolve(self) -> None:
        """Resolve the futures with conditions that hold."""
        waiting, self._awaited = self._awaited, []
        for condition, future in waiting:
            if condition():
                future.set_result(None)
            else:
                self._awaited.append((condition, future))

    def _push(self, handle: Handle) -> Sequence[Reader]:
        """Pass on committed tokens, if there are new ones. Returns the readers to wake."""
        entry, at = self.dispatcher.journal.entries.get(handle.key), len(handle.pushed)
        return handle.push(entry.tokens_from(at)) if entry is not None and entry.num_tokens > at else ()

    def _fail_requests(self, error: BaseException) -> None:
        self.dispatcher.abandon()
        self._watched.clear()
        on_end, self._on_end = self._on_end, {}
        for end in dict.fromkeys(on_end.values()):
            end(error)

    def _fail_all(self, error: BaseException) -> None:
        """Fail all requests and futures, since the thread ends."""
        self._fail_requests(error)
        waiting, self._awaited = self._awaited, []
        for _, future in waiting:
            future.set_exception(error)
