"""The engine over real Ray actors: threads, event loops and another process, all with the tokens of a plain stream."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import ray

from specactor_ray import Engine, Rollout, SamplingParams
from specactor_ray.cluster.backend import start_here
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ActorLostError, InputError
from specactor_ray.models.loading import load_model
from specactor_ray.rollout.door import ALL, DRIVER, EngineActor, RemoteEngine
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from tests.plain_decoding import cut_at_stops
from tests.tiny import tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
COUNT = 6
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    settings = {
        "mode": "coupled",
        "target": {"model": str(tiny_target()), "replicas": 2, "max_batch": 4, "kv_cache_gb": 0.05},
        "drafters": [{"method": "suffix"}],
        "cluster": {"pin_cores": False},
    }
    with Rollout(from_mapping(settings)) as rollout:
        yield rollout
    ray.shutdown()


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
    engine, prompts = rollout.engine, tiny_prompts(COUNT)
    differing: list[str] = []

    async def gather(name: str) -> None:
        outputs = await asyncio.gather(*(engine.generate(prompts[n], own(n), session=name) for n in range(COUNT)))
        differing.extend(f"{name} {n}" for n in range(COUNT) if not same(outputs[n], truth[n]))
        streamed = [token.token_id async for token in engine.stream(prompts[0], own(0))]
        if tuple(streamed) != truth[0].token_ids:
            differing.append(f"{name} streamed")

    def blocked(number: int) -> None:
        handle = engine.submit(prompts[number % COUNT], own(number % COUNT))
        tokens = tuple(token.token_id for token in handle.tokens())
        if not same(handle.result(120.0), truth[number % COUNT]) or tokens != truth[number % COUNT].token_ids:
            differing.append(f"thread {number}")

    loops = [threading.Thread(target=lambda name=name: asyncio.run(gather(name))) for name in ("a", "b")]
    for loop in loops:
        loop.start()
    first, second = (rollout.stream(prompts, SAMPLING, n=1) for _ in range(2))
    next(first)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(blocked, range(16)))
    done = sorted(second, key=lambda one: one.prompt_index)
    assert all(same(one, expected) for one, expected in zip(done, truth, strict=True))
    with pytest.raises(InputError, match="while a stream is open"):
        rollout.reset_metrics()
    first.close()
    for loop in loops:
        loop.join(120.0)
    assert not differing
    rollout.reset_metrics()


def test_an_aborted_output_goes_on_as_a_prefix_and_as_a_prompt(rollout: Rollout, truth: list[Trajectory]) -> None:
    engine, prompt, sampling = rollout.engine, tiny_prompts(1)[0], replace(SAMPLING, max_tokens=200, ignore_eos=True)
    whole = engine.submit(prompt, sampling).result(120.0)
    handle = engine.submit(prompt, sampling)
    for number, _token in enumerate(handle.tokens()):
        if number == 20:
            break
    part = handle.abort()
    at = len(part.token_ids)
    assert 20 < at <= 200 and part.token_ids == whole.token_ids[:at]
    rest = engine.submit(prompt, sampling, prefix=part.token_ids)
    resent = replace(sampling, max_tokens=max(1, 200 - at), first_position=at)
    sent = engine.submit([*part.prompt_token_ids, *part.token_ids], resent).result(120.0)
    assert rest.result(120.0).token_ids == whole.token_ids[at:]
    assert at == 200 or sent.token_ids == whole.token_ids[at:]
    assert engine.submit(prompt, sampling, prefix=whole.token_ids).result(120.0).token_ids == ()
    rollout.sleep()  # refused while a verifier has requests
    assert engine.submit(prompt, sampling).result(120.0).token_ids == whole.token_ids  # wakes them


def test_requests_go_on_behind_new_weights(rollout: Rollout) -> None:
    engine, prompts, sampling = rollout.engine, tiny_prompts(8), replace(SAMPLING, max_tokens=200, ignore_eos=True)
    whole = [handle.result(120.0) for handle in [engine.submit(prompt, sampling) for prompt in prompts]]
    handles = [engine.submit(prompt, sampling) for prompt in prompts]
    next(handles[0].tokens())
    same_weights = load_model(str(tiny_target())).named_parameters()
    version = rollout.update_weights(same_weights, "keep")
    outputs = [handle.result(120.0) for handle in handles]
    assert [one.token_ids for one in outputs] == [one.token_ids for one in whole]
    assert all(one.weight_version == version or not one.versions for one in outputs)
    assert engine.submit(prompts[0], sampling).result(120.0).weight_version == version


def test_stop_texts_and_probable_tokens_are_those_of_plain_decoding(rollout: Rollout, truth: list[Trajectory]) -> None:
    texts = [whole.text for whole in truth]
    stops = (texts[0][9:12], texts[1][5:6], "not there")
    sampling = replace(SAMPLING, stop=stops, logprobs=3)
    expected = [cut_at_stops(tiny_target(), whole.token_ids, stops) for whole in truth]
    assert all(len(tokens) < len(whole.token_ids) for (tokens, _), whole in zip(expected[:2], truth[:2], strict=True))
    streamed = rollout.generate(tiny_prompts(COUNT), sampling, n=1)
    for output, wanted, whole in zip(streamed, expected, truth, strict=True):
        assert (output.token_ids, output.text) == wanted
        assert (output.stop_reason in stops) == (output.text != whole.text)
        assert output.top_logprobs is not None and len(output.top_logprobs) == len(output.token_ids)
        for token, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
            assert len(top) == 3 and dict(top).get(token, logprob) == logprob <= top[0][1]
    prompt, at = tiny_prompts(1)[0], max(1, len(expected[0][0]) - 2)
    rest = rollout.engine.submit(prompt, replace(sampling, seed=own(0).seed), prefix=expected[0][0][:at]).result(60.0)
    assert rest.token_ids == expected[0][0][at:]
    with Engine.connect(rollout.listen()) as remote:
        handles = remote.submit_samples(prompt, 2, sampling)
        tokens = list(handles[0].tokens())
        outputs = [handle.result(60.0) for handle in handles]
    assert [token.top for token in tokens] == list(outputs[0].top_logprobs or ())
    for output, whole in zip(outputs, rollout.generate([prompt], sampling, n=2), strict=True):
        assert same(output, whole) and output.sample_index == whole.sample_index


def test_another_process_of_the_cluster_generates(rollout: Rollout, truth: list[Trajectory]) -> None:
    @ray.remote(num_cpus=0)
    def elsewhere(run: str, prompts: list[Any], sampling: list[SamplingParams]) -> list[Any]:
        with Engine.connect(run) as engine:
            handles = [engine.submit(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
            streamed = [token.token_id for token in handles[0].tokens()]

            async def one() -> Trajectory:
                return await engine.generate(prompts[1], sampling[1], session="s")

            long = engine.submit(prompts[0], replace(sampling[0], max_tokens=400, ignore_eos=True), request_id="long")
            cut = engine.abort("long")
            try:
                engine.submit([]).result(60.0)
                refused = ""
            except InputError as error:
                refused = str(error)
            outputs = [handle.result(60.0) for handle in handles]
            return [outputs, streamed, asyncio.run(one()), cut, long.done(), refused]

    assert rollout.listen() == rollout.listen() == rollout.run_name
    arguments = tiny_prompts(COUNT), [own(n) for n in range(COUNT)]
    outputs, streamed, again, cut, done, refused = ray.get(elsewhere.remote(rollout.run_name, *arguments), timeout=120)
    assert all(same(output, expected) for output, expected in zip(outputs, truth, strict=True))
    assert tuple(streamed) == truth[0].token_ids and same(again, truth[1])
    assert cut.finish_reason == ("abort" if len(cut.token_ids) < 400 else "length")
    assert done and refused == "the prompt has no tokens"


def test_the_requests_of_a_process_that_dies_are_dropped(rollout: Rollout) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def sender(actor: Any) -> None:
        RemoteEngine(Calls(), actor).submit([1])
        ray.get(actor.read.remote(DRIVER, 0, 60.0))  # the request is there
        os._exit(1)

    actor = start_here(rollout.run_name, "door", EngineActor)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(sender.remote(actor), timeout=120.0)
    commands: list[Any] = []
    while len(commands) < 2:
        commands = ray.get(actor.read.remote(DRIVER, 0, 60.0), timeout=120.0)[1]
    assert [(one.what, one.number) for one in commands] == [("submit", 0), ("drop", ALL)]
    engine = RemoteEngine(Calls(), actor)
    ray.kill(actor)
    for _ in range(2):  # one request before the loss is known, one after it
        with pytest.raises(ActorLostError):
            engine.submit([1]).result(120.0)


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
