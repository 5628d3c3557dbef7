"""The table of requests against a plain dictionary model, whatever drafters say in whatever order."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest

from specactor_ray.table import table as tables
from specactor_ray.table._kernels import REFUTED
from specactor_ray.table.requests import COUNTS
from specactor_ray.table.table import RequestTable
from specactor_ray.verify.acceptance import Acceptance
from tests.unit.verify.tables import Claim, batch, commit, request, say

WINDOW, BRANCHES, VOCAB, METHODS = 4, 2, 3, 3
USUAL = {"unknown", "ahead", "stale", "kept", "empty", "used up", "refuted", "one too many"}
"""What becomes of claims, and often enough."""


@dataclass
class Held:
    """What is known of a (drafter, request)."""

    tails: list[tuple[int, ...]] = field(default_factory=list)
    base: int = -1
    sent: int = -1


@dataclass
class Known:
    """What is known of a request."""

    generation: int
    output: list[int]
    held: dict[int, Held] = field(default_factory=dict)
    evidence: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 4))


def remember(evidence: list[float], right: int, tried: int, memory: float) -> bool:
    """Add to hits and tries, and to the newest ones, which replace the former where they differ beyond chance."""
    for at, most in ((0, memory), (2, max(memory / 16, tried))):
        keep = max(0.0, 1.0 - tried / most)
        evidence[at : at + 2] = keep * evidence[at] + right, keep * evidence[at + 1] + tried
    hits, tries, right_now, now = evidence
    rate = (hits + 0.5) / (tries + 1.0)
    variance = now * rate * (1.0 - rate) / (2.0 - min(16 * tried / memory, 1.0))
    changed = (right_now - now * rate) ** 2 > 13.0 * variance
    if changed:
        evidence[:2] = evidence[2:]
    return changed


def agrees(tail: Sequence[int], new: Sequence[int]) -> bool:
    """Whether no token contradicts what became final in its place."""
    return all(one == other for one, other in zip(tail, new, strict=False))


class Naive:
    """The table's rules on lists."""

    def __init__(self) -> None:
        self.rows: dict[int, Known] = {}
        self.method: dict[int, int] = {}
        self.overall: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.steps, self.changed_at = 0, Counter[int]()
        self.ranges: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((2, 8)))
        self.outcomes = Counter[str]()

    def take(self, seat: int, claims: Sequence[Claim]) -> list[str]:
        """What becomes of the claims of one message."""
        fates = list[str]()
        for _, tails in itertools.groupby(claims, lambda claim: claim.row):
            kept = 0
            for number, claim in enumerate(tails):
                fates.append(self.keep(seat, claim, kept, number == 0))
                kept = BRANCHES + 1 if fates[-1] == "shorter" else kept + (fates[-1] == "kept")
        return fates

    def keep(self, seat: int, claim: Claim, kept: int, is_first: bool) -> str:
        """What becomes of a claim, after `kept` others of its request in the message."""
        known = self.rows.get(claim.row)
        if known is None or known.generation != claim.generation or seat not in known.held:
            return "unknown"
        held, past = known.held[seat], known.output[claim.base :]
        if claim.base > len(known.output):
            return "ahead"
        if claim.base < held.base:
            return "stale"
        if kept > BRANCHES:
            return "one too many"
        is_right = agrees(claim.tokens, past)
        self.outcomes["refuted"] += is_first and not is_right
        tail = claim.tokens[len(past) :][:WINDOW] if is_right else ()
        if not tail and (past or kept):
            return "used up" if is_right else "refuted"
        if not kept:
            if claim.base == held.base and held.tails and len(tail) < len(held.tails[0]):
                return "shorter"
            self.outcomes["rescued"] += not is_first
            held.base, held.tails = claim.base, []
        held.tails += [tail] * bool(tail)
        return "kept" if tail else "empty"

    def commit(self, fresh: dict[int, list[int]]) -> None:
        sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((2, 8), int))
        tried_for: dict[int, set[int]] = defaultdict(set)
        for row, tokens in fresh.items():
            known = self.rows[row]
            bucket = max(0, len(known.output).bit_length() - 6)
            known.output = known.output + tokens
            for seat, held in sorted(known.held.items(), key=lambda item: item[0]):
                if not held.tails:
                    continue
                pairs = list(zip(held.tails[0], tokens, strict=False))
                right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                method, tried = self.method[seat], min(right + 1, len(pairs))
                remember(known.evidence[method], right, tried, 64.0)
                sums[method][:, bucket] += right, tried
                tried_for[method].add(row)
                left = [tail[len(tokens) :] if agrees(tail, tokens) else () for tail in held.tails]
                self.outcomes["refuted"] += right < len(pairs)
                self.outcomes["rescued"] += not left[0] and any(left)
                held.tails = [tail for tail in left if tail]
        self.steps += 1
        for method, added in sums.items():
            right, tried = map(int, added.sum(axis=1))
            changed = remember(self.overall[method], right, tried, 256.0)
            self.changed_at[method] = self.steps if changed else self.changed_at[method]
            keep = np.zeros(8) if changed else (1.0 - added[1] / 256.0).clip(0.0)
            self.ranges[method] = keep * self.ranges[method] + added
            rest = 0.0 if changed else max(0.0, 1.0 - tried / len(tried_for[method]) / 64.0)
            for row in fresh:
                if changed or row not in tried_for[method]:
                    self.rows[row].evidence[method] = [rest * one for one in self.rows[row].evidence[method]]


class Pair:
    """A table and the naive one, driven alike at random and compared after every action."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table, self.acceptance, self.naive = RequestTable(WINDOW, BRANCHES), Acceptance(), Naive()
        self.said: dict[int, list[list[Claim]]] = defaultdict(list)
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

    def claims(self, seat: int) -> list[Claim]:
        """Tails of one request."""
        rng = self.rng
        mine = [row for row, known in self.naive.rows.items() if seat in known.held]
        row = rng.choice(mine) if mine and rng.random() < 0.9 else rng.randrange(-1, 140)
        known = self.naive.rows.get(row, Known(7, [0, 1]))
        base = max(0, len(known.output) - rng.choice([-1, 0, 0, 0, 0, 1, 2, 5]))
        generation = known.generation + (rng.random() < 0.05)
        return [
            Claim(row, generation, max(0, base - (rng.random() < 0.05)), tuple(self.guess(known.output[base:])))
            for _ in range(rng.randint(1, 2 * BRANCHES + 2))
        ]

    def guess(self, past: list[int]) -> list[int]:
        tokens = past + [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(WINDOW + 3))]
        if tokens and self.rng.random() < 0.2:
            tokens[self.rng.randrange(len(tokens))] = self.rng.randrange(VOCAB)
        return tokens[: self.rng.randrange(12)]

    def take(self) -> None:
        if not self.naive.method:
            return
        seat = self.rng.choice([*self.naive.method, *(one for one, _ in self.pairs())])
        self.said[seat] += [self.claims(seat) for _ in range(self.rng.randrange(5))]
        # Lost, repeated, late, and in any order.
        recent = self.said[seat][-12:]
        claims = list(itertools.chain(*self.rng.sample(recent, self.rng.randint(0, min(6, len(recent))))))
        fates = self.naive.take(seat, claims)
        assert self.table.take(seat, batch(claims)).tolist() == [fate == "unknown" for fate in fates]
        self.fates.update(fates)

    def commit(self) -> None:
        rows = self.rng.sample(list(self.naive.rows), self.rng.randint(0, len(self.naive.rows)))
        if not rows:
            return
        fresh = {}
        for row in rows:
            held = self.naive.rows[row].held.values()
            guesses = [tail for one in held for tail in one.tails]
            guessed = list(self.rng.choice(guesses)) if guesses else []
            fresh[row] = [*guessed[: self.rng.randrange(WINDOW + 1)], self.rng.randrange(VOCAB)]
        commit(self.table, self.acceptance, fresh)
        self.naive.commit(fresh)

    def tell(self) -> None:
        if not self.pairs():
            return
        seat = self.rng.choice(self.pairs())[0]
        mine = {row: known for row, known in self.naive.rows.items() if seat in known.held}
        for row, known in mine.items():
            if known.held[seat].sent < 0:  # by an open, which holds everything so far
                known.held[seat].sent = self.table.sent[seat, row] = len(known.output)
        rows = self.rng.sample(list(mine), self.rng.randint(0, len(mine)))
        news = [mine[row].output[mine[row].held[seat].sent :] for row in rows]
        lengths, tokens = self.table.unsent(seat, rows)
        assert lengths.tolist() == list(map(len, news))
        assert tokens.tolist() == [token for new in news for token in new]
        for row in rows:
            mine[row].held[seat].sent = len(mine[row].output)

    def check(self) -> None:
        table, naive = self.table, self.naive
        assert np.flatnonzero(table.generation).tolist() == sorted(naive.rows) and len(table) == len(naive.rows)
        assert sorted(map(tuple, np.argwhere(table.assigned).tolist())) == sorted(self.pairs())
        for row, known in naive.rows.items():
            assert table.generation[row] == known.generation
            assert table.output(row).tolist() == known.output
            for seat, held in known.held.items():
                lengths = table.length[seat, row].tolist()
                pairs = zip(table.tail[seat, row].tolist(), lengths, strict=True)
                assert lengths == [*map(len, held.tails), *[0] * (1 + BRANCHES - len(held.tails))]
                tails = [tuple(tail[:length]) for tail, length in pairs if length]
                assert Held(tails, table.base[seat, row], table.sent[seat, row]) == held
            for method in range(METHODS):
                assert np.allclose(table.evidence[:, method, row], known.evidence[method])
        assert table.counts[REFUTED:].tolist() == [naive.outcomes["refuted"], naive.outcomes["rescued"]]
        for method, counts in naive.overall.items():
            lasts = naive.steps - naive.changed_at[method]
            assert np.allclose(self.acceptance.overall[:, method], [*counts, lasts])
            assert np.allclose(self.acceptance.evidence[:, method], naive.ranges[method])


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_said_the_table_is_that_of_the_rules(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(300):
        pair.act()
        pair.check()
    assert pair.fates >= USUAL and pair.naive.overall, "it does not try everything"
    assert pair.table.lines.shape[1] > 256 and len(pair.table.method) > 2, "it has grown"


def test_every_array_of_rows_grows() -> None:
    table = RequestTable(WINDOW, 2)
    for number in range(len(table.generation) + 1):
        table.open(request(f"r{number}"))
    arrays = {name: array for name, array in vars(table).items() if isinstance(array, np.ndarray)}
    rows = len(table.generation)
    assert {name for name, array in arrays.items() if rows not in array.shape} == {
        "method",
        "judged",
        "counts",
        "reached",
        "eos_token_ids",
    }


def test_a_new_request_inherits_nothing_of_the_last_one_of_its_row() -> None:
    """But for what `open` writes, and what `assign` writes before it is read. Another column belongs into `_RESET`."""
    lists = ((tables._BY_ROW, 0), (tables._BY_SEAT, 1), (tables._BY_METHOD, 2))
    columns = [(name, axis) for names, axis in lists for name in names]
    table = RequestTable(WINDOW, 2)
    row = table.open(request("old"))
    for name, axis in columns:
        np.moveaxis(getattr(table, name), axis, 0)[row] = 77 if name != "prompts" else 1
    table.lengths[row] = 2
    table.close(row)
    assert table.open(request("new")) == row
    left = {name for name, axis in columns if np.moveaxis(getattr(table, name), axis, 0)[row].any()}
    written = {"generation", "prompts", "lengths", "limits", "lines", "minds_eos"}
    assert left == written | {"sent", "base", "streamed", "kept", "tail"}


def test_steps_and_drafts_are_counted() -> None:
    """All of them, and nothing of a request is left for the next one of its row."""
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
    assert dict(zip(COUNTS[:6], table.counts.tolist()[:6], strict=True)) == {
        "row_steps": 4,
        "committed_tokens": 7,
        "supplied_tokens": 8,
        "supplied_row_steps": 3,
        "drafted_tokens": 6,
        "accepted_tokens": 3,
    }
    assert table.reached.tolist() == [[2, 2, 1, 1], [2, 1, 0, 0]]
    table.begun[a] = True
    table.close(a)
    assert table.open(request("new", [5], max_tokens=9)) == a and table.requests[a].request_id == "new"
    assert table.limits[a] == 2 + 9 and not table.begun[a] and not table.assigned[:, a].any()
    assert not table.evidence[..., a].any()
