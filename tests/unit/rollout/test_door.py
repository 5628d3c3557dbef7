"""The actor between a run and other processes: messages stay until confirmed; senders that leave are forgotten."""

from __future__ import annotations

import asyncio

import pytest

from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.door import ALL, DRIVER, EngineActor, Message


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
