"""The queue over real Ray actors: threads, event loops and other processes, all with the tokens of a plain stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import ray

from specactor_ray import Rollout, RolloutActor, SamplingParams
from specactor_ray.actors.process import put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.models.loading import load_model
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from tests.served import SETTINGS
from tests.tiny import tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
COUNT = 6
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


@pytest.fixture(scope="module")
def actor(rollout: Rollout) -> Iterator[Any]:
    """Another rollout on the same cluster."""
    actor = ray.remote(RolloutActor).options(num_cpus=0).remote(from_mapping(SETTINGS))
    ray.get(actor.start.remote(), timeout=120)
    yield actor
    ray.get(actor.close.remote(), timeout=120)


@pytest.fixture(scope="module")
def truth(rollout: Rollout) -> list[Trajectory]:
    """What a stream gives, one sample of each prompt."""
    return rollout.generate(tiny_prompts(COUNT), SAMPLING, n=1)


def own(number: int) -> SamplingParams:
    """The sampling of the stream's sample of this prompt."""
    return replace(SAMPLING, seed=derive_seed(SAMPLING.seed, number, 0))


def same(output: Trajectory, expected: Trajectory) -> bool:
    return (output.token_ids, output.text, output.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    )


def test_threads_two_event_loops_and_two_streams_side_by_side(rollout: Rollout, truth: list[Trajectory]) -> None:
    queue, prompts = rollout.queue, tiny_prompts(COUNT)
    differing: list[str] = []

    async def gather(name: str) -> None:
        outputs = await asyncio.gather(*(queue.generate(prompts[n], own(n), session=name) for n in range(COUNT)))
        differing.extend(f"{name} {n}" for n in range(COUNT) if not same(outputs[n], truth[n]))
        batches = queue.submit(prompts[0], own(0)).batches()
        streamed = [token.token_id async for tokens in batches for token in tokens]
        if tuple(streamed) != truth[0].token_ids:
            differing.append(f"{name} streamed")

    def blocked(number: int) -> None:
        handle = queue.submit(prompts[number % COUNT], own(number % COUNT))
        tokens = tuple(token.token_id for token in handle.tokens())
        if not same(handle.result(120.0), truth[number % COUNT]) or tokens != truth[number % COUNT].token_ids:
            differing.append(f"thread {number}")

    loops = [threading.Thread(target=lambda name=name: asyncio.run(gather(name))) for name in ("a", "b")]
    for loop in loops:
        loop.start()
    first, second = (rollout.stream(prompts, SAMPLING, n=1) for _ in range(2))
    next(first)
    assert rollout.queue.open_streams == 1
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(blocked, range(16)))
    done = sorted(second, key=lambda one: one.prompt_index)
    assert all(same(one, expected) for one, expected in zip(done, truth, strict=True))
    with pytest.raises(InputError, match="stream"):
        rollout.reset_metrics()
    first.close()
    for loop in loops:
        loop.join(120.0)
    assert not differing
    rollout.reset_metrics()


def test_processes_of_the_cluster_call_a_rollout(actor: Any, truth: list[Trajectory]) -> None:
    @ray.remote(num_cpus=0)
    def caller(actor: Any, prompts: list[Any], sampling: list[SamplingParams]) -> list[Any]:
        outputs = ray.get([actor.generate.remote(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)])
        streamed = [token for batch in actor.stream.remote(prompts[0], sampling[0]) for token in ray.get(batch)]
        with pytest.raises(InputError, match="prompt"):
            ray.get(actor.generate.remote([]))
        with pytest.raises(SpecActorError, match="512"):
            ray.get(next(actor.stream.remote([1] * 100_000)))
        return [outputs, [token.token_id for token in streamed]]

    arguments = actor, tiny_prompts(COUNT), [own(n) for n in range(COUNT)]
    for outputs, streamed in ray.get([caller.remote(*arguments) for _ in range(2)], timeout=120):
        assert all(same(output, expected) for output, expected in zip(outputs, truth, strict=True))
        assert tuple(streamed) == truth[0].token_ids
    assert ray.get(actor.metrics.remote()).committed_tokens > 0


def test_requests_of_an_actor_are_cancelled_and_aborted(actor: Any) -> None:
    def of_queue(call: Callable[[Any], Any]) -> Any:
        return ray.get(actor.__ray_call__.remote(lambda self: call(self._rollout.queue)), timeout=60.0)

    def are_open(names: list[str]) -> bool:
        return of_queue(lambda queue: sorted(one.request_id for one in queue.running())) == names

    of_queue(lambda queue: queue.pause(WeightPolicy.WAIT) and None)  # none of them ends by itself
    outputs = [actor.generate.remote([1], own(0), request_id=name) for name in ("a", "b", "b")]
    stream = actor.stream.remote([1], own(0), request_id="c")
    wait_until(lambda: are_open(["a", "b", "b", "c"]), "the requests")
    ray.cancel(outputs[0])
    ray.cancel(stream)
    wait_until(lambda: are_open(["b", "b"]), "the ends of the cancelled ones")
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(outputs[0], timeout=60.0)
    assert ray.get(actor.abort.remote("b"), timeout=60.0) == 2
    assert [one.finish_reason for one in ray.get(outputs[1:], timeout=60.0)] == ["abort", "abort"]
    of_queue(lambda queue: queue.resume())


def test_an_actor_pauses_and_sleeps(actor: Any, truth: list[Trajectory]) -> None:
    prompt = tiny_prompts(1)[0]
    ray.get(actor.pause.remote("wait"), timeout=60.0)
    waiting = actor.generate.remote(prompt, own(0))
    assert not ray.wait([waiting], timeout=0.2)[0]
    ray.get(actor.resume.remote(), timeout=60.0)
    assert same(ray.get(waiting, timeout=60.0), truth[0])
    outputs = [actor.generate.remote(prompt, own(0)) for _ in range(12)]  # more than a verifier takes
    ray.get(actor.sleep.remote(), timeout=60.0)
    assert all(same(output, truth[0]) for output in ray.get(outputs, timeout=60.0))
    assert same(ray.get(actor.generate.remote(prompt, own(0)), timeout=60.0), truth[0])  # wakes
    with pytest.raises(InputError, match=r"policy .*wait, keep, abort"):
        ray.get(actor.pause.remote("soon"))


def test_an_actor_takes_weights_that_another_process_packs(actor: Any, truth: list[Trajectory]) -> None:
    layout = ray.get(actor.weight_layout.remote(), timeout=60.0)
    whole = load_model(str(tiny_target())).state_dict()
    packed = put_weights(0, layout.buckets(whole), Calls(), layout=layout)
    assert [ray.get(actor.update_weights.remote(packed), timeout=60.0) for _ in range(2)] == [1, 2]
    output = ray.get(actor.generate.remote(tiny_prompts(1)[0], own(0)), timeout=60.0)
    assert same(output, truth[0]) and output.weight_version == 2


made: list[int] = []


def make() -> str:
    made.append(1)
    return "made"


class Counted:
    """Counts in this process how often it is deserialized."""

    def __reduce__(self) -> Any:
        return make, ()


def test_an_answer_is_deserialized_once(rollout: Rollout) -> None:
    @ray.remote(num_cpus=0)
    class Answers:
        def answer(self) -> Any:
            return Counted()

    actor, ready = Answers.remote(), threading.Event()
    call = Calls().start(actor, "answer", deadline_s=60.0, wake=ready.set)
    assert ready.wait(60.0) and call.poll() and call.result() == "made"
    assert len(made) == 1
