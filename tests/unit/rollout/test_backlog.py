"""Who gets the next request: the least loaded verifier, and suspects a verifier of their own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.backlog import Backlog
from specactor_ray.rollout.journal import Journal, JournalEntry

OUTSTANDING = 5


def waiting(number: int, loads: dict[str, int] | None = None) -> tuple[Journal, Backlog]:
    """So many requests `r0`, `r1`, ... that wait, and verifiers that have some already."""
    journal = Journal()
    backlog = Backlog(journal, OUTSTANDING)
    for verifier, load in (loads or {}).items():
        for index in range(load):
            journal.add(JournalEntry(f"{verifier}/{index}", (1,), SamplingParams()))
            journal.hand_to(f"{verifier}/{index}", verifier)
    fill(journal, backlog, [(None, 0, 0)] * number)
    return journal, backlog


def fill(journal: Journal, backlog: Backlog, requests: Sequence[tuple[str | None, int, int]]) -> None:
    """Add requests `r0`, `r1`, ... of these sessions, priorities and streams."""
    for number, (session, priority, stream) in enumerate(requests):
        journal.add(JournalEntry(f"r{number}", (1,), SamplingParams(), session, priority, stream))
    backlog.add(f"r{number}" for number in range(len(requests)))


@given(st.integers(0, 30), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7)))
def test_each_goes_to_the_least_loaded_as_long_as_there_is_room(number: int, loads: dict[str, int]) -> None:
    journal, backlog = waiting(number, loads)
    batches = backlog.hand_out(list(loads))
    expected, handed = dict(loads), 0
    while handed < number and expected and min(expected.values()) < OUTSTANDING:
        expected[min(expected, key=lambda name: (expected[name], name))] += 1
        handed += 1
    assert {name: journal.load(name) for name in loads} == expected
    given_out = [request.request_id for batch in batches.values() for request in batch]
    assert sorted(given_out) == sorted(f"r{index}" for index in range(handed))
    assert bool(backlog) == (handed < number)


def test_suspects_get_a_verifier_of_their_own_and_the_emptiest_is_kept_for_them() -> None:
    journal, backlog = waiting(4, {"a": 1, "b": 2})
    suspects = ["r0", "r1"]
    for name in suspects:
        journal.hand_to(name, "gone")
    backlog = Backlog(journal, OUTSTANDING)
    backlog.quarantine.accuse("gone", dict.fromkeys(suspects, 0))
    for name in suspects:
        journal.release(name)
    backlog.put_back(suspects)
    backlog.add(["r2", "r3"])
    first = backlog.hand_out(["a", "b", "c"])
    assert [request.request_id for request in first["c"]] == ["r0"]
    assert "a" not in first, "it is the next to be free for the other suspect"
    assert [request.request_id for request in first["b"]] == ["r2", "r3"] and backlog


flows = st.tuples(st.sampled_from([None, "s", "t"]), st.integers(-1, 1), st.integers(0, 2))


@given(st.lists(flows, max_size=30), st.randoms(use_true_random=False))
def test_priorities_go_first_and_the_flows_of_one_take_turns(
    requests: list[tuple[str | None, int, int]], rng: Random
) -> None:
    journal = Journal()
    backlog = Backlog(journal, 10**6)
    fill(journal, backlog, requests)
    gone = set(rng.sample(range(len(requests)), rng.randrange(len(requests) + 1)))
    for number in gone:
        backlog.discard(journal.entries.pop(f"r{number}"))
    assert backlog.single == sum(not flow[2] for number, flow in enumerate(requests) if number not in gone)
    order = [int(one.request_id[1:]) for one in backlog.hand_out(["a"]).get("a", [])]
    assert backlog.single == 0 and not backlog and journal.begun == len(order)
    kept = [number for number in range(len(requests)) if number not in gone]
    flow_of = requests.__getitem__
    # priority, how many of its flow come before it, when its flow began
    turns = {
        n: (flow_of(n)[1], [*map(flow_of, kept[:at])].count(flow_of(n)), requests.index(flow_of(n)))
        for at, n in enumerate(kept)
    }
    assert order == sorted(kept, key=turns.__getitem__)


def test_a_turn_waits_for_the_verifier_of_its_session_and_others_pass() -> None:
    journal = Journal()
    backlog = Backlog(journal, 2)
    for name, session in (("r0", "s"), ("r1", None), ("r2", "s"), ("r3", "t"), ("r4", None)):
        journal.add(JournalEntry(name, (1,), SamplingParams(), session))
    backlog.add(["r0"])
    assert list(backlog.hand_out(["a", "b"])) == ["a"]
    backlog.set_home("t", "b")
    backlog.add(["r1", "r2", "r3", "r4"])
    journal.add(JournalEntry("x", (1,), SamplingParams()))
    journal.hand_to("x", "a")
    batches = backlog.hand_out(["a", "b"])
    assert {name: [one.request_id for one in batch] for name, batch in batches.items()} == {"b": ["r1", "r3"]}
    batches = backlog.hand_out(["c"])  # the verifier of the session does not serve any more
    assert [one.request_id for one in batches["c"]] == ["r2", "r4"]


def test_while_held_only_those_that_have_begun_are_handed_out_and_frozen_none() -> None:
    journal, backlog = waiting(8)
    backlog.hand_out(["a"])
    for name in ("r1", "r3"):
        journal.release(name)
    backlog.put_back(["r1", "r3"])
    journal.add(JournalEntry("new", (1,), SamplingParams()))
    backlog.add(["new"])
    backlog.is_frozen = True
    assert not backlog
    backlog.is_frozen, backlog.holds = False, 1
    assert backlog and [one.request_id for one in backlog.hand_out(["b"])["b"]] == ["r1", "r3"]
    assert not backlog and not backlog.hand_out(["b"])
    backlog.holds = 0
    assert [one.request_id for one in backlog.hand_out(["b"])["b"]] == ["r5", "r6", "r7"]
