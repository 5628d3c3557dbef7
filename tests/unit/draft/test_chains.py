"""Mirrors of requests, and branches: chains are what the candidates say, rows of the cache what the chains say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.core.ragged import common_prefix
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft._kernels import chance
from specactor_ray.draft.chains import FREE, MAIN, RANKS, UNKNOWN, BranchTable, Chains, MirrorTable
from specactor_ray.draft.proposer import packed

# ---- mirrors ----

TRUTH = [5, 3, 5, 5, 2, 3, 5, 1, 5, 3, 2, 2, 5, 4, 1, 3]
PROMPT = (9, 9)


def mirror(committed: int = 0, tail: list[int] | None = None, window: int = 4) -> MirrorTable:
    """A table with one request in slot 2."""
    table = MirrorTable()
    table.open(2, PROMPT, TRUTH[:committed], SamplingParams(), window)
    table.lengthen(2, tail or [])
    return table


def commit(table: MirrorTable, start: int, tokens: list[int]) -> tuple[int, int]:
    """Up to which output token the line is what it was (below 0: the commit does not fit), and new tokens."""
    same, fresh = table.commit(*packed([(2, start, tokens)]))
    return int(same[0]) - len(PROMPT), int(fresh[0])


def tail(table: MirrorTable) -> tuple[int, list[int]]:
    return len(table.committed(2)), table.lines[2, table.known[2] : table.ends[2]].tolist()


@pytest.mark.parametrize(
    ("drafts", "committed", "judged"),
    [
        (TRUTH[:4], 2, [2, 2]),  # the others wait for the next commit
        (TRUTH[:2], 4, [2, 2]),
        ([TRUTH[0], 99, TRUTH[2]], 3, [2, 1]),  # what follows a wrong one is not counted
        ([99], 3, [1, 0]),
        ([], 3, [0, 0]),
    ],
)
def test_drafts_that_commits_decide_on_are_counted_once(drafts: list[int], committed: int, judged: list[int]) -> None:
    m = mirror(0, drafts)
    commit(m, 0, TRUTH[:committed])
    assert m.judged.tolist() == judged
    commit(m, 0, TRUTH[:committed])
    commit(m, committed + 1, [1])
    commit(m, 0, [98, *TRUTH[1:committed]])
    assert m.judged.tolist() == judged, "repeated, early and contradicting ones decide on nothing"


def test_a_slot_that_is_not_open_takes_nothing() -> None:
    m = mirror(4)
    same, fresh = m.commit(*packed([(slot, 0, [1]) for slot in (0, 1, 3, 10**6, -1)]))
    assert same.tolist() == [-1] * 5 and not fresh.any()
    assert commit(m, 2**31 - 2, [1])[0] < 0 and m.lines.size < 100, "one far beyond takes no memory"
    m.close(2)
    assert commit(m, 4, [1])[0] < 0 and not m.is_open(2) and not m.is_open(10**6)


def test_several_commits_of_one_slot_are_taken_in_turn() -> None:
    m = mirror()
    same, fresh = m.commit(*packed([(2, 0, TRUTH[:2]), (2, 2, TRUTH[2:4]), (2, 5, [1])]))
    assert fresh.tolist() == [2, 2, 0] and same.tolist() == [2, 4, -1]
    assert m.committed(2).tolist() == TRUTH[:4]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_ids_that_do_not_fit_are_refused_and_none_becomes_another_one(dtype: Any) -> None:
    m = mirror()
    with pytest.raises(ValueError, match="guesses are token ids, not 2147483653"):
        m.lengthen(2, np.array([1, 2**31 + 5], dtype))
    assert tail(m)[1] == []


pieces = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.lists(st.integers(1, 5), max_size=6)))


@given(pieces)
def test_any_order_of_pieces_of_the_truth_keeps_a_prefix_of_it(sequence: list[tuple[int, int, list[int]]]) -> None:
    m = mirror(window=6)
    for start, end, guess in sequence:
        m.ends[2] = m.known[2]
        m.lengthen(2, guess)
        before, _ = tail(m)
        same, advanced = commit(m, start, TRUTH[start:end])
        reach = max(before, min(max(start, end), len(TRUTH)))
        assert (same >= 0) == (start <= before)
        base, left = tail(m)
        assert base == (reach if same >= 0 else before)
        assert m.prompt(2).tolist() == list(PROMPT) and m.committed(2).tolist() == TRUTH[:base]
        fresh = TRUTH[before:base]
        assert advanced == len(fresh)
        agrees = guess[: len(fresh)] == fresh[: len(guess)]
        assert left == (guess[len(fresh) :] if agrees else [])
        if same >= 0:
            assert same == before + (len(guess) if agrees else common_prefix(guess, fresh))


# ---- branches ----

VOCABULARY = 12
SHARES = (0.55, 0.4, 0.25, 0.2, 0.2)
"""Chance of each candidate to be right where those before it are wrong."""


class Drafting:
    """A drafter of `slots` requests whose candidates are a function of the context."""

    def __init__(self, slots: int, most: int, window: int, seed: int) -> None:
        self.rng, self.seed, self.slots = random.Random(seed), seed, np.arange(slots, dtype=np.int32)
        self.mirrors = MirrorTable()
        self.table = BranchTable(self.mirrors, most)
        self.judged, self.rows = [0, 0], np.zeros(slots, np.int64)
        self.truth = [[self.rng.randrange(VOCABULARY) for _ in range(400)] for _ in range(slots)]
        for slot in range(slots):
            self.mirrors.open(slot, PROMPT, (), SamplingParams(max_tokens=300), window)
            assert not len(self.table.fit(len(self.mirrors.known), window))

    def candidates(self, slot: int, line: Sequence[int]) -> list[int]:
        """The candidates after these tokens: the true one is more often among them where all of them are right."""
        at, rng = len(line) - len(PROMPT), random.Random(f"{self.seed} {slot} {list(line)}")
        found, truth = rng.sample(range(VOCABULARY), 1 + RANKS), self.truth[slot]
        if list(line[len(PROMPT) :]) == truth[:at]:
            found = [token for token in found if token != truth[at]]
            rank = next((n for n, share in enumerate(SHARES) if rng.random() < share), None)
            found = found[:RANKS] if rank is None else [*found[:rank], truth[at], *found[rank:]]
        return (found + [-1] * RANKS)[: 1 + RANKS]

    def line(self, slot: int, number: int) -> list[int]:
        """The tokens of a chain, prompt included."""
        line = self.mirrors.lines[slot, : self.mirrors.ends[slot]].tolist()
        if number == MAIN:
            return line
        at, size = int(self.table.ats[slot, number]), int(self.table.lengths[slot, number])
        return line[:at] + self.table.tokens[slot, number, :size].tolist()

    def plan(self, budget: int, forward_s: np.ndarray = UNKNOWN) -> Chains:
        ahead = self.mirrors.known >= 0
        slots = ~ahead, ahead, np.ones(len(ahead), np.int64)
        return self.table.plan(self.mirrors.ends, *slots, budget, forward_s=forward_s)

    def extend(self, budget: int) -> None:
        chains = self.plan(budget)
        pairs = zip(chains.slots.tolist(), chains.numbers.tolist(), strict=True)
        tokens = [self.candidates(slot, self.line(slot, number)) for slot, number in pairs]
        drafted = np.array(tokens, np.int32).reshape(-1, 1 + RANKS)
        self.table.append(self.mirrors.ends, chains, drafted, np.zeros(len(tokens), np.int32))

    def commit(self, count: int) -> None:
        """Commit so many further tokens of the true output of each slot."""
        mirrors, commits = self.mirrors, list[tuple[int, int, list[int]]]()
        for slot in self.slots.tolist():
            known, end = int(mirrors.known[slot]), int(mirrors.ends[slot])
            first, tested = known - len(PROMPT), min(end - known, count)
            pairs = zip(mirrors.lines[slot, known:end].tolist(), self.truth[slot][first : first + tested], strict=False)
            right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.judged = [self.judged[0] + min(right + 1, tested), self.judged[1] + right]
            start = max(first - self.rng.randint(0, 2), 0)
            commits.append((slot, start, self.truth[slot][start : first + count]))
        arrays = packed(commits)
        self.table.settle(self.rows, *arrays)
        same, _ = mirrors.commit(*arrays)
        assert (same >= 0).all()
        assert mirrors.judged.tolist() == self.judged, "a main chain that a branch replaced was wrong"


def planned() -> tuple[Drafting, dict[tuple[int, int, int], float]]:
    """Chains by the chance that their next token is needed: (slot, where it begins, candidate)."""
    drafting = Drafting(slots=3, most=16, window=8, seed=5)
    for _ in range(3):
        drafting.extend(0)
    table, mirrors = drafting.table, drafting.mirrors
    table.gaps[:] = np.random.default_rng(0).integers(0, 8, table.gaps.shape)
    worth: dict[tuple[int, int, int], float] = {}
    for slot in range(3):
        alive = 1.0
        for at in range(int(mirrors.known[slot]), int(mirrors.ends[slot])):
            spot = at % table.opened.shape[1]
            gap = int(table.gaps[slot, MAIN, spot])
            wrong = alive * (1.0 - chance(table.evidence, gap, 0))
            for rank in range(RANKS):
                if table.others[slot, MAIN, spot, rank] >= 0:
                    worth[slot, at, rank] = wrong * chance(table.evidence, gap, rank + 1)
                wrong *= 1.0 - chance(table.evidence, gap, rank + 1)
            alive *= chance(table.evidence, gap, 0)
        worth[slot, FREE, MAIN] = alive
    return drafting, worth


@pytest.mark.parametrize("budget", [3, 7, 99])
def test_the_likeliest_chains_are_drafted(budget: int) -> None:
    """Against all chains by their worth, one by one."""
    drafting, worth = planned()
    table = drafting.table
    best = sorted(worth, key=lambda key: -worth[key])[:budget]
    chains = drafting.plan(budget)
    slots, numbers, begins, counts = chains
    ranks = np.where(numbers == MAIN, MAIN, table.ranks[slots, numbers] - 1)
    found = set(zip(slots.tolist(), begins.tolist(), ranks.tolist(), strict=True))
    assert found == set(best) and len(chains.slots) == min(budget, len(worth))
    assert (np.diff((numbers != MAIN).astype(int)) >= 0).all(), "main chains come first"
    assert (counts == 1).all()


@pytest.mark.parametrize("budget", [0, 2, 3, 5, 99])
def test_those_that_read_come_between_main_chains_and_branches(budget: int) -> None:
    """They are taken in any case, the fewer tokens to read the earlier; what they leave of the budget is for others."""
    drafting = Drafting(slots=4, most=8, window=8, seed=5)
    for _ in range(3):
        drafting.extend(0)
    table, mirrors = drafting.table, drafting.mirrors
    reading, backlogs = np.array([True, False, True, False]), np.array([7, 1, 3, 1])
    slots, numbers, begins, counts = table.plan(mirrors.ends, reading, ~reading, backlogs, budget)
    mains = slots[numbers == MAIN]
    assert mains[-2:].tolist() == [2, 0] and set(mains[:-2].tolist()) <= {1, 3}
    assert counts[len(mains) - 2 : len(mains)].tolist() == [3, 7] and counts.sum() == len(counts) + 8
    assert (numbers[: len(mains)] == MAIN).all() and (begins[: len(mains)] == FREE).all()
    assert set(slots[len(mains) :].tolist()) <= {1, 3} and (begins[len(mains) :] != FREE).all()
    assert len(slots) == max(budget, 4) or budget == 99
    full = table.plan(mirrors.limits, reading, ~reading, backlogs, budget)
    assert MAIN not in full.numbers.tolist(), "no main chain has room"


@pytest.mark.parametrize("budget", [8, 99])
@pytest.mark.parametrize("row_s", [0.0, 0.01, 0.05, 0.2, 1.0])
def test_as_many_chains_as_bring_most_needed_tokens_per_second(row_s: float, budget: int) -> None:
    """Against all numbers of chains; never fewer than main chains, nor more than the budget."""
    drafting, worth = planned()
    forward_s = 0.2 + row_s * np.arange(100)
    rates = np.cumsum(sorted(worth.values(), reverse=True)) / forward_s[1 : len(worth) + 1]
    chains = drafting.plan(budget, forward_s)
    assert len(chains.slots) == max(3, int(rates[:budget].argmax()) + 1)


def test_chances_are_learned_by_the_gap() -> None:
    drafting = Drafting(slots=8, most=4, window=4, seed=1)
    for _ in range(90):
        for _ in range(3):
            drafting.extend(24)
        drafting.commit(2)
    learned = [chance(drafting.table.evidence, 0, rank) for rank in range(1 + RANKS)]
    assert abs(learned[0] - SHARES[0]) < 0.08 and learned[1:] == pytest.approx(SHARES[1:], abs=0.12)
    assert chance(drafting.table.evidence, 7, 0) == pytest.approx(0.95)


def test_a_larger_window_ends_all_branches() -> None:
    table = BranchTable(MirrorTable(), 2)
    assert not len(table.fit(1, 3))
    table.ats[0, 1], table.rows[0, 1] = 4, 77
    assert table.fit(2, 9).tolist() == [77] and (table.ats == FREE).all() and table.tokens.shape == (2, 2, 16)
