"""Pauses, aborts, weights and sleep of a rollout, on a scripted queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.control import Control
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.transport.messages import WeightSet
from tests.fakes.scripted_queue import ScriptedQueue

SAMPLING = SamplingParams(max_tokens=12, seed=1)


class FakeRollout(ScriptedQueue):
    """A rollout that is its own request queue; a pause stops all requests.

    Attributes:
        calls: What was called on the rollout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.weight_version, self.holds = self, 0, 0
        self.calls: list[Any] = []

    def pause(self, policy: WeightPolicy) -> Future[None]:
        self.holds, self.held = self.holds + 1, True
        drained: Future[None] = Future()
        drained.set_result(None)
        return drained

    def resume(self) -> None:
        self.holds -= 1
        self.held = self.holds > 0

    def update_weights(self, weights: Any, policy: WeightPolicy) -> int:
        if weights == "missing":
            raise FileNotFoundError(2, "No such file or directory")
        self.calls.append((weights, policy))
        self.weight_version += 1
        return self.weight_version

    def sleep(self) -> None:
        if self.open:
            raise InputError("sleep while requests run")
        self.calls.append("sleep")

    def wake_verifiers(self) -> None:
        self.calls.append("wake")


def controlled(test: Callable[[FakeRollout, Control], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine; it gets a rollout and its control."""

    def run() -> None:
        rollout: Any = FakeRollout()
        asyncio.run(test(rollout, Control(rollout)))

    return run


async def begun(task: asyncio.Task[None]) -> bool:
    """Whether a task that can begin has begun."""
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done()


@controlled
async def test_one_resume_ends_all_pauses(rollout: FakeRollout, control: Control) -> None:
    handles = [rollout.submit([1], SAMPLING, request_id=name) for name in "aab"]
    for _ in range(2):
        await control.pause(WeightPolicy.KEEP)
    waiting = asyncio.create_task(control.ready())
    assert rollout.holds == 1 and control.is_paused and not await begun(waiting)
    assert await control.end("a") == handles[:2]
    assert [(await handle).finish_reason for handle in handles[:2]] == ["abort", "abort"] and not handles[2].done()
    await control.pause(WeightPolicy.ABORT)
    assert (await handles[2]).finish_reason == "abort" and not await begun(waiting)
    for _ in range(2):
        control.resume()
    assert rollout.holds == 0 and await begun(waiting)


@controlled
async def test_weights_have_versions_and_labels(rollout: FakeRollout, control: Control) -> None:
    packed = WeightSet(7, ("bucket",))
    assert await control.update(packed, WeightPolicy.KEEP, "step 3") == 1
    assert rollout.calls == [(WeightSet(1, ("bucket",)), WeightPolicy.KEEP)]
    with pytest.raises(InputError, match="weights"):
        await control.update("missing", WeightPolicy.WAIT, "step 4")
    assert (control.label, control.label_of(0), control.labels) == ("step 3", "0", {1: "step 3"})


@controlled
async def test_a_sleep_begins_behind_all_requests_and_the_next_one_ends_it(
    rollout: FakeRollout, control: Control
) -> None:
    running = rollout.submit([1], SAMPLING)
    await control.sleep(WeightPolicy.WAIT)
    assert len((await running).token_ids) == 12 and control.is_asleep and rollout.calls == ["sleep"]
    await control.ready()
    assert not control.is_asleep and rollout.calls == ["sleep", "wake"] and rollout.holds == 0
    await control.pause(WeightPolicy.KEEP)
    rollout.submit([1], SAMPLING)
    with pytest.raises(InputError):
        await control.sleep(WeightPolicy.WAIT)
    assert control.is_paused and not control.is_asleep


@controlled
async def test_a_sleep_begins_behind_requests_that_are_still_encoded(rollout: FakeRollout, control: Control) -> None:
    rollout.beginning.add("a text")  # it has passed `ready`
    sleep = asyncio.create_task(control.sleep(WeightPolicy.WAIT))
    assert not await begun(sleep) and rollout.calls == []
    later = rollout.submit([1], SAMPLING)
    rollout.beginning.clear()
    await sleep
    assert len((await later).token_ids) == 12 and rollout.calls == ["sleep"]


@controlled
async def test_a_pause_in_front_of_a_sleep_ends_the_attempt(rollout: FakeRollout, control: Control) -> None:
    rollout.submit([1], SAMPLING)
    rollout.held = True
    sleep = asyncio.create_task(control.sleep(WeightPolicy.WAIT))
    await begun(sleep)
    await control.pause(WeightPolicy.KEEP)
    with pytest.raises(InputError):
        await sleep
    assert await control.update("weights", WeightPolicy.KEEP) == 1 and not control.is_asleep


@controlled
async def test_a_pause_during_the_begin_of_a_sleep_stays(rollout: FakeRollout, control: Control) -> None:
    may_sleep = threading.Event()
    rollout.sleep = may_sleep.wait  # type: ignore[method-assign]
    sleep = asyncio.create_task(control.sleep(WeightPolicy.ABORT))
    await begun(sleep)
    await control.pause(WeightPolicy.KEEP)
    may_sleep.set()
    await sleep
    assert control.is_paused and rollout.holds == 1
