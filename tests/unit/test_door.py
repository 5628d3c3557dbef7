"""The actor between a run and other processes: messages stay until they are confirmed; one that leaves is told."""

from __future__ import annotations

import asyncio

from specactor_ray.errors import SpecActorError
from specactor_ray.rollout import door
from specactor_ray.rollout.door import ALL, Asked, EngineActor, Told


def test_messages_are_read_again_until_they_are_confirmed() -> None:
    async def body() -> None:
        actor = EngineActor()
        waiting = asyncio.create_task(actor.read_asked(0, 60.0))
        await asyncio.sleep(0)
        first, second = (Asked("s", number, "submit") for number in range(2))
        await actor.ask([first])
        assert await waiting == (0, [first])
        await actor.ask([second])
        assert await actor.read_asked(0, 0.0) == (0, [first, second])
        assert await actor.read_asked(1, 0.0) == (1, [second])
        assert await actor.read_asked(2, 0.0) == (2, [])

    asyncio.run(body())


def test_a_sender_that_reads_no_more_loses_its_requests_and_is_told_should_it_come_back() -> None:
    async def body() -> None:
        actor = EngineActor()
        await actor.tell([("gone", Told(0, [])), ("here", Told(0, []))])
        assert await actor.read_told("gone", 0, 0.0) == (0, [Told(0, [])])
        actor._told["gone"].read_at -= 2.0 * door._GONE_S
        await actor.tell([("here", Told(1, []))])
        assert await actor.read_asked(0, 0.0) == (0, [Asked("gone", ALL, "drop")])
        first, messages = await actor.read_told("gone", 0, 0.0)
        assert first == 1 and [one.number for one in messages] == [ALL]
        assert isinstance(messages[0].ended, SpecActorError)
        assert len((await actor.read_told("here", 0, 0.0))[1]) == 2

    asyncio.run(body())
