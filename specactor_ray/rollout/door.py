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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from specactor_ray.cluster.calls import Call, Calls, translate_ray_error
from specactor_ray.core.clock import SYSTEM, Thread
from specactor_ray.core.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Generates, Handle, Token
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

_READ_S = 5.0
"""Longest time a read waits at the actor."""
_CLOSE_S = 5.0
_GONE_S = 60.0
"""Seconds without a read after which a sender is gone: its requests are aborted, as at the end of its process."""
_MOST_GONE = 65_536
"""Number of departed senders that are remembered."""
_CLOSED = "the connection to the engine is closed"
ALL = -1
"""Stands for all requests of a sender, in place of a number."""
ENGINE = "engine"
"""Name of the actor within its run."""


class Command(NamedTuple):
    """Message from a sender to the driver."""

    sender: str
    number: int
    """Number of the request, counted by its sender."""
    what: str
    """`submit`, `watch` or `drop`, like the methods of an engine."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Arguments of `Engine.submit`."""


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
        self.read_at = SYSTEM.now()
        """Time of the last read."""

    def put(self, messages: Sequence[Any]) -> None:
        self._messages.extend(messages)
        self._arrived.set()

    def replace(self, message: Any) -> None:
        """Replace all unconfirmed messages by this one."""
        self._first, self._messages, self.read_at = self._first + len(self._messages), [message], SYSTEM.now()

    @property
    def is_left(self) -> bool:
        """Whether messages have waited for too long, so that the reader is gone."""
        return bool(self._messages) and SYSTEM.now() - self.read_at > _GONE_S

    async def read(self, after: int, timeout_s: float) -> tuple[int, list[Any]]:
        """Number of the first message, and the messages; those before number `after` are discarded."""
        del self._messages[: max(0, after - self._first)]
        self._first, self.read_at = max(self._first, after), SYSTEM.now()
        if not self._messages:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
        return self._first, list(self._messages)


class EngineActor:
    """Connects the driver of a run with the processes that send it requests; an asynchronous actor."""

    def __init__(self) -> None:
        self._commands, self._outputs = Mail(), dict[str, Mail]()
        self._staying: dict[str, asyncio.Event] = {}
        """Sender → event that is set when it leaves."""
        self._gone: dict[str, None] = {}
        """Senders that have left, the newest last."""
        self._watches: set[asyncio.Task[None]] = set()

    async def stay(self, sender: str) -> None:
        """Return when the sender leaves. The sender owns the reference of this call."""
        if sender not in self._gone:
            await self._staying.setdefault(sender, asyncio.Event()).wait()

    async def greet(self, sender: str, staying: list[Any]) -> None:
        """Register a sender. `staying` holds the reference of its call of `stay`, which fails when its process ends."""
        if sender not in self._gone:
            watch = asyncio.ensure_future(self._watch(sender, staying[0]))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def leave(self, sender: str) -> None:
        """Remove a sender: its requests are aborted, and their outputs dropped."""
        if sender in self._gone:
            return
        self._gone[sender] = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        self._staying.pop(sender, asyncio.Event()).set()
        self._outputs.pop(sender, None)
        self._commands.put([Command(sender, ALL, "drop")])

    async def _watch(self, sender: str, staying: Any) -> None:
        try:
            await staying
        except Exception as error:  # noqa: BLE001 - Ray's errors; a sender that still lives is detected by its reads
            if isinstance(translate_ray_error(error, "a sender"), ActorLostError):
                logger.info("a process that sent requests has ended; they are aborted")
                await self.leave(sender)

    async def send_commands(self, messages: list[Command]) -> None:
        """Queue messages of a sender for the driver."""
        self._commands.put(messages)

    async def read_commands(self, after: int, timeout_s: float) -> tuple[int, list[Command]]:
        """Read messages; called by the driver."""
        return await self._commands.read(after, timeout_s)

    async def send_outputs(self, messages: list[tuple[str, OutputPart]]) -> None:
        """Queue messages of the driver, each for one sender."""
        for sender, message in messages:
            if sender in self._gone:
                continue
            self._outputs.setdefault(sender, Mail()).put([message])
        for sender, mail in self._outputs.items():
            if mail.is_left:
                lost = SpecActorError(f"its requests were aborted: no output was taken for {_GONE_S:.0f} s")
                mail.replace(OutputPart(ALL, [], ended=lost))
                self._commands.put([Command(sender, ALL, "drop")])

    async def read_outputs(self, sender: str, after: int, timeout_s: float) -> tuple[int, list[OutputPart]]:
        """Read messages; called by a sender."""
        return await self._outputs.setdefault(sender, Mail()).read(after, timeout_s)


class Exchange:
    """Calls of one side to the actor, in a separate thread. They are repeated until the actor is gone.

    Args:
        calls, actor: The actor, and the calls to it.
        write: Method that takes a list of messages.
        read: Method that returns messages, and its first arguments.
        take: Called with each message, once and in order.
        lost: Called when the actor is gone.
    """

    def __init__(
        self,
        calls: Calls,
        actor: Any,
        write: str,
        read: tuple[Any, ...],
        take: Callable[[Any], None],
        lost: Callable[[SpecActorError], None],
    ) -> None:
        self._calls, self._actor, self._write, self._read = calls, actor, write, read
        self._take, self._lost = take, lost
        self._outbox: deque[Callable[[], Any]] = deque()
        """Functions that each make a message."""
        self._wake = calls.clock.event()
        self._cursor, self._closed = 0, False
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to read; messages that were put before are sent now."""
        self._thread = self._calls.clock.spawn(self._run, f"{self._write} engine")

    def put(self, make: Callable[[], Any]) -> None:
        """Send the result of `make`, which is called in the thread of the exchange; for any thread."""
        self._outbox.append(make)
        self._wake.set()

    def close(self) -> None:
        """Send the queued messages, and end."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        reading: Call | None = None
        writing: Call | None = None
        try:
            while not self._closed or self._outbox or writing is not None:
                if reading is None:
                    method, *arguments = self._read
                    reading = self._start(method, *arguments, self._cursor, _READ_S)
                if writing is None and self._outbox:
                    makers = [self._outbox.popleft() for _ in range(len(self._outbox))]
                    writing = self._start(self._write, [make() for make in makers])
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
        self._exchange = Exchange(calls, actor, "send_outputs", ("read_commands",), self._take, self._lost)
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
        self._exchange.put(partial(_same, (sender, part)))

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
        self._closed = False
        self._calls, self._actor = calls, actor
        self._staying = calls.transport.send(actor, "stay", [self._sender])
        """Owned by this process, so that the call fails when the process ends."""
        self._tell("greet", [self._staying])
        self._exchange = Exchange(calls, actor, "send_commands", ("read_outputs", self._sender), self._take, self._fail)
        self._exchange.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        if self._closed:
            raise InputError(_CLOSED)
        number = next(self._count)
        name = options.pop("request_id", None) or f"request-{self._sender}-{number}"
        handle = self._handles[number] = Handle(self, name, number)
        arguments = {"prompt": prompt, "sampling": sampling, "request_id": name, **options}
        self._exchange.put(partial(Command, self._sender, number, "submit", arguments))
        return handle

    def handle(self, request_id: str) -> Handle:
        for handle in list(self._handles.values()):
            if handle.request_id == request_id:
                return handle
        raise InputError(f"no request {request_id!r} of this process is running")

    def drop(self, handle: Handle) -> None:
        self._send(handle, "drop")

    def watch(self, handle: Handle) -> None:
        self._send(handle, "watch")

    def close(self) -> None:
        """Abort running requests, and leave."""
        if self._closed:
            return
        self._closed = True
        for handle in list(self._handles.values()):
            self.drop(handle)
        self._exchange.close()
        with contextlib.suppress(SpecActorError):
            self._tell("leave").result()
        self._fail(InputError(_CLOSED))
        self._on_close()

    def _tell(self, method: str, *arguments: Any) -> Call:
        return self._calls.start(self._actor, method, self._sender, *arguments, deadline_s=_CLOSE_S)

    def _send(self, handle: Handle, what: str) -> None:
        if not handle.done():
            self._exchange.put(partial(Command, self._sender, handle.key, what))

    def _take(self, part: OutputPart) -> None:
        if part.number == ALL and isinstance(part.ended, SpecActorError):
            self._fail(part.ended)
        elif (handle := self._handles.get(part.number)) is None:
            return
        elif part.ended is None and part.first <= len(handle.pushed):
            handle.push(list(part.tokens[len(handle.pushed) - part.first :]))
        elif part.ended is not None:
            del self._handles[part.number]
            handle.end(part.ended)

    def _fail(self, error: SpecActorError) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.end(error)


def _own(error: Exception) -> SpecActorError:
    """The error as one of this package, which every process can unpickle."""
    return error if isinstance(error, SpecActorError) else SpecActorError(f"{type(error).__name__}: {error}")


def _same(message: Any) -> Any:
    return message


def connect_engine(run: str | None, address: str) -> RemoteEngine:
    """See `Engine.connect`."""
    from specactor_ray.cluster.connection import join_run

    connection, _, engine = join_run(run, address, ENGINE)
    return RemoteEngine(Calls(), engine, connection.close)
