"""The actor between a run and other processes: messages stay until confirmed; senders that leave are forgotten."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import OwnerDiedError

from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.door import ALL, DRIVER, Command, EngineActor, OutputPart


def test_messages_are_read_again_until_they_are_confirmed() -> None:
    async def body() -> None:
        actor = EngineActor()
        waiting = asyncio.create_task(actor.read(DRIVER, 0, 60.0))
        await asyncio.sleep(0)
        first, second = (Command("s", number, "submit", {}) for number in range(2))
        await actor.send([(DRIVER, first)])
        assert await waiting == (0, [first])
        await actor.send([(DRIVER, second)])
        assert await actor.read(DRIVER, 0, 0.0) == (0, [first, second])
        assert await actor.read(DRIVER, 1, 0.0) == (1, [second])
        assert await actor.read(DRIVER, 2, 0.0) == (2, [])

    asyncio.run(body())


def test_a_sender_whose_process_ends_or_that_leaves_is_forgotten() -> None:
    async def body() -> None:
        actor, loop = EngineActor(), asyncio.get_running_loop()
        calls = {sender: loop.create_future() for sender in ("alive", "dead", "strange")}
        for sender, staying in calls.items():
            await actor.greet(sender, [staying])
            await actor.send([(sender, OutputPart(0, []))])
        calls["dead"].set_exception(OwnerDiedError("00", "", ""))
        calls["strange"].set_exception(OSError("something else"))
        assert await actor.read(DRIVER, 0, 5.0) == (0, [Command("dead", ALL, "drop", {})])
        await actor.send([("dead", OutputPart(1, []))])
        with pytest.raises(SpecActorError, match="its requests were aborted"):
            await actor.read("dead", 0, 0.0)
        staying = asyncio.create_task(actor.stay("alive"))
        await asyncio.sleep(0)
        assert not staying.done()
        for _ in range(2):
            await actor.leave("alive")
        await staying
        assert await actor.read(DRIVER, 1, 0.0) == (1, [Command("alive", ALL, "drop", {})])
        assert await actor.read("strange", 0, 0.0) == (0, [OutputPart(0, [])])
        calls["alive"].set_result(None)

    asyncio.run(body())
