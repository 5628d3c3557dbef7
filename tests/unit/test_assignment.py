"""Which drafters draft for which request: one per method, evenly, and drafters are told exactly what changed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.loops.assignment import AssignmentChange, DrafterAssignment

DRAFTERS = {"n0": "ngram", "n1": "ngram", "n2": "ngram", "s0": "draft_model", "s1": "draft_model"}
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 11)),
        st.tuples(st.just("remove"), st.integers(0, 11)),
        st.tuples(st.just("set"), st.sets(st.sampled_from(sorted(DRAFTERS)))),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_every_request_has_one_drafter_per_method_and_loads_stay_level(actions: list[tuple[str, object]]) -> None:
    assignment = DrafterAssignment()
    requests: set[str] = set()
    mirrored: set[tuple[str, str]] = set()
    for action, what in actions:
        if action == "set":
            present = {name: DRAFTERS[name] for name in what}  # type: ignore[attr-defined]
            mirrored = {pair for pair in mirrored if pair[0] in present}  # what left has forgotten all
            change = assignment.set_drafters(present)
        elif action == "add" and f"r{what}" not in requests:
            requests.add(f"r{what}")
            change = assignment.add(f"r{what}")
        elif action == "remove":
            requests.discard(f"r{what}")
            change = assignment.remove(f"r{what}")
        else:
            change = AssignmentChange()
        for pair in change.closed:
            assert pair in mirrored, "closed what was not open"
            mirrored.discard(pair)
        for pair in change.opened:
            assert pair not in mirrored, "opened twice"
            mirrored.add(pair)
        methods = set(assignment.drafters.values())
        for request in requests:
            chosen = assignment.of(request)
            assert sorted(assignment.drafters[d] for d in chosen) == sorted(methods)
        assert mirrored == {(d, r) for r in requests for d in assignment.of(r)}
        if action == "set":
            loads = Counter({d: len(assignment.requests_of(d)) for d in assignment.drafters})
            for method in methods:
                peers = [loads[d] for d, m in assignment.drafters.items() if m == method]
                assert max(peers) - min(peers) <= 1


def test_unknown_requests_have_no_drafters() -> None:
    assignment = DrafterAssignment()
    assignment.set_drafters({"n0": "ngram"})
    assert assignment.of("nobody") == []
    assert assignment.remove("nobody").closed == []
