"""Requests from other processes of the cluster: an actor holds them for the driver, and their outputs for the senders.

A driver cannot be called, so both sides call the actor: each keeps one read in flight, and one write while there are
messages to send. Messages are numbered and kept until their reader confirms them, so none is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from specactor_ray.cluster.calls import Call, Calls, translate_ray_error
from specactor_ray.core.clock import Thread
from specactor_ray.core.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Generates, Handle, Token
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

_READ_S = 5.0
"""Longest time a read waits at the actor."""
_CALL_S = 30.0
"""Longest wait for an answer of the actor, or the end of a thread."""
_CLOSED = "the connection to the engine is closed"
_GONE = "its requests were aborted: its process was taken for dead"
ALL = -1
"""Stands for all requests of a sender, in place of a number."""
ENGINE = "engine"
"""Name of the actor within its run."""
DRIVER = "driver"
"""Name of the driver as a reader; those of senders are random."""


class Command(NamedTuple):
    """Message from a sender to the driver."""

    sender: str
    number: int
    """Number of the request, counted by its sender."""
    what: str
    """`submit`, `watch` or `drop`, like the methods of an engine."""
    arguments: dict[str, Any]
    """Arguments of `Engine.submit`; else empty."""


class OutputPart(NamedTuple):
    """Message from the driver to a sender."""

    number: int
    tokens: list[Token]
    """Committed tokens, from number `first` on."""
    first: int = 0
    ended: Trajectory | BaseException | None = None


class Mail:
    """Messages of one reader in order, numbered from 0, kept until later ones are read. For one event loop."""

    def __init__(self) -> None:
        self._first, self._messages, self._arrived = 0, list[Any](), asyncio.Event()

    def put(self, message: Any) -> None:
        self._messages.append(message)
        self._arrived.set()

    async def read(self, after: int, timeout_s: float) -> tuple[int, list[Any]]:
        """Number of the first message, and the messages; those before number `after` are discarded."""
        del self._messages[: max(0, after - self._first)]
        self._first = max(self._first, after)
        if not self._messages:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
        return self._first, list(self._messages)


class EngineActor:
    """Holds the messages between the driver of a run and its senders; an asynchronous actor."""

    def __init__(self) -> None:
        self._mails = {DRIVER: Mail()}
        """Reader → its messages: the driver, and the senders that have not left."""
        self._staying: dict[str, asyncio.Event] = {}
        """Sender → event that is set when it leaves."""
        self._watches: set[asyncio.Task[None]] = set()

    async def stay(self, sender: str) -> None:
        """Return when the sender leaves. The sender owns the reference of this call."""
        await self._staying.setdefault(sender, asyncio.Event()).wait()

    async def greet(self, sender: str, staying: list[Any]) -> None:
        """Register a sender. `staying` holds the reference of its call of `stay`, which fails when its process ends."""
        if sender not in self._mails:
            self._mails[sender] = Mail()
            watch = asyncio.ensure_future(self._watch(sender, staying[0]))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def leave(self, sender: str) -> None:
        """Remove a sender: its requests are aborted, and their outputs dropped."""
        if self._mails.pop(sender, None) is not None:
            self._staying.pop(sender, asyncio.Event()).set()
            self._mails[DRIVER].put(Command(sender, ALL, "drop", {}))

    async def _watch(self, sender: str, staying: Any) -> None:
        try:
            await staying
        except Exception as error:  # noqa: BLE001 - Ray's errors; those of a living sender's calls do not count
            if isinstance(translate_ray_error(error, "a sender"), ActorLostError):
                logger.info("a process that sent requests has ended; they are aborted")
                await self.leave(sender)

    async def send(self, messages: list[tuple[str, Any]]) -> None:
        """Queue messages, each for one reader; those of a sender that has left are dropped."""
        for reader, message in messages:
            if (mail := self._mails.get(reader)) is not None:
                mail.put(message)

    async def read(self, reader: str, after: int, timeout_s: float) -> tuple[int, list[Any]]:
        """The messages of a reader, see `Mail.read`."""
        if reader not in self._mails:
            raise SpecActorError(_GONE)
        return await self._mails[reader].read(after, timeout_s)


class Exchange:
    """Calls of one reader to the actor, in a thread. They are repeated until the actor is gone.

    Args:
        calls, actor: The actor, and the calls to it.
        reader: Its name.
        take: Called with each of its messages, once and in order.
        lost: Called when the actor is gone.
    """

    def __init__(
        self,
        calls: Calls,
        actor: Any,
        reader: str,
        take: Callable[[Any], None],
        lost: Callable[[SpecActorError], None],
    ) -> None:
        self._calls, self._actor, self._reader = calls, actor, reader
        self._take, self._lost = take, lost
        self._outbox: deque[Callable[[], tuple[str, Any]]] = deque()
        """Functions that each make a message, with its reader."""
        self._wake = calls.clock.event()
        self._cursor, self._closed = 0, False
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to read; messages that were put before are sent now."""
        self._thread = self._calls.clock.spawn(self._run, "engine messages")

    def put(self, make: Callable[[], tuple[str, Any]]) -> None:
        """Send the result of `make`, which is called in the thread of the exchange; for any thread."""
        self._outbox.append(make)
        self._wake.set()

    def close(self) -> None:
        """Send the queued messages, and end."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CALL_S)

    def _run(self) -> None:
        reading: Call | None = None
        writing: Call | None = None
        try:
            while not self._closed or self._outbox or writing is not None:
                if reading is None:
                    reading = self._start("read", self._reader, self._cursor, _READ_S)
                if writing is None and self._outbox:
                    makers = [self._outbox.popleft() for _ in range(len(self._outbox))]
                    writing = self._start("send", [make() for make in makers])
                self._wake.wait(1.0)
                self._wake.clear()
                if reading.poll():
                    first, messages = reading.result()
                    for message in messages[max(0, self._cursor - first) :]:
                        self._take(message)
                    self._cursor, reading = max(self._cursor, first + len(messages)), None
                if writing is not None and writing.poll():
                    writing.result()
                    writing = None
        except Exception as error:
            if not self._closed:
                logger.exception("requests of other processes can be exchanged no more")
                self._lost(_own(error))

    def _start(self, method: str, *arguments: Any) -> Call:
        return self._calls.start(self._actor, method, *arguments, deadline_s=math.inf, wake=self._wake.set)


class Doorman:
    """Submits requests of other processes on the driver's side, and sends back their outputs."""

    def __init__(self, engine: Generates, calls: Calls, actor: Any) -> None:
        self.actor, self._engine = actor, engine
        self._handles: dict[tuple[str, int], Handle] = {}
        """Sender and number → request that has not ended."""
        self._newest: dict[str, int] = {}
        """Sender → number of its newest request; repeated ones are ignored."""
        self._exchange = Exchange(calls, actor, DRIVER, self._take, self._lost)
        self._exchange.start()

    def close(self) -> None:
        self._exchange.close()

    def _take(self, command: Command) -> None:
        sender, number = command.sender, command.number
        if command.what == "submit" and number > self._newest.get(sender, ALL):
            self._newest[sender] = number
            try:
                handle = self._handles[sender, number] = self._engine.submit(**command.arguments)
            except Exception as error:  # noqa: BLE001 - raised by the sender
                self._send(sender, OutputPart(number, [], ended=_own(error)))
            else:
                handle.future.add_done_callback(lambda _future: self._end(sender, number, handle))
        elif command.what == "watch" and (watched := self._handles.get((sender, number))) is not None:
            sent: list[Token] = []
            watched.listen(lambda: self._push(sender, number, watched, sent))
        elif command.what == "drop":
            for key, dropped in list(self._handles.items()):
                if key == (sender, number) or (key[0] == sender and number == ALL):
                    self._engine.drop(dropped)

    def _push(self, sender: str, number: int, handle: Handle, sent: list[Token]) -> None:
        if fresh := handle.pushed[len(sent) :]:
            self._send(sender, OutputPart(number, fresh, len(sent)))
            sent += fresh

    def _end(self, sender: str, number: int, handle: Handle) -> None:
        self._handles.pop((sender, number), None)

        def make() -> tuple[str, OutputPart]:  # decodes the output: not for the dispatch thread
            try:
                return sender, OutputPart(number, [], ended=handle.result(0.0))
            except Exception as error:  # noqa: BLE001 - raised by the sender
                return sender, OutputPart(number, [], ended=_own(error))

        self._exchange.put(make)

    def _send(self, sender: str, part: OutputPart) -> None:
        self._exchange.put(lambda: (sender, part))

    def _lost(self, error: SpecActorError) -> None:
        for handle in list(self._handles.values()):
            self._engine.drop(handle)


class RemoteEngine(Generates):
    """The engine of a run, for another process of its cluster; see `Engine.connect`. A context manager.

    Args:
        calls, actor: The run's `EngineActor`, and the calls to it.
        on_close: Called at the end.
    """

    def __init__(self, calls: Calls, actor: Any, on_close: Callable[[], None] = lambda: None) -> None:
        self.clock = calls.clock
        self._sender, self._count, self._on_close = secrets.token_hex(8), itertools.count(), on_close
        self._handles: dict[int, Handle] = {}
        """Number → request that has not ended."""
        self._has_left = False
        self._error: SpecActorError | None = None
        """Reason why no request is accepted any more."""
        self._calls, self._actor = calls, actor
        self._staying = actor.stay.remote(self._sender)
        """Owned by this process, so that the call fails when the process ends."""
        self._call("greet", [self._staying])
        self._exchange = Exchange(calls, actor, self._sender, self._take, self._fail)
        self._exchange.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        number = next(self._count)
        name = options.pop("request_id", None) or f"request-{self._sender}-{number}"
        handle = self._handles[number] = Handle(self, name, number)
        if self._error is not None:  # set before `_fail` ends the registered handles
            self._handles.pop(number, None)
            raise self._error
        self._send(number, "submit", prompt=prompt, sampling=sampling, request_id=name, **options)
        return handle

    def handle(self, request_id: str) -> Handle:
        for handle in list(self._handles.values()):
            if handle.request_id == request_id:
                return handle
        raise InputError(f"no request {request_id!r} of this process is running")

    def drop(self, handle: Handle) -> None:
        if not handle.done():
            self._send(handle.key, "drop")

    def watch(self, handle: Handle) -> None:
        if not handle.done():
            self._send(handle.key, "watch")

    def close(self) -> None:
        """Abort running requests, and leave."""
        if self._has_left:
            return
        self._has_left, self._error = True, InputError(_CLOSED)
        self._exchange.close()
        with contextlib.suppress(SpecActorError):
            self._call("leave")
        self._fail(self._error)
        self._on_close()

    def _call(self, method: str, *arguments: Any) -> None:
        self._calls.ask(self._actor, method, self._sender, *arguments, deadline_s=_CALL_S)

    def _send(self, number: int, what: str, **arguments: Any) -> None:
        self._exchange.put(lambda: (DRIVER, Command(self._sender, number, what, arguments)))

    def _take(self, part: OutputPart) -> None:
        if (handle := self._handles.get(part.number)) is None:
            return
        if part.ended is None and part.first <= len(handle.pushed):
            handle.push(list(part.tokens[len(handle.pushed) - part.first :]))
        elif part.ended is not None:
            del self._handles[part.number]
            handle.end(part.ended)

    def _fail(self, error: SpecActorError) -> None:
        self._error = self._error or error
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.end(error)


def _own(error: Exception) -> SpecActorError:
    """The error as one of this package, which every process can unpickle."""
    return error if isinstance(error, SpecActorError) else SpecActorError(f"{type(error).__name__}: {error}")


def connect_engine(run: str | None = None, address: str = "auto") -> RemoteEngine:
    """The engine of a run that listens (`Rollout.listen`), for another process of its cluster.

    Args:
        run: Name of the run; None selects the only run of the cluster.
        address: `host:port`; `auto`: RAY_ADDRESS, else the only cluster on this machine with such a run.

    Raises:
        ClusterError, InputError: There is no such cluster or run, there are several, or it does not listen.
    """
    from specactor_ray.cluster.connection import join_run

    connection, _, engine = join_run(run, address, ENGINE)
    try:
        return RemoteEngine(Calls(), engine, connection.close)
    except BaseException:
        connection.close()
        raise
