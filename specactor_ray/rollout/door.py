"""Requests from other processes of the cluster: an actor holds them for the driver, and their outputs for the senders.

A driver cannot be called, so both sides call the actor: each keeps one read in flight, and one write while there are
messages to send. Messages are numbered and kept until their reader confirms them: each is taken once and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Generates, Handle
from specactor_ray.rollout.prompts import Prompt

logger = logging.getLogger(__name__)

_READ_S = 5.0
"""Longest time a read waits at the actor."""
_CLOSE_S = 30.0
"""Longest wait for the end of a thread."""
_SILENT_S = 120.0
"""Time without a read after which a sender counts as dead."""
ALL = -1
"""Stands for all requests of a sender, in place of a number."""
ENGINE = "engine"
"""Name of the actor within its run."""
DRIVER = "driver"
"""Name of the driver as a reader; those of senders are random."""


class Message(NamedTuple):
    """Command of a sender to the driver, or a part of an output for the sender."""

    sender: str
    number: int
    """Number of the request, counted by its sender."""
    what: str
    """`submit`, `watch` or `drop`, like the methods of an engine; `tokens` or `end` of an output."""
    content: Any = None
    """Arguments of `Engine.submit`; committed tokens; the trajectory, or the error, at the end."""


class Mail:
    """Messages for one reader in order, numbered from 0, kept until later ones are read. For one event loop."""

    def __init__(self) -> None:
        self.sent = 0
        """Number of messages that this reader has sent."""
        self.read_at = time.monotonic()
        self.arrived = asyncio.Event()
        """Ends a read that waits."""
        self._first, self._messages = 0, list[Message]()

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self.arrived.set()

    async def read(self, after: int, timeout_s: float) -> list[Message]:
        """The messages from number `after` on; earlier ones are discarded."""
        self.read_at = time.monotonic()
        del self._messages[: max(0, after - self._first)]
        self._first = max(self._first, after)
        if not self._messages:
            self.arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.arrived.wait(), timeout_s)
        return list(self._messages)


class EngineActor:
    """Holds the messages between the driver of a run and its senders; an asynchronous actor."""

    def __init__(self, silent_s: float = _SILENT_S) -> None:
        self._silent_s = silent_s
        self._mails: dict[str, Mail] = {}
        """Reader → its messages: the driver, and the senders that have not left."""

    async def greet(self, reader: str) -> None:
        """Register a reader."""
        self._mails.setdefault(reader, Mail())

    async def leave(self, reader: str) -> None:
        """Remove a reader. The requests of a sender are aborted, and their outputs dropped."""
        if (mail := self._mails.pop(reader, None)) is not None:
            mail.arrived.set()
            self._put(DRIVER, Message(reader, ALL, "drop"))

    async def send(self, writer: str, first: int, messages: list[Message]) -> None:
        """Queue messages of a writer, from its number `first` on; repeated ones and those of a sender that has left are
        dropped."""
        if (own := self._mails.get(writer)) is None:
            return
        for message in messages[max(0, own.sent - first) :]:
            self._put(message.sender if writer == DRIVER else DRIVER, message)
        own.sent = max(own.sent, first + len(messages))

    async def read(self, reader: str, after: int, timeout_s: float) -> list[Message]:
        """The messages of a reader, see `Mail.read`. Senders that have not read for a long time are removed."""
        if reader not in self._mails:
            raise SpecActorError("its requests were aborted: its process was taken for dead")
        for sender, mail in list(self._mails.items()):
            if sender not in (DRIVER, reader) and time.monotonic() - mail.read_at > self._silent_s:
                logger.info("a process that sent requests has ended; they are aborted")
                await self.leave(sender)
        return await self._mails[reader].read(after, timeout_s)

    def _put(self, reader: str, message: Message) -> None:
        if (mail := self._mails.get(reader)) is not None:
            mail.put(message)


class Exchange:
    """Messages of one reader from and to the actor, in two threads. Calls are repeated until the actor is gone.

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
        take: Callable[[Message], None],
        lost: Callable[[SpecActorError], None] = lambda _error: None,
    ) -> None:
        self._calls, self._actor, self._reader = calls, actor, reader
        self._take, self._lost = take, lost
        self._outbox: SimpleQueue[Callable[[], Message] | None] = SimpleQueue()
        self._closed = False
        self._ask("greet")
        loops = {"engine reads": self._read, "engine writes": self._write}
        self._threads = [calls.clock.spawn(partial(self._run, loop), name) for name, loop in loops.items()]

    def put(self, make: Callable[[], Message]) -> None:
        """Send the result of `make`, which is called in a thread of the exchange; for any thread."""
        self._outbox.put(make)

    def close(self) -> None:
        """Send the queued messages, and leave."""
        self._closed = True
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            if not self._closed:
                self._closed = True
                logger.exception("requests of other processes can be exchanged no more")
                self._lost(_own(error))

    def _read(self) -> None:
        read = 0
        while not self._closed:
            for message in self._ask("read", read, _READ_S):
                self._take(message)
                read += 1

    def _write(self) -> None:
        sent, ends = 0, False
        while not ends:
            makers = [self._outbox.get()]
            while not self._outbox.empty():
                makers.append(self._outbox.get())
            messages = [make() for make in makers if make is not None]
            self._ask("send", sent, messages)
            sent, ends = sent + len(messages), None in makers
        self._ask("leave")

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._calls.ask(self._actor, method, self._reader, *arguments, deadline_s=math.inf)


class Doorman:
    """Submits requests of other processes on the driver's side, and sends back their outputs."""

    def __init__(self, engine: Generates, calls: Calls, actor: Any) -> None:
        self.actor, self._engine = actor, engine
        self._handles: dict[tuple[str, int], Handle] = {}
        """Sender and number → request that has not ended."""
        self._exchange = Exchange(calls, actor, DRIVER, self._take)

    def close(self) -> None:
        self._exchange.close()

    def _take(self, message: Message) -> None:
        key = sender, number = message.sender, message.number
        if message.what == "submit":
            try:
                handle = self._handles[key] = self._engine.submit(**message.content)
            except Exception as error:  # noqa: BLE001 - raised by the sender
                refused = Message(sender, number, "end", _own(error))
                self._exchange.put(lambda: refused)
            else:
                handle.future.add_done_callback(lambda _future: self._end(key, handle))
        elif message.what == "watch" and (watched := self._handles.get(key)) is not None:
            watched.listen(self._pusher(key, watched))
        elif message.what == "drop":
            for one, dropped in list(self._handles.items()):
                if one == key or (one[0] == sender and number == ALL):
                    self._engine.drop(dropped)

    def _pusher(self, key: tuple[str, int], handle: Handle) -> Callable[[], None]:
        """A function that sends the tokens pushed since its last call."""
        sent = 0

        def push() -> None:
            nonlocal sent
            fresh = handle.pushed[sent:]
            sent += len(fresh)
            self._exchange.put(lambda: Message(*key, "tokens", fresh))

        return push

    def _end(self, key: tuple[str, int], handle: Handle) -> None:
        self._handles.pop(key, None)

        def make() -> Message:  # decodes the output: not for the dispatch thread
            try:
                return Message(*key, "end", handle.result(0.0))
            except Exception as error:  # noqa: BLE001 - raised by the sender
                return Message(*key, "end", _own(error))

        self._exchange.put(make)


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
        self._error: SpecActorError | None = None
        """Why no request is accepted any more."""
        self._exchange = Exchange(calls, actor, self._sender, self._take, self._fail)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        if self._error is not None:
            raise self._error
        number = next(self._count)
        name = options.pop("request_id", None) or f"request-{self._sender}-{number}"
        handle = self._handles[number] = Handle(self, name, number)
        self._send(number, "submit", {"prompt": prompt, "sampling": sampling, "request_id": name, **options})
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
        self._exchange.close()
        self._fail(InputError("the connection to the engine is closed"))
        self._on_close()

    def _send(self, number: int, what: str, content: Any = None) -> None:
        message = Message(self._sender, number, what, content)
        self._exchange.put(lambda: message)

    def _take(self, message: Message) -> None:
        if (handle := self._handles.get(message.number)) is None:
            return
        if message.what == "tokens":
            handle.push(message.content)
        else:
            del self._handles[message.number]
            handle.end(message.content)

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
