"""The table of requests against a plain dictionary model, whatever drafters say in whatever order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from specactor_ray.verify._kernels import FREE, REFUTED
from specactor_ray.verify.metrics import COUNTS
from specactor_ray.verify.table import Acceptance, RequestTable
from tests.unit.verify.tables import EVIDENCE, Claim, batch, commit, request, say

WINDOW, BRANCHES, VOCAB, METHODS = 4, 2, 3, 3
OUTCOMES = ("refuted", "rescued on arrival", "rescued at commit")
"""The last of `RequestTable.counts`."""
USUAL = {"unknown", "ahead", "stale", "kept", "truncated", "used up", "refuted", "rescued"}
"""What becomes of claims, and often enough."""
Branch = tuple[int, tuple[int, ...]]


@dataclass
class Held:
    """What is known of a (drafter, request)."""

    tail: tuple[int, ...] = ()
    base: int = -1
    told: int = -1
    branches: tuple[Branch, ...] = ()

    def hold(self, chain: tuple[int, ...], branches: Sequence[Branch], new: Sequence[int]) -> str:
        """Hold a tail and its branches against new tokens: what becomes of it, and the branch that agrees."""
        right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chain, new, strict=False))))
        if right == len(new) < len(chain):
            self.tail = chain[len(new) :]
            self.branches = tuple((at - len(new), tokens) for at, tokens in branches if at >= len(new))
            return "kept"
        others = [chain[:at] + tokens for at, tokens in branches if at == right]
        agreeing = [other[len(new) :] for other in others if list(other[: len(new)]) == list(new)]
        self.tail, self.branches = max(agreeing, key=len, default=()), ()
        refuted = right < min(len(chain), len(new))
        return "rescued" + " refuted" * refuted if self.tail else "refuted" if refuted else "used up"


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
        self.outcomes = Counter[str]()

    def take(self, seat: int, claim: Claim) -> str:
        """What becomes of a claim."""
        known = self.rows.get(claim.row)
        if known is None or known.generation != claim.generation or seat not in known.held:
            return "unknown"
        held, past = known.held[seat], known.output[claim.base :]
        if claim.base > len(known.output):
            return "ahead"
        if claim.base < held.base:
            return "stale"
        new = Held(base=claim.base, told=held.told)
        fate = new.hold(claim.tokens, claim.branches, past)
        self.outcomes["refuted"] += "refuted" in fate
        if past and not new.tail:
            return fate
        if claim.base == held.base and len(new.tail) < len(held.tail):
            return "smaller"
        self.outcomes["rescued on arrival"] += "rescued" in fate
        is_truncated = len(new.tail) > WINDOW
        new.tail = new.tail[:WINDOW]
        new.branches = tuple((at, tokens[:WINDOW]) for at, tokens in new.branches if at <= len(new.tail))[:BRANCHES]
        known.held[seat] = new
        return "truncated" if is_truncated else fate

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
                if held.tail:
                    fate = held.hold(held.tail, held.branches, tokens)
                    self.outcomes["refuted"] += "refuted" in fate
                    self.outcomes["rescued at commit"] += "rescued" in fate


class Pair:
    """A table and the naive one, driven alike at random and compared after every action."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table, self.acceptance, self.naive = RequestTable(WINDOW, BRANCHES), Acceptance(), Naive()
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
        branches = []
        for _ in range(rng.randrange(BRANCHES + 2)):
            at = rng.randint(0, len(tokens))
            other = known.output[base + at :] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, WINDOW + 1))]
            if rng.random() < 0.3:
                other[rng.randrange(len(other))] = rng.randrange(VOCAB)
            branches.append((at, tuple(other[: rng.randint(1, 12)])))
        return Claim(row, known.generation + (rng.random() < 0.05), base, tuple(tokens), tuple(branches))

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
            held = self.naive.rows[row].held.values()
            guesses = [one.tail for one in held]
            guesses += [one.tail[:at] + tokens for one in held for at, tokens in one.branches]
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
                tail, *branches = self.chains(seat, row)
                assert Held(tail, table.base[seat, row], table.told[seat, row], tuple(branches)) == held
            for method in range(METHODS):
                for place, name in enumerate(EVIDENCE):
                    assert table.evidence[place, method, row] == known.evidence[method][name]
        assert table.counts[REFUTED:].tolist() == [naive.outcomes[name] for name in OUTCOMES]
        for (method, bucket), counts in naive.overall.items():
            for name, count in counts.items():
                assert self.acceptance.evidence[EVIDENCE.index(name), method, bucket] == count

    def chains(self, seat: int, row: int) -> list[Any]:
        """The tail that is there, then its branches, as of `Claim`."""
        table, size = self.table, int(self.table.length[seat, row])
        chains: list[Any] = [tuple(table.tail[seat, row, :size].tolist())]
        for b in np.flatnonzero(table.branch_at[seat, row] != FREE).tolist() if size else ():
            tokens = table.branch_tail[seat, row, b, : table.branch_length[seat, row, b]]
            chains.append((int(table.branch_at[seat, row, b]), tuple(tokens.tolist())))
        return chains


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_said_the_table_is_that_of_the_rules(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(300):
        pair.act()
        pair.check()
    assert pair.fates >= USUAL and pair.naive.overall, "it does not try everything"
    assert pair.table.output.shape[1] > 256 and len(pair.table.method) > 2, "it has grown"


def test_every_array_of_rows_grows() -> None:
    table = RequestTable(WINDOW, 2)
    for number in range(len(table.generation) + 1):
        table.open(request(f"r{number}"))
    arrays = {name: array for name, array in vars(table).items() if isinstance(array, np.ndarray)}
    rows = len(table.generation)
    assert {name for name, array in arrays.items() if rows not in array.shape} == {"method", "counts", "reached"}


def test_steps_are_counted_by_row() -> None:
    """Steps, and draft tokens verified and right by method, also where their drafter has left; not in the next request
    of the row."""
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
    assert dict(zip(COUNTS[:6], table.counts.tolist()[:6], strict=True)) == {
        "row_steps": 4,
        "committed_tokens": 7,
        "supplied_tokens": 8,
        "supplied_row_steps": 3,
        "drafted_tokens": 6,
        "accepted_tokens": 3,
    }
    assert table.reached.tolist() == [[2, 2, 1, 1], [2, 1, 0, 0]]
    assert table.drafts[0, :2][:, [a, b, c]].tolist() == [[0, 2, 0], [4, 0, 0]]
    assert table.drafts[1, :2][:, [a, b, c]].tolist() == [[0, 2, 0], [1, 0, 0]]
    table.begun[a] = True
    table.close(a)
    assert table.open(request("new", [5], max_tokens=9)) == a and table.requests[a].request_id == "new"
    assert table.limit[a] == 9 and not table.begun[a] and not table.assigned[:, a].any()
    assert not any(array[..., a].any() for array in (table.steps, table.evidence, table.drafts))
