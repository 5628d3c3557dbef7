"""Requests at any time, on virtual time: single ones beside streams, aborted and continued, refused and in turns."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from specactor_ray.actors.specs import Departure
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ActorLostError, InputError, OverloadedError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.queue import RequestQueue
from specactor_ray.rollout.trajectory import trajectory_of
from specactor_ray.transport.messages import WeightSet
from tests.fakes.cluster import FakeCluster, driven, entries, stats_of
from tests.number_text import NumberText, stopped_output, true_output, true_token

IDLE: Any = Config(), None, Calls()
"""Arguments of a queue that runs nothing."""
PROMPT = [1, 2, 3]


def sampling(seed: int = 0, tokens: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed)


def begun(cluster: FakeCluster, name: str) -> list[str]:
    """The keys of the requests that a verifier has begun."""
    return [key for key, _ in cluster.verifier(name).begun]


class TestOutputs:
    @driven()
    def test_tokens_come_once_as_they_are_committed_with_the_most_probable_ones(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        queue.tokenizer = NumberText()
        one = replace(sampling(3, 60), logprobs=3)
        truth = true_output(one, 0)
        tops = tuple(tuple((token + at, -1.0 - at) for at in range(3)) for token in truth)
        handle, other = queue.submit(PROMPT, one), queue.submit(PROMPT, sampling(4))
        streamed, times = [], set()
        for token in handle.tokens():
            streamed.append(token)
            times.add(cluster.bench.kernel.now)
        assert len(times) > 5, "not all at the end"
        assert tuple(token.token_id for token in streamed) == truth
        assert tuple(token.top for token in streamed) == handle.result().top_logprobs == tops
        assert list(handle.tokens()) == streamed and other.result().top_logprobs is None
        assert {token.top for token in other.tokens()} == {()}
        assert handle.result().to_json()["top_logprobs"][0] == [list(pair) for pair in tops[0]]
        cut = queue.submit(PROMPT, replace(one, stop=(f"{truth[30]},{truth[31]},",))).result()
        assert cut.token_ids == truth[:32] and cut.top_logprobs == tops[:32]
        moved = queue.submit(PROMPT, one)
        cluster.bench.clock.sleep(0.6)
        cluster.lose(next(name for name in cluster.handles if cluster.verifier(name).running), Departure.NODE_LOST)
        assert moved.result().top_logprobs == tops


class TestArrivals:
    @pytest.mark.parametrize("late", [False, True])
    @driven(verifiers=1)
    def test_each_token_is_read_before_the_next_is_made(
        self, cluster: FakeCluster, queue: RequestQueue, late: bool
    ) -> None:
        """Also beside requests that nothing reads, with a poll for them in flight."""
        if late:
            others = [queue.submit(PROMPT, sampling(seed, 40)) for seed in range(3)]
            cluster.bench.clock.sleep(0.4)
        handle, read, (verifier,) = queue.submit(PROMPT, sampling(9)), 0, map(cluster.verifier, cluster.handles)
        for read, _token in enumerate(handle.tokens(), start=1):
            made = verifier.running[handle.key][1] if handle.key in verifier.running else 20
            assert made == read
        assert read == 20 and (not late or [other.result().finish_reason for other in others] == ["length"] * 3)

    @pytest.mark.parametrize("is_read", [False, True])
    @driven(verifiers=1)
    def test_outputs_that_nothing_reads_as_they_come_take_fewer_polls(
        self, cluster: FakeCluster, queue: RequestQueue, is_read: bool
    ) -> None:
        verifier = next(map(cluster.verifier, cluster.handles))
        handles = [queue.submit(PROMPT, sampling(seed, 60)) for seed in range(4)]
        if is_read:
            assert len(list(handles[0].tokens())) == 60
        assert {len(handle.result().token_ids) for handle in handles} == {60}
        assert verifier.polls == (60 if is_read else 22), "one for each step, or for two to three"


@pytest.mark.parametrize("fault", ["", "lost_before", "lost_after"])
@driven()
def test_counters_are_final_when_no_request_runs(cluster: FakeCluster, queue: RequestQueue, fault: str) -> None:
    """Also behind aborts, which no event answers, and if calls are lost."""
    handles = [queue.submit(PROMPT, sampling(seed, 2000)) for seed in range(6)]
    counters = cluster.queue.dispatcher.verifiers.counters
    cluster.bench.clock.sleep(2.0)
    queue.metrics()
    assert [one["running"] for one in counters.values()] == [3, 3]
    if fault:
        cluster.network.lose("cancel", times=2, fault=fault)
        cluster.network.lose("poll", times=2, fault=fault)
    for handle in handles:
        handle.abort()
    queue.settle()
    queue.metrics()
    assert [one["running"] for one in counters.values()] == [0, 0]


class TestAbort:
    @pytest.mark.parametrize("after_s", [0.0, 0.3, 1.7])
    @driven()
    def test_what_is_aborted_and_continued_is_the_undisturbed_output(
        self, cluster: FakeCluster, queue: RequestQueue, after_s: float
    ) -> None:
        whole = replace(sampling(3, 60), prompt_logprobs=True)
        truth = true_output(whole, 0)
        handle = queue.submit(PROMPT, whole)
        cluster.bench.clock.sleep(after_s)
        part = handle.abort()
        assert part.finish_reason == "abort" and handle.result() == part
        assert part.token_ids == truth[: len(part.token_ids)] and len(part.token_ids) < 60
        assert part.stats == stats_of(len(part.token_ids))
        assert part.prompt_logprobs == ((-1.0, -2.0) if part.token_ids else None)
        resent = replace(whole, max_tokens=60 - len(part.token_ids), first_position=len(part.token_ids))
        rest = queue.submit([*PROMPT, *part.token_ids], resent)
        streamed = tuple(token.token_id for token in rest.tokens())
        assert part.token_ids + streamed == truth
        assert rest.result().token_ids == streamed and len(rest.result().logprobs) == len(streamed)
        assert not any(cluster.verifier(name).running for name in cluster.handles)

    @driven(verifiers=1, max_batch=1)
    def test_what_waits_is_aborted_without_a_verifier_and_what_has_ended_stays_as_it_is(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        running = [queue.submit(PROMPT, sampling(seed, 100), request_id="runs") for seed in range(2)]
        waiting = queue.submit(PROMPT, sampling(9), request_id="waits")
        cluster.bench.clock.sleep(0.5)
        assert queue.running("runs") == running and queue.running() == [*running, waiting]
        assert waiting.abort().token_ids == () and waiting.result().finish_reason == "abort"
        assert [handle.result().finish_reason for handle in running] == ["length", "length"]
        assert running[0].abort().finish_reason == "length"
        assert not queue.running()
        queue.settle()
        assert waiting.key not in begun(cluster, "v0")


class TestStopTexts:
    @pytest.mark.parametrize("one_dies", [False, True])
    @driven()
    def test_outputs_end_with_the_token_that_completes_one(
        self, cluster: FakeCluster, queue: RequestQueue, one_dies: bool
    ) -> None:
        queue.tokenizer = NumberText()
        stops = [("77,", f"{seed},1") for seed in range(40)]
        wanted = [replace(sampling(seed, 60), stop=stop, prompt_logprobs=True) for seed, stop in enumerate(stops)]
        handles = [queue.submit(PROMPT, one) for one in wanted]
        if one_dies:
            cluster.bench.clock.sleep(0.6)
            cluster.network.kill(cluster.handles["v0"])
        tokens = [tuple(token.token_id for token in handle.tokens()) for handle in handles]
        entered = entries(40, tokens=60)
        for entry, one in zip(entered, wanted, strict=True):
            entry.sampling = one
        ended = {entry.request_id: trajectory_of(entry, queue.tokenizer) for entry in cluster.stream(entered)}
        reasons = set()
        for seed, (one, handle) in enumerate(zip(wanted, handles, strict=True)):
            output, expected = handle.result(), stopped_output(one)
            assert (output.token_ids, output.text) == expected and tokens[seed] == output.token_ids
            assert len(output.logprobs) == len(output.token_ids)
            other = ended[f"r{seed}"]
            assert (other.token_ids, other.text, other.stop_reason) == (*expected, output.stop_reason)
            assert output.stats == stats_of(len(output.token_ids), output.stats.discarded)
            assert output.prompt_logprobs == (-1.0, -2.0) or not output.token_ids
            assert output.stop_reason in ((None,) if output.finish_reason == "length" else one.stop)
            reasons.add(output.finish_reason)
        assert reasons == {"stop", "length"}
        queue.settle()
        assert not any(cluster.verifier(name).running for name in cluster.handles)
        learned = [output for name in cluster.handles for output in cluster.verifier(name).learned]
        assert any(len(output.token_ids) < 60 for output in learned), "drafters learn from them"


class TestTurns:
    @driven(verifiers=1, max_batch=1)
    def test_too_many_that_wait_are_refused_and_streams_are_not(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        queue.max_waiting = 3
        stream = cluster.stream(entries(20))
        next(stream)
        kept = [queue.submit(PROMPT, sampling(seed)) for seed in range(3)]
        with pytest.raises(OverloadedError):
            queue.submit(PROMPT, sampling())
        assert len(list(stream)) == 19
        assert [handle.result().error for handle in kept] == ["", "", ""]
        assert queue.submit(PROMPT, sampling()).result().finish_reason == "length"

    @driven(verifiers=3)
    def test_a_session_stays_on_its_verifier_while_that_lives(self, cluster: FakeCluster, queue: RequestQueue) -> None:
        def turn_on(number: int) -> str:
            """The verifier of a turn."""
            turn = queue.submit(PROMPT, sampling(number, 4), session="s")
            assert turn.result().token_ids == true_output(sampling(number, 4), 0)
            (home,) = [name for name in cluster.handles if turn.key in begun(cluster, name)]
            return home

        homes = set()
        for turn in range(6):
            others = [queue.submit(PROMPT, sampling(seed, 8)) for seed in range(turn)]
            homes.add(turn_on(turn))
            for handle in others:
                handle.result()
        (home,) = homes
        cluster.network.kill(cluster.handles[home])
        (new,) = {turn_on(turn) for turn in range(3)}
        assert new != home


class TestFailures:
    @driven()
    def test_a_lost_controller_fails_all_and_a_later_request_too(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        handles = [queue.submit(PROMPT, sampling(seed, 1000)) for seed in range(3)]
        stream = cluster.stream(entries(3, tokens=1000))
        kernel = cluster.bench.kernel
        begin = kernel.now + 1.0
        kernel.at(begin, lambda: cluster.network.kill(cluster.actor))
        with pytest.raises(ActorLostError, match=r"controller.* 6 "):
            list(stream)
        assert kernel.now < begin + 5.0
        for handle in [*handles, queue.submit(PROMPT, sampling(tokens=1000))]:
            with pytest.raises(ActorLostError, match="controller"):
                handle.result()
        with pytest.raises(ActorLostError, match="controller"):
            cluster.queue.update_weights(WeightSet(1, ()))

    @driven()
    def test_what_is_wrong_with_a_request_is_said_at_once(self, cluster: FakeCluster, queue: RequestQueue) -> None:
        unchecked = sampling()  # as one from another process
        object.__setattr__(unchecked, "stop", ("",))
        for wrong, message in (
            ({"prompt": []}, "the prompt has no tokens"),
            ({"prompt": "text"}, "the model has no tokenizer"),
            ({"priority": None}, "priority must be a whole number"),
            ({"session": ["s"]}, "session must be a text"),
            ({"request_id": 5}, "request_id must be a text"),
            ({"sampling": {"seed": 1}}, "sampling must be SamplingParams"),
            ({"sampling": replace(sampling(), stop=("x",))}, "the model has no tokenizer"),
            ({"sampling": unchecked}, r"sampling\.stop is \('',\); it must"),
        ):
            arguments: dict[str, Any] = {"prompt": PROMPT, "sampling": sampling(), **wrong}
            with pytest.raises(InputError, match=message):
                queue.submit(**arguments)

    @driven()
    def test_a_reader_that_leaves_a_pause_and_a_condition_that_fails_leave_the_others_alone(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        handle = queue.submit(PROMPT, sampling(0, 40))
        cluster.bench.clock.sleep(0.5)
        left = queue.pause(WeightPolicy.WAIT)
        assert not handle.done() and not left.cancel()
        assert handle.result().token_ids == true_output(sampling(0, 40), 0)
        queue._await(left)
        queue.resume()
        broken, other = queue._thread.when(lambda: 1 // 0 > 0), queue._thread.when(lambda: False)
        cluster.bench.clock.sleep(1.0)
        for future in (broken, other):
            assert isinstance(future.exception(0.0), ZeroDivisionError)

    @driven()
    def test_a_closed_queue_ends_what_runs(self, cluster: FakeCluster, queue: RequestQueue) -> None:
        handles = [queue.submit(PROMPT, sampling(seed, 1000)) for seed in range(20)]
        cluster.bench.clock.sleep(1.0)
        handles.append(queue.submit(PROMPT, sampling(1, 1000)))  # the thread has not seen it
        queue.close()
        for handle in handles:
            with pytest.raises(InputError, match="closed"):
                handle.result(1.0)
        with pytest.raises(InputError, match="closed"):
            queue.submit(PROMPT, sampling())


class TestWeights:
    def running(self, queue: RequestQueue, cluster: FakeCluster) -> list[Handle]:
        """Eight that run and four that wait, when eight tokens or so are committed."""
        handles = [queue.submit(PROMPT, sampling(seed, 40)) for seed in range(12)]
        cluster.bench.clock.sleep(0.5)
        return handles

    @driven(verifiers=1)
    def test_wait_lets_what_runs_end_and_begins_nothing_meanwhile(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        handles = self.running(queue, cluster)
        assert cluster.queue.update_weights(WeightSet(1, ("weights",))) == 1
        assert [handle.done() for handle in handles] == [True] * 8 + [False] * 4
        for seed, handle in enumerate(handles):
            output = handle.result()
            assert output.weight_version == (seed >= 8) and output.versions == ()
            assert output.token_ids == true_output(sampling(seed, 40), output.weight_version)

    @driven(verifiers=1)
    def test_keep_continues_with_the_new_weights_and_says_where(
        self, cluster: FakeCluster, queue: RequestQueue
    ) -> None:
        handles = self.running(queue, cluster)
        begin = cluster.bench.kernel.now
        cluster.queue.update_weights(WeightSet(1, ("weights",)), "keep")
        assert cluster.bench.kernel.now - begin < cluster.load_s + 0.2 and not any(one.done() for one in handles)
        for seed, handle in enumerate(handles):
            output = handle.result()
            end = output.versions[0][1] if output.versions else 0
            assert output.weight_version == 1 and (0 < end < 40) == (seed < 8)
            new = tuple(true_token(seed, 1, position) for position in range(end, 40))
            assert output.token_ids == true_output(sampling(seed, 40), 0)[:end] + new
            assert output.versions in ((), ((0, end),)) and output.stats == stats_of(40)
        assert cluster.queue.dispatcher.reissues == 0

    @driven(verifiers=1)
    def test_abort_ends_what_runs_with_what_is_committed(self, cluster: FakeCluster, queue: RequestQueue) -> None:
        handles = self.running(queue, cluster)
        stream = cluster.stream(entries(4))
        cluster.queue.update_weights(WeightSet(1, ("weights",)), "abort")
        for seed, handle in enumerate(handles):
            output = handle.result()
            assert output.finish_reason == ("abort" if seed < 8 else "length")
            assert output.token_ids == true_output(sampling(seed, 40), seed >= 8)[: len(output.token_ids)]
        assert {entry.weight_version for entry in stream} == {1}


class TestEventLoop:
    """`generate` encodes texts and wakes verifiers in another thread."""

    @pytest.mark.parametrize("prompt", ["text", PROMPT])
    def test_it_never_waits_in_its_loop(self, prompt: Any) -> None:
        used = list[int]()

        class Slow(RequestQueue):
            def submit(self, *_arguments: Any, **_options: Any) -> Any:
                used.append(threading.get_ident())
                released.wait(60)
                return Handle(self._thread, self._read, "request")

        queue = Slow(*IDLE)
        queue._asleep = prompt == PROMPT
        released = threading.Event()

        async def begin() -> None:
            beginning = asyncio.ensure_future(queue.begin(prompt))
            while not used:
                await asyncio.sleep(0)
            assert not beginning.done(), "the loop runs while the request is encoded"
            assert len(queue.beginning) == 1, "a sleep is not put in front of it"
            released.set()
            await beginning
            assert used[0] != threading.get_ident() and not queue.beginning

        asyncio.run(begin())

    def test_a_request_whose_caller_left_meanwhile_is_dropped(self) -> None:
        entered, released, dropped = threading.Event(), threading.Event(), threading.Event()

        class Slow(RequestQueue):
            def submit(self, *_arguments: Any, **_options: Any) -> Any:
                entered.set()
                released.wait(60)
                handle = Handle(self._thread, self._read, "request")
                handle.drop = dropped.set  # type: ignore[method-assign]
                return handle

        async def leave() -> None:
            beginning = asyncio.ensure_future(Slow(*IDLE).begin("text"))
            while not entered.is_set():
                await asyncio.sleep(0)
            beginning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beginning
            released.set()

        asyncio.run(leave())
        assert dropped.wait(60)
