"""The actor between a run and other processes: messages stay until confirmed; a sender that leaves gets an error."""

from __future__ import annotations

import asyncio

from ray.exceptions import OwnerDiedError

from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout import door
from specactor_ray.rollout.door import ALL, Command, EngineActor, OutputPart


def test_messages_are_read_again_until_they_are_confirmed() -> None:
    async def body() -> None:
        actor = EngineActor()
        waiting = asyncio.create_task(actor.read_commands(0, 60.0))
        await asyncio.sleep(0)
        first, second = (Command("s", number, "submit") for number in range(2))
        await actor.send_commands([first])
        assert await waiting == (0, [first])
        await actor.send_commands([second])
        assert await actor.read_commands(0, 0.0) == (0, [first, second])
        assert await actor.read_commands(1, 0.0) == (1, [second])
        assert await actor.read_commands(2, 0.0) == (2, [])

    asyncio.run(body())


def test_a_sender_whose_process_ends_or_that_leaves_is_forgotten() -> None:
    async def body() -> None:
        actor, loop = EngineActor(), asyncio.get_running_loop()
        alive, dead, strange = (loop.create_future() for _ in range(3))
        for sender, staying in (("alive", alive), ("dead", dead), ("strange", strange)):
            await actor.greet(sender, [staying])
            await actor.send_outputs([(sender, OutputPart(0, []))])
        dead.set_exception(OwnerDiedError("00", "", ""))
        strange.set_exception(OSError("something else"))
        assert await actor.read_commands(0, 5.0) == (0, [Command("dead", ALL, "drop")])
        await actor.send_outputs([("dead", OutputPart(1, []))])
        assert set(actor._outputs) == {"alive", "strange"}
        staying = asyncio.create_task(actor.stay("alive"))
        await asyncio.sleep(0)
        assert not staying.done()
        for _ in range(2):
            await actor.leave("alive")
        await staying
        assert await actor.read_commands(1, 0.0) == (1, [Command("alive", ALL, "drop")])
        assert not actor._staying and set(actor._outputs) == {"strange"}
        alive.set_result(None)

    asyncio.run(body())


def test_a_sender_that_reads_no_more_loses_its_requests_and_is_told_should_it_come_back() -> None:
    async def body() -> None:
        actor = EngineActor()
        await actor.send_outputs([("gone", OutputPart(0, [])), ("here", OutputPart(0, []))])
        assert await actor.read_outputs("gone", 0, 0.0) == (0, [OutputPart(0, [])])
        actor._outputs["gone"].read_at -= 2.0 * door._GONE_S
        await actor.send_outputs([("here", OutputPart(1, []))])
        assert await actor.read_commands(0, 0.0) == (0, [Command("gone", ALL, "drop")])
        first, messages = await actor.read_outputs("gone", 0, 0.0)
        assert first == 1 and [one.number for one in messages] == [ALL]
        assert isinstance(messages[0].ended, SpecActorError)
        assert len((await actor.read_outputs("here", 0, 0.0))[1]) == 2

    asyncio.run(body())
