"""What arrives from other processes may be anything: it is dropped, counted and logged, and never raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from specactor_ray.transport import inbox
from specactor_ray.transport.inbox import MOST_WAITING, UNKNOWN
from specactor_ray.transport.messages import CommitBatch, TailBatch
from tests.unit.verify.tables import ints

VOCAB = 100
HUGE = 1 << 21
TAIL = TailBatch("d", ints([0, 3]), ints([1, 7]), ints([3, 0]), ints([2, 1]), ints([1, 2, 99]), 0.01, ((3, 7),))
COMMIT = CommitBatch("v", ints([0, 3]), ints([1, 7]), ints([3, 0]), ints([2, 1]), ints([1, 2, 99]))


def with_value(message: Any, name: str, value: object) -> Any:
    """A copy with one field set to anything, past the checks of its class."""
    copy = object.__new__(type(message))
    for field in dataclasses.fields(message):
        object.__setattr__(copy, field.name, value if field.name == name else getattr(message, field.name))
    return copy


class SubclassedArray(np.ndarray):
    pass


BAD_ARRAYS: tuple[object, ...] = (
    np.array([0, 9, 3, 9], np.int32)[::2],
    np.frombuffer(b"-" + np.array([0, 3], np.int32).tobytes(), np.int32, 2, 1),
    None,
    [0, 3],
    np.array([0, 3]),
    np.array([0, None]),
    np.array([0, 3], ">i4"),
    ints([0]),
    ints([[0, 3]]),
    ints([0, -1]),
    ints([0, 3]).view(SubclassedArray),
)
BAD_LENGTHS = (*BAD_ARRAYS, ints([3, -1]), ints([1, 1]), ints([2, 2]), ints([2**31 - 1, 2**31 - 1]), ints([0, 0]))
BAD_TOKENS = (None, ints([1, 2]), ints([1, 2, 3, 4]), ints([1, -1, 2]))
BAD_IDS = (None, b"r", "r" * 5000)
BAD_SECONDS = (None, True, float("nan"), float("inf"), -1.0, 10**400)
BAD_HANDLES = (None, [(3, 7)], ((3, 7, 1),), ([3, 7],), ((HUGE, 7),), ((3, 7.0),))


def malformed(message: Any, **bad: Sequence[object]) -> Iterator[Any]:
    for name, values in bad.items():
        for number, value in enumerate(values):
            yield pytest.param(with_value(message, name, value), id=f"{name}-{number}")


def others(*things: object) -> Iterator[Any]:
    for number, thing in enumerate((None, 3, "tail", {}, [TAIL], TailBatch, object(), *things)):
        yield pytest.param(thing, id=f"other-{number}")


FOR_VERIFIER = [
    *malformed(TAIL, drafter_id=BAD_IDS, rows=(*BAD_ARRAYS, ints([0, HUGE])), generations=BAD_ARRAYS),
    *malformed(TAIL, bases=(*BAD_ARRAYS, ints([2**31 - 2, 0]))),
    *malformed(
        TAIL, lengths=BAD_LENGTHS, tokens=(*BAD_TOKENS, ints([1, 2, VOCAB])), token_s=BAD_SECONDS, lost=BAD_HANDLES
    ),
    *others(COMMIT, object.__new__(TailBatch)),
]
FOR_DRAFTER = [
    *malformed(COMMIT, rows=(*BAD_ARRAYS, ints([0, HUGE])), starts=(*BAD_ARRAYS, ints([2**31 - 2, 0]))),
    *malformed(COMMIT, generations=BAD_ARRAYS, lengths=BAD_LENGTHS, tokens=BAD_TOKENS),
    *others(TAIL, object.__new__(CommitBatch)),
]
EMPTY = TailBatch("d", *[ints([])] * 5)


@pytest.mark.parametrize("message", FOR_VERIFIER)
def test_a_verifier_drops_what_is_malformed_and_keeps_the_rest(message: object) -> None:
    check_drops(inbox.for_verifier(VOCAB), TAIL, message, EMPTY)


@pytest.mark.parametrize("message", FOR_DRAFTER)
def test_a_drafter_drops_what_is_malformed_and_keeps_the_rest(message: object) -> None:
    check_drops(inbox.for_drafter(), COMMIT, message, COMMIT)


def check_drops(box: Any, before: object, malformed: object, after: object) -> None:
    for one in (before, malformed, after):
        box.put(one)
    assert box.drain() == [before, after]
    assert list(box.snapshot()["malformed"].values()) == [1]


def test_a_drafter_takes_any_token_of_a_target() -> None:
    large = dataclasses.replace(COMMIT, tokens=ints([1, 2, 2**31 - 1]))
    box = inbox.for_drafter()
    box.put(large)
    assert box.drain() == [large]


def test_malformed_messages_count_for_their_sender_and_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    box = inbox.for_drafter()
    bad = dataclasses.replace(COMMIT, starts=ints([3, -1]))
    for message in [bad] * 50 + [None] * 3 + [COMMIT]:
        box.put(message)
    assert box.drain() == [COMMIT]
    assert box.snapshot() == {"malformed": {"v": 50, UNKNOWN: 3}, "dropped_messages": 0}
    first, second = (record.getMessage() for record in caplog.records)
    assert "of v" in first and "negative" in first and UNKNOWN in second


def test_what_is_counted_is_bounded_whatever_senders_call_themselves() -> None:
    box = inbox.for_verifier(VOCAB)
    for number in range(2500):
        box.put(dataclasses.replace(TAIL, drafter_id=f"d{number}", token_s=-1.0))
    counts = box.snapshot()["malformed"]
    assert len(counts) < 2000 and sum(counts.values()) == 2500


def test_messages_wait_sender_by_sender_and_a_sender_that_floods_loses_only_its_own() -> None:
    box, calm = inbox.for_verifier(VOCAB), dataclasses.replace(TAIL, drafter_id="calm")
    box.put(calm)
    for number in range(1000):
        box.put(dataclasses.replace(TAIL, token_s=number))
    box.put(calm)
    assert len(box) == 2 + MOST_WAITING and box.snapshot()["dropped_messages"] == 1000 - MOST_WAITING
    left = box.drain()
    assert left[:2] == [calm, calm]
    assert [message.token_s for message in left[2:]] == list(range(1000 - MOST_WAITING, 1000))
    assert len(box) == 0 and box.drain() == []
