"""The rollout's side: every request ends exactly once and with the right tokens, whatever is lost and whoever dies."""

from __future__ import annotations

from collections import Counter

import pytest

from specactor_ray.actors.specs import Departure
from specactor_ray.core.errors import ActorLostError, InputError, SpecActorError
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.transport.messages import WeightSet
from tests.fakes.cluster import FakeCluster, driven, entries


def reasons(ended: list[JournalEntry]) -> dict[str, str]:
    """Failed request → why."""
    return {e.request_id: e.finished.error for e in ended if e.finished and e.finished.finish_reason == "error"}


@driven()
def test_a_request_moves_once_to_the_verifier_that_has_none_left(cluster: FakeCluster) -> None:
    long, short = entries(2, tokens=60), entries(2, tokens=2, prefix="s")
    assert reasons(cluster.finish([long[0], short[0], long[1], short[1]])) == {}
    begun = {name: {request_id for request_id, _ in cluster.verifier(name).begun} for name in cluster.handles}
    assert begun["v0"] == {"r0", "r1"} and len(begun["v1"] & begun["v0"]) == 1
    assert cluster.queue.dispatcher.reissues == 0


@driven(max_batch=6)
def test_no_request_moves_to_a_verifier_that_would_queue_it(cluster: FakeCluster) -> None:
    """`v0` holds 12 long requests and `v1` 6 after the short ones: both run 6."""
    long, short = entries(18, tokens=60), entries(6, tokens=2, prefix="s")
    pairs = zip(long[:6], short, strict=True)
    assert reasons(cluster.finish([*(entry for pair in pairs for entry in pair), *long[6:]])) == {}
    begun = [Counter(request_id for request_id, _ in cluster.verifier(name).begun) for name in cluster.handles]
    assert set(sum(begun, Counter()).values()) == {1}


class TestSharing:
    """Outputs reach the lookups that other verifiers host."""

    @driven(verifiers=10)
    def test_each_output_goes_once_to_the_others_of_its_eight(self, cluster: FakeCluster) -> None:
        requests = entries(60)
        prompts = {entry.request_id: entry.prompt_token_ids for entry in requests}
        ended = {entry.request_id: entry.token_ids for entry in cluster.finish(requests)}
        cluster.bench.clock.sleep(1.0)
        groups = (sorted(cluster.handles)[:8], sorted(cluster.handles)[8:])
        for group in groups:
            mine = {name: cluster.verifier(name).learned for name in group}
            learned = {name: Counter(one.request_id for one in outputs) for name, outputs in mine.items()}
            finished = Counter(request_id for counts in learned.values() for request_id in counts)
            assert set(finished.values()) == {len(group) - 1}, "the others, and not who has finished it"
            assert all(count == 1 for counts in learned.values() for count in counts.values())
            for one in (one for outputs in mine.values() for one in outputs):
                assert one.prompt_token_ids == prompts[one.request_id]
                assert one.token_ids.dtype == "int32" and one.token_ids.tolist() == ended[one.request_id]


class TestLostMessages:
    @pytest.mark.parametrize("fault", ["lost_before", "lost_after", "repeated", "delayed"])
    @pytest.mark.parametrize(("method", "times"), [("poll", 4), ("submit", 4), ("learn", 1000)])
    @driven()
    def test_calls_that_are_lost_or_come_twice_or_late_cost_and_repeat_nothing(
        self, cluster: FakeCluster, method: str, times: int, fault: str
    ) -> None:
        cluster.network.lose(method, times=times, fault=fault)
        assert reasons(cluster.finish(entries(16, tokens=60))) == {}
        assert cluster.queue.dispatcher.reissues == 0


class TestDeaths:
    @pytest.mark.parametrize("position", [30, -1])
    @driven(verifiers=3)
    def test_a_poison_request_fails_alone_and_with_its_reason(self, cluster: FakeCluster, position: int) -> None:
        """Also one that ends its verifier before that has answered."""
        cluster.deadly["r5"] = position
        failed = reasons(cluster.finish(entries(24, tokens=60)))
        assert list(failed) == ["r5"] and "its verifiers failed again and again" in failed["r5"]
        assert 3 <= len(cluster.departed) <= 12

    @driven(verifiers=1)
    def test_the_loss_of_nodes_convicts_nobody(self, cluster: FakeCluster) -> None:
        kernel, why = cluster.bench.kernel, Departure.NODE_LOST
        for turn in range(8):  # before its second token
            kernel.at(kernel.now + 2.0 * turn + 1.0, lambda: cluster.lose(next(iter(cluster.handles)), why))
        cluster.stalls = {("r0", f"v{number}") for number in range(8)}
        assert reasons(cluster.finish(entries(1))) == {}
        assert set(cluster.departed.values()) == {why} and len(cluster.departed) == 8

    @pytest.mark.parametrize("lost", ["the controller of the run has not answered", "no verifier"])
    @driven(verifiers=2)
    def test_without_a_controller_or_a_verifier_it_ends_after_the_limit(self, cluster: FakeCluster, lost: str) -> None:
        limit_s = cluster.config.cluster.start_timeout_s + cluster.config.cluster.placement_timeout_s

        def lose() -> None:
            cluster.hidden = set(cluster.handles)
            if lost != "no verifier":
                cluster.bench.kernel.freeze(cluster.actor.process)

        kernel = cluster.bench.kernel
        kernel.at(kernel.now + 5.0, lose)
        with pytest.raises(ActorLostError, match=f"{lost} for 90 s"):
            cluster.finish(entries(8, tokens=10_000))
        assert limit_s - 1.0 < kernel.now - 5.0 < limit_s + 2.0


class TestStreamsAndWeights:
    @driven()
    def test_after_an_update_that_took_too_long_streams_run_with_the_new_version(self, cluster: FakeCluster) -> None:
        cluster.load_s = float("inf")
        with pytest.raises(SpecActorError, match="version 1"):
            cluster.queue.update_weights(WeightSet(1, ("weights",)))
        kernel = cluster.bench.kernel
        for name in cluster.handles:
            kernel.at(kernel.now + 10.0, lambda name=name: cluster.verifier(name).load_weights(1))
        ended = cluster.finish(entries(8))
        assert reasons(ended) == {} and {entry.weight_version for entry in ended} == {1}

    @driven()
    def test_weights_only_grow_and_not_while_a_stream_is_open(self, cluster: FakeCluster) -> None:
        queue = cluster.queue
        queue.update_weights(WeightSet(3, ("weights",)))
        queue.update_weights(WeightSet(3, ("weights",)))  # again, as after an error
        with pytest.raises(InputError, match=r"policy .*wait, keep, abort"):
            queue.update_weights(WeightSet(4, ("weights",)), "now")
        with pytest.raises(InputError, match=r"version 2 .*version 3"):
            queue.update_weights(WeightSet(2, ("weights",)))
        stream = cluster.stream(entries(4))
        next(stream)
        for forbidden in (lambda: queue.update_weights(WeightSet(4, ())), queue.reset_metrics):
            with pytest.raises(InputError, match="stream"):
                forbidden()
        stream.close()
        assert queue.weight_version == cluster.version == 3
        queue.update_weights(WeightSet(4, ("weights",)))

    @driven()
    def test_commands_come_after_lost_cancellations_and_pass_over_a_dead_verifier(self, cluster: FakeCluster) -> None:
        first = cluster.stream([*entries(1, prefix="s"), *entries(8, tokens=10_000)])
        next(first)
        cluster.network.lose("cancel", times=6)
        first.close()
        cluster.queue.call_verifiers("sleep")
        assert not any(cluster.verifier(name).running for name in cluster.handles)
        cluster.network.kill(cluster.handles["v0"])
        cluster.queue.reset_metrics()
        assert cluster.verifier("v1").commands == ["sleep", "reset_metrics"]
        with pytest.raises(SpecActorError, match="a bug of the verifier"):  # v1 is alive
            cluster.queue.call_verifiers("wake")
