"""The actor between a run and other processes: messages stay until confirmed; senders that leave are forgotten."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, cast

import pytest

from specactor_ray.cluster.calls import Calls
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.door import ALL, DRIVER, Doorman, EngineActor, Message, RemoteEngine
from specactor_ray.rollout.handle import Generates, Handle
from specactor_ray.rollout.trajectory import Trajectory

PATIENCE_S = 120.0


def test_messages_are_queued_once_and_read_again_until_they_are_confirmed() -> None:
    async def body() -> None:
        actor = EngineActor()
        for reader in (DRIVER, "s"):
            await actor.greet(reader)
        waiting = asyncio.create_task(actor.read(DRIVER, 0, 60.0))
        await asyncio.sleep(0)
        first, second = (Message("s", number, "submit") for number in range(2))
        await actor.send("s", 0, [first])
        assert await waiting == [first]
        for _ in range(2):
            await actor.send("s", 0, [first, second])
        assert await actor.read(DRIVER, 0, 0.0) == [first, second]
        assert await actor.read(DRIVER, 1, 0.0) == [second]
        assert await actor.read(DRIVER, 2, 0.0) == []

    asyncio.run(body())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_sender_that_leaves_or_reads_no_more_is_forgotten(leaves: bool) -> None:
    async def body() -> None:
        actor = EngineActor(silent_s=float("inf") if leaves else -1.0)
        for reader in (DRIVER, "s"):
            await actor.greet(reader)
        waiting = asyncio.create_task(actor.read("s", 0, 60.0))
        await asyncio.sleep(0)
        for _ in range(2 * leaves):
            await actor.leave("s")
        assert await actor.read(DRIVER, 0, 60.0) == [Message("s", ALL, "drop")]
        assert await waiting == []
        await actor.send(DRIVER, 0, [Message("s", 0, "end")])
        await actor.send("s", 0, [Message("s", 1, "submit")])
        assert await actor.read(DRIVER, 1, 0.0) == []
        with pytest.raises(SpecActorError, match="its requests were aborted"):
            await actor.read("s", 0, 0.0)

    asyncio.run(body())


class Loop:
    """Calls that an event loop in a thread carries out; the engine of the test, too, is one of its objects."""

    clock = SYSTEM

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        SYSTEM.spawn(self._loop.run_forever, "loop")

    def ask(self, actor: Any, method: str, *arguments: Any, deadline_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(actor, method)(*arguments), self._loop).result()


class Echo(Generates):
    """Commits the tokens of the prompt and ends when it is told to."""

    def __init__(self) -> None:
        self.clock = SYSTEM
        self.running: SimpleQueue[Handle] = SimpleQueue()
        self.watched, self.dropped = threading.Event(), threading.Event()

    def submit(self, prompt: Any, sampling: Any = None, **options: Any) -> Handle:
        if not prompt:
            raise InputError("the prompt has no tokens")
        handle = Handle(self, options["request_id"])
        self.running.put(handle)
        return handle

    def handle(self, request_id: str) -> Handle:
        raise NotImplementedError

    def watch(self, handle: Handle) -> None:
        self.watched.set()

    def drop(self, handle: Handle) -> None:
        self.dropped.set()


def test_a_remote_engine_forwards_requests_tokens_ends_and_errors() -> None:
    calls, actor, engine = cast(Calls, Loop()), EngineActor(), Echo()
    doorman = Doorman(engine, calls, actor)
    with RemoteEngine(calls, actor) as remote:
        with pytest.raises(InputError, match="the prompt has no tokens"):
            remote.submit([]).result(PATIENCE_S)
        handle, left = remote.submit([1, 2], request_id="a"), remote.submit([3])
        assert remote.handle("a") is handle
        tokens = handle.tokens()
        reader = ThreadPoolExecutor(1).submit(lambda: [next(tokens), next(tokens)])
        running = engine.running.get(timeout=PATIENCE_S)
        assert running.request_id == "a" and engine.watched.wait(PATIENCE_S)
        for token in (1, 2):
            running.push([(token, -1.0)])
        assert [token.token_id for token in reader.result(PATIENCE_S)] == [1, 2]
        output = Trajectory("a", 0, 0, (1, 2), (1, 2), (-1.0, -1.0), "", "length", SamplingParams())
        running.end(output)
        assert handle.result(PATIENCE_S) == output and list(tokens) == []
    assert engine.dropped.wait(PATIENCE_S), "what ran when it left is aborted"
    for refused in (lambda: left.result(0.0), lambda: remote.submit([1])):
        with pytest.raises(InputError, match="the connection to the engine is closed"):
            refused()
    doorman.close()
