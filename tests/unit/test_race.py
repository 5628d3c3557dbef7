"""Algorithm 3 against its text, on random instances."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.speculation.race import Straggler, Worker, assign_race

METHODS = ("ngram", "draft_model", "eagle", "suffix")
workers_strategy = st.dictionaries(
    st.sampled_from([f"w{number}" for number in range(8)]),
    st.builds(Worker, st.sampled_from(METHODS), st.integers(0, 4), st.integers(1, 4)),
)
stragglers_strategy = st.lists(
    st.builds(Straggler, st.sampled_from([f"r{number}" for number in range(6)]), st.sampled_from([0.1, 0.2, 0.5, 0.9])),
    unique_by=lambda straggler: straggler.request_id,
)
serving_strategy = st.dictionaries(
    st.sampled_from([f"r{number}" for number in range(6)]), st.sets(st.sampled_from(METHODS))
)
ranking_strategy = st.permutations(METHODS).flatmap(lambda order: st.integers(0, 4).map(lambda n: order[:n]))


def as_written(stragglers, ranking, workers, serving):  # type: ignore[no-untyped-def]
    """The text of the algorithm, step by step, on sets of (request, method) and lists of each worker's requests."""
    batches = {name: [None] * worker.load for name, worker in workers.items()}
    pairs = {(request, method) for request, methods in serving.items() for method in methods}
    result = []
    remaining = list(stragglers)
    while remaining:
        lowest = remaining[0]
        for candidate in remaining:
            if (candidate.acceptance, candidate.request_id) < (lowest.acceptance, lowest.request_id):
                lowest = candidate
        remaining.remove(lowest)
        for method in ranking:
            if (lowest.request_id, method) in pairs:
                continue
            chosen = None
            for name in sorted(workers):
                has_room = len(batches[name]) < workers[name].max_batch
                right_method = workers[name].method == method
                if has_room and right_method and (chosen is None or len(batches[name]) < len(batches[chosen])):
                    chosen = name
            if chosen is not None:
                batches[chosen].append(lowest.request_id)
                pairs.add((lowest.request_id, method))
                result.append((chosen, lowest.request_id))
    return result


@given(stragglers_strategy, ranking_strategy, workers_strategy, serving_strategy)
def test_it_is_the_written_algorithm(stragglers, ranking, workers, serving):  # type: ignore[no-untyped-def]
    assert assign_race(stragglers, ranking, workers, serving) == as_written(stragglers, ranking, workers, serving)


@given(stragglers_strategy, ranking_strategy, workers_strategy, serving_strategy)
def test_its_invariants(stragglers, ranking, workers, serving):  # type: ignore[no-untyped-def]
    assigned = assign_race(stragglers, ranking, workers, serving)
    loads = Counter({name: worker.load for name, worker in workers.items()})
    loads.update(name for name, _ in assigned)
    for name, worker in workers.items():
        assert loads[name] <= max(worker.load, worker.max_batch)
    pairs = [(request, workers[name].method) for name, request in assigned]
    assert len(pairs) == len(set(pairs)), "a method twice for one request"
    for request, method in pairs:
        assert method not in serving.get(request, ()) and method in ranking
    # Who goes without does so because its method is full.
    for straggler in stragglers:
        for method in ranking:
            if method not in serving.get(straggler.request_id, ()) and (straggler.request_id, method) not in pairs:
                peers = [name for name, worker in workers.items() if worker.method == method]
                assert all(loads[name] >= workers[name].max_batch for name in peers)


def test_the_slowest_request_comes_first_and_the_idlest_worker_is_taken() -> None:
    workers = {"e0": Worker("eagle", 2, 3), "e1": Worker("eagle", 1, 3), "s0": Worker("suffix", 0, 1)}
    stragglers = [Straggler("fast", 0.9), Straggler("slow", 0.1)]
    assert assign_race(stragglers, ["eagle", "suffix"], workers, {"fast": ["eagle"]}) == [
        ("e1", "slow"),
        ("s0", "slow"),
    ]
    assert assign_race([], ["eagle"], workers, {}) == []
