"""The table of requests against a plain dictionary model, whatever drafters say in whatever order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest

from specactor_ray.spec.acceptance import Acceptance, bucket_of
from specactor_ray.spec.table import RequestTable
from tests.unit.spec.tables import EVIDENCE, Claim, batch, commit, request, say

WINDOW, VOCAB, METHODS = 4, 3, 3


@dataclass
class Held:
    """What is known of a (drafter, request)."""

    tail: tuple[int, ...] = ()
    base: int = -1
    told: int = -1


@dataclass
class Known:
    """What is known of a request."""

    generation: int
    output: list[int]
    held: dict[int, Held] = field(default_factory=dict)
    evidence: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class Naive:
    """The table's rules on lists."""

    def __init__(self) -> None:
        self.rows: dict[int, Known] = {}
        self.method: dict[int, int] = {}
        self.overall: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)

    def take(self, seat: int, claim: Claim) -> str:
        """What becomes of a claim."""
        known = self.rows.get(claim.row)
        if known is None or known.generation != claim.generation or seat not in known.held:
            return "unknown"
        held, past = known.held[seat], known.output[claim.base :]
        if claim.base > len(known.output):
            return "ahead"
        if any(ours != theirs for ours, theirs in zip(past, claim.tokens, strict=False)):
            return "mismatch"
        left = claim.tokens[len(past) :]
        outdated = claim.base < held.base
        shorter = claim.base == held.base and len(left) < len(held.tail)
        if (past and not left) or outdated or shorter:
            return "stale"
        held.tail, held.base = left[:WINDOW], claim.base
        return "taken" if len(left) <= WINDOW else "truncated"

    def commit(self, fresh: dict[int, list[int]]) -> None:
        for row, tokens in fresh.items():
            known = self.rows[row]
            bucket = max(0, len(known.output).bit_length() - 6)
            known.output = known.output + tokens
            for seat, held in known.held.items():
                pairs = list(zip(held.tail, tokens, strict=False))
                right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                for counts in (known.evidence[self.method[seat]], self.overall[self.method[seat], bucket]):
                    counts["hits"] += right
                    counts["tries"] += min(right + 1, len(pairs))
                held.tail = held.tail[len(tokens) :] if right == len(pairs) else ()


class Pair:
    """A table and the naive one, driven alike at random and compared after every action."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table, self.acceptance, self.naive = RequestTable(WINDOW), Acceptance(), Naive()
        self.said: dict[int, list[Claim]] = defaultdict(list)
        self.opened, self.fates = 0, set[str]()

    def act(self) -> None:
        actions = {self.open: 6, self.close: 1, self.join: 1, self.assign: 8, self.release: 1, self.take: 12}
        actions |= {self.commit: 6, self.tell: 3}
        self.rng.choices(list(actions), list(actions.values()))[0]()

    def open(self) -> None:
        known = [self.rng.randrange(VOCAB) for _ in range(self.rng.choice([0, 3, 63, 250]))]
        row = self.table.open(request(f"r{self.opened}", known))
        assert row not in self.naive.rows
        self.opened += 1
        self.naive.rows[row] = Known(int(self.table.generation[row]), known)

    def close(self) -> None:
        if self.naive.rows:
            row = self.rng.choice(list(self.naive.rows))
            del self.naive.rows[row]
            self.table.close(row)

    def join(self) -> None:
        seat, method = self.rng.randrange(6), self.rng.randrange(METHODS)
        self.naive.method[seat] = method
        for known in self.naive.rows.values():
            known.held.pop(seat, None)
        self.table.fit_seats(seat + 1)
        self.table.clear_seat(seat, method)

    def assign(self) -> None:
        if self.naive.rows and self.naive.method:
            seat = self.rng.choice(list(self.naive.method))
            for row in self.rng.choices(list(self.naive.rows), k=3):
                self.naive.rows[row].held[seat] = Held()
                self.table.assign(seat, row)

    def release(self) -> None:
        for seat, row in self.rng.sample(self.pairs(), min(1, len(self.pairs()))):
            del self.naive.rows[row].held[seat]
            self.table.release(seat, row)

    def pairs(self) -> list[tuple[int, int]]:
        return [(seat, row) for row, known in self.naive.rows.items() for seat in known.held]

    def claim(self, seat: int) -> Claim:
        rng = self.rng
        mine = [row for row, known in self.naive.rows.items() if seat in known.held]
        row = rng.choice(mine) if mine and rng.random() < 0.9 else rng.randrange(-1, 140)
        known = self.naive.rows.get(row, Known(7, [0, 1]))
        base = max(0, len(known.output) - rng.choice([-1, 0, 0, 0, 0, 1, 2, 5]))
        tokens = known.output[base:] + [rng.randrange(VOCAB) for _ in range(rng.randrange(WINDOW + 3))]
        if tokens and rng.random() < 0.2:
            tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB)
        tokens = tokens[: rng.randrange(12)]
        return Claim(row, known.generation + (rng.random() < 0.05), base, tuple(tokens))

    def take(self) -> None:
        if not self.naive.method:
            return
        seat = self.rng.choice([*self.naive.method, *(one for one, _ in self.pairs())])
        self.said[seat] += [self.claim(seat) for _ in range(self.rng.randrange(5))]
        # Lost, repeated, late, and in any order.
        recent = self.said[seat][-12:]
        claims = self.rng.sample(recent, self.rng.randint(0, min(6, len(recent))))
        fates = [self.naive.take(seat, claim) for claim in claims]
        assert self.table.take(seat, batch(claims)).tolist() == [fate == "unknown" for fate in fates]
        self.fates.update(fates)

    def commit(self) -> None:
        rows = self.rng.sample(list(self.naive.rows), self.rng.randint(0, len(self.naive.rows)))
        if not rows:
            return
        fresh = {}
        for row in rows:
            tails = [held.tail for held in self.naive.rows[row].held.values()]
            guessed = list(self.rng.choice(tails)) if tails else []
            fresh[row] = [*guessed[: self.rng.randrange(WINDOW + 1)], self.rng.randrange(VOCAB)]
        commit(self.table, self.acceptance, fresh)
        self.naive.commit(fresh)

    def tell(self) -> None:
        if not self.pairs():
            return
        seat = self.rng.choice(self.pairs())[0]
        mine = {row: known for row, known in self.naive.rows.items() if seat in known.held}
        for row, known in mine.items():
            if known.held[seat].told < 0:  # by an open, which holds everything so far
                known.held[seat].told = self.table.told[seat, row] = len(known.output)
        rows = self.rng.sample(list(mine), self.rng.randint(0, len(mine)))
        news = [mine[row].output[mine[row].held[seat].told :] for row in rows]
        lengths, tokens = self.table.untold(seat, rows)
        assert lengths.tolist() == list(map(len, news))
        assert tokens.tolist() == [token for new in news for token in new]
        for row in rows:
            mine[row].held[seat].told = len(mine[row].output)

    def check(self) -> None:
        table, naive = self.table, self.naive
        assert np.flatnonzero(table.generation).tolist() == sorted(naive.rows) and len(table) == len(naive.rows)
        assert sorted(map(tuple, np.argwhere(table.assigned).tolist())) == sorted(self.pairs())
        for row, known in naive.rows.items():
            assert table.generation[row] == known.generation
            assert table.output[row, : table.committed[row]].tolist() == known.output
            for seat, held in known.held.items():
                tail = tuple(table.tail[seat, row, : table.length[seat, row]].tolist())
                assert Held(tail, table.base[seat, row], table.told[seat, row]) == held
            for method in range(METHODS):
                for place, name in enumerate(EVIDENCE):
                    assert table.evidence[place, method, row] == known.evidence[method][name]
        for (method, bucket), counts in naive.overall.items():
            for name, count in counts.items():
                assert self.acceptance.evidence[EVIDENCE.index(name), method, bucket] == count


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_said_the_table_is_that_of_the_rules(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(300):
        pair.act()
        pair.check()
    assert len(pair.fates) == 6 and pair.naive.overall, "it does not try everything"


def test_growth_keeps_everything() -> None:
    table, rng = RequestTable(WINDOW), np.random.default_rng(0)
    for number in range(32):
        table.open(request(str(number), [1]))
    arrays = {name: array for name, array in vars(table).items() if isinstance(array, np.ndarray)}
    for array in arrays.values():
        array[...] = rng.integers(0, 2 if array.dtype == np.bool_ else 100, array.shape)
    table.committed[:] = 200
    before = {name: array.copy() for name, array in arrays.items()}
    table.fit_seats(3)
    new = table.open(request("new", range(1000)))
    assert new == 32 and len(table) == 33 and len(table.method) == 4
    assert table.output[new, : table.committed[new]].tolist() == list(range(1000))
    for name, array in before.items():
        now = getattr(table, name)
        assert now.ndim == array.ndim and now.dtype == array.dtype
        assert np.array_equal(now[tuple(slice(size) for size in array.shape)], array), name
    table.assign(3, new)
    say(table, 3, new, 1, 2)
    assert table.length[3, new] == 2


def test_a_row_that_is_used_again_knows_nothing_of_the_request_before() -> None:
    table, acceptance = RequestTable(WINDOW), Acceptance()
    table.clear_seat(0, 1)
    row = table.open(request("old", [5]))
    table.assign(0, row)
    old = Claim(row, int(table.generation[row]), 1, (6, 7))
    table.take(0, batch([old]))
    commit(table, acceptance, {row: [6]}, {row: (0, 2, 1)})
    assert table.steps[row] == 1 and table.drafts[:, 1, row].tolist() == [2, 1]
    table.begun[row] = True
    table.close(row)
    assert not table.begun[row]
    assert table.open(request("new", [5], max_tokens=9)) == row and table.requests[row].request_id == "new"  # type: ignore[union-attr]
    assert table.take(0, batch([old])).all()
    assert not table.assigned[:, row].any() and table.limit[row] == 9
    assert not table.begun[row]
    for array in (table.steps, *table.evidence[:, 1], *table.drafts[:, 1]):
        assert array[row] == 0
    table.assign(0, row)
    assert table.take(0, batch([old])).all(), "the handle is another one"
    assert table.base[0, row] == -1


def test_a_seat_that_is_taken_again_knows_nothing_of_the_drafter_before() -> None:
    table = RequestTable(WINDOW)
    table.fit_seats(2)
    rows = [table.open(request(name)) for name in "ab"]
    for seat, row in enumerate(rows):
        table.assign(seat, row)
        say(table, seat, row, 1, 2)
    table.clear_seat(0, 3)
    assert table.method[0] == 3
    for array in (table.assigned, table.length):
        assert not array[0].any() and array[1, rows[1]]


def test_steps_are_counted_by_row() -> None:
    """Steps, and draft tokens verified and right by method, also where their drafter has left."""
    table, acceptance = RequestTable(WINDOW), Acceptance()
    a, b, c = (table.open(request(name)) for name in "abc")
    for seat in (0, 1):
        table.clear_seat(seat, seat)
        for row in (a, b, c):
            table.assign(seat, row)
    say(table, 1, a, 1, 2, 3, 4)
    say(table, 0, b, 1, 2, 3)
    commit(table, acceptance, {a: [1, 9], b: [1, 2, 3], c: [5]}, {a: (1, 4, 1), b: (0, 2, 2)})
    say(table, 0, a, 7)
    commit(table, acceptance, {a: [8]}, {a: (0, 0, 0)})
    table.clear_seat(1, 0)
    assert table.steps[[a, b, c]].tolist() == [2, 1, 1]
    assert table.drafts[0, :2][:, [a, b, c]].tolist() == [[0, 2, 0], [4, 0, 0]]
    assert table.drafts[1, :2][:, [a, b, c]].tolist() == [[0, 2, 0], [1, 0, 0]]


def test_ranges_of_positions() -> None:
    starts = [0, 63, 64, 127, 128, 4095, 4096, 1 << 20]
    assert bucket_of(np.array(starts)).tolist() == [0, 0, 1, 1, 2, 6, 7, 7]
