"""Who gets the next request: the least loaded verifier, and suspects a verifier of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.messages import SamplingParams
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
    names = [f"r{index}" for index in range(number)]
    for name in names:
        journal.add(JournalEntry(name, (1,), SamplingParams()))
    backlog.add(names)
    return journal, backlog


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


def test_those_put_back_go_first_and_in_their_order() -> None:
    journal, backlog = waiting(8)
    backlog.hand_out(["a"])
    for name in ("r1", "r3"):
        journal.release(name)
    backlog.put_back(["r1", "r3"])
    assert [request.request_id for request in backlog.hand_out(["b"])["b"]] == ["r1", "r3", "r5", "r6", "r7"]


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


def test_clear_forgets_all() -> None:
    journal, backlog = waiting(3)
    journal.clear()
    backlog.clear()
    assert not backlog and backlog.hand_out(["a"]) == {}
