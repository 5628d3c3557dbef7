"""Conflation rules, the mailbox and the event queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.messages import (
    Commit,
    DraftClose,
    DraftOpen,
    DraftResync,
    DraftTail,
    Features,
    SamplingParams,
    ToDrafter,
    ToVerifier,
)
from specactor_ray.queues.conflation import ConflatingBuffer, for_drafter, for_verifier
from specactor_ray.queues.events import EventQueue
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.screening import drafter_screen, verifier_screen

TRUTH = tuple(range(100, 140))
SAMPLING = SamplingParams()


def opening(committed: int = 0, request: str = "r", verifier: str = "v", window: int = 4) -> DraftOpen:
    return DraftOpen(request, verifier, (1, 2, 3), TRUTH[:committed], SAMPLING, window)


def commit(start: int, end: int, window: int = 4, features: tuple[Features, ...] = (), request: str = "r") -> Commit:
    return Commit(request, "v", start, TRUTH[start:end], window, features=features)


def close(finished: bool = True, request: str = "r", verifier: str = "v") -> DraftClose:
    return DraftClose(request, verifier, finished)


def conflate(*messages: object) -> list[object]:
    buffer: ConflatingBuffer[Any] = ConflatingBuffer(for_drafter())
    buffer.add(messages)
    return buffer.take()


def drafter_mailbox(**bounds: int) -> Mailbox[ToDrafter]:
    return Mailbox(for_drafter(), drafter_screen(None, on_cut=lambda sender: None), **bounds)


def verifier_mailbox(**bounds: int) -> Mailbox[ToVerifier]:
    return Mailbox(for_verifier(), verifier_screen(100), **bounds)


def tail(drafter: str, *tokens: int, request: str = "r") -> DraftTail:
    return DraftTail(request, drafter, 0, tokens)


def test_newest_tail_of_a_drafter_replaces_the_older_and_resync_stays_apart() -> None:
    mailbox = verifier_mailbox()
    resync = DraftResync("r", "a")
    mailbox.put([tail("a", 1), tail("b", 2), resync])
    mailbox.put([tail("a", 3), tail("a", 4, request="other"), resync])
    assert mailbox.drain() == [tail("a", 3), tail("b", 2), resync, tail("a", 4, request="other")]
    assert mailbox.conflated == 2
    assert mailbox.drain() == []


def test_commits_that_touch_overlap_or_repeat_become_one() -> None:
    assert conflate(commit(0, 3), commit(3, 5, window=2)) == [commit(0, 5, window=2)]
    assert conflate(commit(0, 3), commit(2, 5)) == [commit(0, 5)]
    assert conflate(commit(3, 5), commit(0, 3)) == [commit(0, 5)]
    assert conflate(commit(0, 5), commit(2, 4, window=9)) == [commit(0, 5)]
    assert conflate(commit(1, 3), commit(0, 5)) == [commit(0, 5)]
    assert conflate(commit(0, 3), commit(3, 3, window=7)) == [commit(0, 3, window=7)]


def test_commits_with_a_gap_keep_the_one_that_reaches_further() -> None:
    assert conflate(commit(0, 3), commit(5, 7)) == [commit(5, 7)]
    assert conflate(commit(5, 7), commit(0, 3)) == [commit(5, 7)]
    assert conflate(commit(0, 3), commit(4, 5)) == [commit(4, 5)]


def test_commits_that_contradict_are_not_spliced() -> None:
    other = Commit("r", "v", 1, (7, 8, 9), 4)
    assert conflate(commit(0, 3), other) == [other]


A, B, C = (Features(begin, [0.0] * 2) for begin in (0, 2, 4))


def test_features_stay_in_order_of_positions() -> None:
    merged = conflate(commit(0, 2, features=(A,)), commit(2, 3, features=(B,)), commit(3, 5, features=(C,)))
    assert merged == [commit(0, 5, features=(A, B, C))]
    assert conflate(commit(2, 3, features=(B,)), commit(0, 2, features=(A,))) == [commit(0, 3, features=(A, B))]
    assert conflate(commit(0, 2, features=(A,)), commit(0, 2, features=(A,))) == [commit(0, 2, features=(A,))]
    assert conflate(commit(0, 3, features=(A,)), commit(2, 5, features=(B,))) == [commit(0, 5, features=(A, B))]
    assert conflate(commit(0, 3, features=(A,)), commit(3, 5)) == [commit(0, 5, features=(A,))]


def test_open_replaces_all_and_takes_up_commits() -> None:
    assert conflate(commit(0, 3), opening(3)) == [opening(3)]
    assert conflate(opening(2), commit(2, 4, window=6)) == [opening(4, window=6)]
    assert conflate(opening(2), commit(1, 4)) == [opening(4)]
    assert conflate(opening(4), commit(1, 3, window=9)) == [opening(4)]
    assert conflate(opening(2), commit(3, 5)) == [opening(2), commit(3, 5)]
    assert conflate(opening(2), commit(3, 5), commit(2, 3)) == [opening(5)]
    folded = conflate(replace(opening(2), features=(A,)), commit(2, 4, features=(B,)), commit(4, 5, features=(C,)))
    assert folded == [replace(opening(5), features=(A, B, C))]
    contradiction = Commit("r", "v", 0, (7, 7, 7), 4)
    assert conflate(opening(2), contradiction) == [opening(2), contradiction]
    assert conflate(opening(9), contradiction) == [opening(9), contradiction]


def test_close_replaces_all_but_the_last_commit_of_a_finished_output() -> None:
    assert conflate(opening(2), commit(3, 5), close()) == [close()]
    assert conflate(commit(0, 3), commit(3, 4), close()) == [commit(0, 4), close()]
    assert conflate(commit(0, 3), close(finished=False)) == [close(finished=False)]
    assert conflate(commit(0, 3), close(), close()) == [commit(0, 3), close()]
    assert conflate(close(), commit(0, 3)) == [close()]
    assert conflate(close(), opening(1)) == [opening(1)]
    assert conflate(commit(0, 1), close(), opening(1), commit(1, 3)) == [opening(3)]


def test_requests_and_verifiers_do_not_mix() -> None:
    messages = [opening(1), opening(2, request="s"), close(verifier="w")]
    assert conflate(*messages) == messages


def test_oldest_droppable_key_goes_first_but_a_close_stays() -> None:
    mailbox = drafter_mailbox(max_keys=2)
    mailbox.put([close(request="a"), commit(0, 1, request="b"), commit(0, 2, request="c")])
    assert mailbox.drain() == [close(request="a"), commit(0, 2, request="c")]
    assert mailbox.dropped == 1
    mailbox.put([close(request=name) for name in "abc"])
    assert len(mailbox) == 3


commits = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: commit(pair[0], pair[0] + pair[1]))
messages = st.lists(st.one_of(commits, st.integers(0, 8).map(opening)), max_size=12)


@given(st.integers(0, 6), messages)
def test_what_is_left_never_tells_a_mirror_anything_false(known: int, waiting: list[DraftOpen | Commit]) -> None:
    """Conflated or not, a drafter ends on a prefix of the truth; and if it could follow every single message, then
    the conflated ones bring it just as far."""

    def follow(received: list[DraftOpen | Commit]) -> tuple[int, bool]:
        mirror, good = RequestMirror((1, 2, 3), TRUTH[:known], SAMPLING, 4), True
        for message in received:
            if isinstance(message, DraftOpen):
                mirror, good = RequestMirror((1, 2, 3), message.committed_token_ids, SAMPLING, 4), True
            elif not mirror.commit(message.start, message.token_ids, 4).ok:
                good = False
        assert tuple(mirror.committed) == TRUTH[: mirror.base_len]
        return mirror.base_len, good

    conflated = conflate(*waiting)
    assert len(conflated) <= 2
    length, good = follow(waiting)
    conflated_length, conflated_good = follow(conflated)
    if good:
        assert conflated_good
        assert conflated_length == length


def woken(wait: Callable[[], object], wake: Callable[[], None]) -> object:
    """What `wait`, running in a thread, returns after `wake`; fails if it does not wake up."""
    results: list[object] = []
    sleeper = threading.Thread(target=lambda: results.append(wait()), daemon=True)
    sleeper.start()
    sleeper.join(0.02)
    assert sleeper.is_alive(), "it did not wait"
    wake()
    sleeper.join(10.0)
    assert results, "it slept on"
    return results[0]


def test_many_producers_lose_nothing_that_has_its_own_key() -> None:
    mailbox, seen = verifier_mailbox(), set()

    def produce(number: int) -> None:
        for request in range(200):
            mailbox.put([tail(f"d{number}", 1, request=str(request))])

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.update((m.request_id, m.drafter_id) for m in mailbox.drain())
    seen.update((m.request_id, m.drafter_id) for m in mailbox.drain())
    assert len(seen) == 800


def test_events_are_kept_until_the_reader_has_them() -> None:
    queue: EventQueue[int] = EventQueue()
    queue.put([1, 2])
    queue.put([2, 3])
    assert queue.read(0) == queue.read(0) == (0, [1, 2, 2, 3]), "an answer that was lost can be had again"
    assert queue.read(1) == (1, [2, 2, 3])
    assert len(queue) == 3
    assert queue.read(4) == (4, [])
    assert queue.read(1) == (4, []), "a late repetition of an older call brings nothing back"
    assert woken(lambda: queue.read(4, timeout_s=600.0), lambda: queue.put([4])) == (4, [4])
    assert queue.read(4, timeout_s=600.0) == (4, [4]), "what is there is not waited for"
    with pytest.raises(ValueError, match="next one is number 5"):
        queue.read(6)
    assert queue.read(4) == (4, [4]), "and nothing was lost by the nonsense"


def test_an_event_read_by_a_repeated_call_is_not_given_out_twice() -> None:
    """Two polls with one number wait; the reader has the events and goes on before the second returns."""
    queue: EventQueue[int] = EventQueue()

    def read_on() -> None:
        queue.put([1, 2])
        assert queue.read(2) == (2, [])

    assert woken(lambda: queue.read(0, timeout_s=600.0), read_on) in [(0, [1, 2]), (2, [])]


def test_a_mailbox_needs_room_for_a_key() -> None:
    with pytest.raises(ValueError, match="max_keys"):
        verifier_mailbox(max_keys=0)


def test_a_sender_that_floods_drops_only_its_own() -> None:
    mailbox = verifier_mailbox(max_keys=100, max_per_sender=5)
    mailbox.put([tail("calm", 1, request=f"before {number}") for number in range(3)])
    mailbox.put([tail("flood", 1, request=str(number)) for number in range(1000)])
    mailbox.put([tail("calm", 1, request=f"after {number}") for number in range(2)])
    left = [(message.drafter_id, message.request_id) for message in mailbox.drain()]
    calm = [("calm", name) for name in ("before 0", "before 1", "before 2", "after 0", "after 1")]
    newest = [("flood", str(number)) for number in range(995, 1000)]
    assert left == calm[:3] + newest + calm[3:]
    assert mailbox.dropped == 995
    mailbox.put([tail("flood", 1, request=str(number)) for number in range(5)])
    assert len(mailbox) == 5, "what was drained counts no more"


def test_a_flood_leaves_closes_and_other_verifiers_alone() -> None:
    mailbox = drafter_mailbox(max_keys=100, max_per_sender=3)
    mailbox.put([opening(request="mine", verifier="w"), close(request="ended")])
    mailbox.put([commit(0, 1, request=str(number)) for number in range(50)])
    left = mailbox.drain()
    assert left[:2] == [opening(request="mine", verifier="w"), close(request="ended")]
    assert [message.request_id for message in left[2:]] == ["48", "49"]
