"""The thread that alone uses the dispatcher and the journal; all other threads send it commands.

It starts with the first command and sleeps while there is no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from specactor_ray.core.clock import Clock, Thread
from specactor_ray.core.errors import ActorLostError, InputError
from specactor_ray.rollout.dispatch import Dispatcher
from specactor_ray.rollout.journal import JournalEntry

logger = logging.getLogger(__name__)

CLOSED = "this rollout is closed; start another one"
_CLOSE_S = 10.0
"""Longest wait for the end of the thread."""
OnEnd = Callable[[JournalEntry | BaseException], None]
"""Called when a request has ended. The requests of a stream have no handles: a handle costs 7 us (AMD EPYC)."""
Reader = tuple[asyncio.AbstractEventLoop | None, Any]
"""Event that a reader of tokens waits for, and its event loop, if it has one."""
Push = Callable[[JournalEntry], Sequence[Reader]]
"""Passes on the new tokens of a request that runs, if there are any. Returns the readers to wake."""


def wake(readers: Iterable[Reader]) -> None:
    """Wake readers, those of an event loop by one call: each call is a system call, and may give up Python's lock."""
    by_loop = dict[asyncio.AbstractEventLoop | None, list[Any]]()
    for loop, ready in readers:
        by_loop.setdefault(loop, []).append(ready)
    for loop, events in by_loop.items():
        if loop is None:
            _set(events)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set, events)


def _set(events: Iterable[Any]) -> None:
    for event in events:
        event.set()


class DispatchThread:
    """Runs the dispatcher, which only this thread uses from now on, except for its counters, and commands of other
    threads. The thread starts with the first command."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self.dispatcher, self.clock = dispatcher, clock
        self.closed = False
        self._lock = clock.condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread: Thread | None = None
        self._on_end: dict[str, OnEnd] = {}
        """Request in the journal → callback at its end. For the dispatch thread, like the next two."""
        self._watched: dict[str, Push] = {}
        """Id of a streamed request → function that receives its tokens."""
        self._awaited: list[tuple[Callable[[], bool], Future[None]]] = []
        """Conditions, and futures that are done when they hold."""

    def put(self, command: Callable[[], None]) -> None:
        """Run a command in the dispatch thread, in the order of these calls; for any thread."""
        with self._lock:
            if self.closed:
                raise InputError(CLOSED)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = self.clock.spawn(self._run, "dispatch")
        self.dispatcher.verifiers.wake.set()

    def when(self, condition: Callable[[], bool]) -> Future[None]:
        """A future that is done when the condition holds after a step and all earlier commands; for any thread."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: a cancelled reader leaves the others alone
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

    def drop(self, request_id: str) -> None:
        """Abort a request, unless it has ended; returns at once; for any thread."""
        if not self.closed:
            self.put(partial(self.dispatcher.abort, [request_id]))

    def watch(self, request_id: str, push: Push) -> None:
        """Pass on the tokens of a request from now on; for any thread."""
        self.put(partial(self._watch, request_id, push))

    def _watch(self, request_id: str, push: Push) -> None:
        if request_id in self._on_end:
            self._watched[request_id] = push
            wake(self._push(request_id))

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
                self._thread = self.clock.spawn(self._run, "dispatch") if more else None

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _look(self) -> None:
        """Run the queued commands, then take a step, or sleep while there is no work."""
        dispatcher = self.dispatcher
        self._run_inbox()
        if dispatcher.is_idle:
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
        wake([reader for request_id in self._watched for reader in self._push(request_id)])
        for entry in ended:
            self._watched.pop(entry.request_id, None)
            if (on_end := self._on_end.pop(entry.request_id, None)) is not None:
                on_end(entry)
        self._resolve()

    def _resolve(self) -> None:
        """Resolve the futures with conditions that hold."""
        for one in [one for one in self._awaited if one[0]()]:
            self._awaited.remove(one)
            one[1].set_result(None)

    def _push(self, request_id: str) -> Sequence[Reader]:
        entry = self.dispatcher.journal.entries.get(request_id)
        return () if entry is None else self._watched[request_id](entry)

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
