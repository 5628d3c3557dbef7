"""Replicas of requests, and branches: chains are what the candidates say, rows of the cache what the chains say."""

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
from specactor_ray.draft.chains import FREE, MAIN, RANKS, UNKNOWN, BranchTable, Chains
from specactor_ray.table._kernels import UNCHANGED
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView

# ---- replicas ----

TRUTH = [5, 3, 5, 5, 2, 3, 5, 1, 5, 3, 2, 2, 5, 4, 1, 3]
PROMPT = (9, 9)


def replica(committed: int = 0, tail: list[int] | None = None, window: int = 4) -> TableView:
    """A table with one request in row 0."""
    table = RequestTable(window)
    view = TableView(table, 0, window)
    table.open(TargetRequest("r", PROMPT, SamplingParams(), tuple(TRUTH[:committed])))
    view.take_kept(np.zeros(1, np.int32))
    view.write(0, tail or [])
    return view


def follow(view: TableView, *commits: tuple[int, int, list[int]]) -> list[bool]:
    rows, starts, lengths = (
        np.array(one, np.int32) for one in zip(*((*one[:2], len(one[2])) for one in commits), strict=True)
    )
    tokens = np.array([token for _, _, tokens in commits for token in tokens], np.int32)
    return view.table.follow(rows, starts, lengths, tokens).tolist()  # type: ignore[no-any-return]


def commit(view: TableView, start: int, tokens: list[int]) -> tuple[int, int]:
    """Up to which output token the text is what it was (below 0: the commit does not fit), and new tokens."""
    before, end = len(view.output(0)), int(view.ends[0])
    (taken,) = follow(view, (0, start, tokens))
    same = min(int(view.take_kept(np.zeros(1, np.int32))[0]), end)
    return (same if taken else -1) - len(PROMPT), len(view.output(0)) - before


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
    view = replica(0, drafts)
    commit(view, 0, TRUTH[:committed])
    assert view.table.judged[0].tolist() == judged
    commit(view, 0, TRUTH[:committed])
    commit(view, committed + 1, [1])
    commit(view, 0, [98, *TRUTH[1:committed]])
    assert view.table.judged[0].tolist() == judged, "repeated, early and contradicting ones decide on nothing"


def test_a_row_that_is_free_takes_nothing() -> None:
    view = replica(4)
    assert follow(view, *((row, 0, [1]) for row in (1, 3))) == [False, False]
    assert commit(view, 2**31 - 2, [1])[0] < 0 and view.table.lines.shape[1] == 256, "one far beyond takes no memory"
    view.table.close(0)
    assert commit(view, 4, [1])[0] < 0


def test_several_commits_of_one_row_are_taken_in_turn() -> None:
    view = replica()
    assert follow(view, (0, 0, TRUTH[:2]), (0, 2, TRUTH[2:4]), (0, 5, [1])) == [True, True, False]
    assert view.output(0).tolist() == TRUTH[:4]


def test_several_commits_leave_what_all_of_them_left() -> None:
    view = replica(0, TRUTH[:4], window=6)
    follow(view, (0, 0, TRUTH[:2]))
    assert view.tail(0).tolist() == TRUTH[2:4] and view.table.kept[0, 0] == len(PROMPT) + 4
    follow(view, (0, 2, [TRUTH[2], 99, 98]))
    assert view.take_kept(np.zeros(1, np.int32)) == len(PROMPT) + 3 and view.table.kept[0, 0] == UNCHANGED


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_ids_that_do_not_fit_are_refused_and_none_becomes_another_one(dtype: Any) -> None:
    view = replica(0, [5])
    with pytest.raises(ValueError, match="2147483653"):
        view.write(0, np.array([1, 2**31 + 5], dtype))
    for wrong in ([1.5], [[1]], [-1], 5, None, "ab"):
        with pytest.raises((TypeError, ValueError)):
            view.write(0, wrong)  # type: ignore[arg-type]
    assert view.tail(0).tolist() == [5]


def test_a_view_is_for_reading() -> None:
    view = replica(3, [5])
    for array in (view.prompt(0), view.output(0), view.tail(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    view.write(0, [1, 2, 3, 4, 5, 6])
    assert view.tail(0).tolist() == [1, 2, 3, 4] and view.output(0).tolist() == TRUTH[:3]


pieces = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.lists(st.integers(1, 5), max_size=6)))


@given(pieces)
def test_any_order_of_pieces_of_the_truth_keeps_a_prefix_of_it(sequence: list[tuple[int, int, list[int]]]) -> None:
    view = replica(window=6)
    for start, end, guess in sequence:
        view.write(0, guess)
        before = len(view.output(0))
        same, advanced = commit(view, start, TRUTH[start:end])
        reach = max(before, min(max(start, end), len(TRUTH)))
        assert (same >= 0) == (start <= before)
        base, left = len(view.output(0)), view.tail(0).tolist()
        assert base == (reach if same >= 0 else before)
        assert view.prompt(0).tolist() == list(PROMPT) and view.output(0).tolist() == TRUTH[:base]
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
    """A drafter of `count` requests whose candidates are a function of the context."""

    def __init__(self, count: int, most: int, window: int, seed: int) -> None:
        self.rng, self.seed, self.rows = random.Random(seed), seed, np.arange(count, dtype=np.int32)
        self.requests, self.table = RequestTable(window, most), BranchTable(most)
        self.view = TableView(self.requests, 0, window)
        self.tested, self.cache_rows = [0, 0], np.zeros(len(self.requests.lengths), np.int64)
        self.truth = [[self.rng.randrange(VOCABULARY) for _ in range(400)] for _ in range(count)]
        for row in range(count):
            self.requests.open(TargetRequest(f"r{row}", PROMPT, SamplingParams(max_tokens=300)))
        assert not len(self.table.fit(len(self.requests.lengths), window))

    def candidates(self, row: int, line: Sequence[int]) -> list[int]:
        """The candidates after these tokens: the true one is more often among them where all of them are right."""
        at, rng = len(line) - len(PROMPT), random.Random(f"{self.seed} {row} {list(line)}")
        found, truth = rng.sample(range(VOCABULARY), 1 + RANKS), self.truth[row]
        if list(line[len(PROMPT) :]) == truth[:at]:
            found = [token for token in found if token != truth[at]]
            rank = next((n for n, share in enumerate(SHARES) if rng.random() < share), None)
            found = found[:RANKS] if rank is None else [*found[:rank], truth[at], *found[rank:]]
        return (found + [-1] * RANKS)[: 1 + RANKS]

    def line(self, row: int, number: int) -> list[int]:
        """The tokens of a chain, prompt included."""
        line = [*PROMPT, *self.view.output(row).tolist(), *self.view.tail(row).tolist()]
        if number == MAIN:
            return line
        at, size = int(self.table.ats[row, number]), int(self.table.lengths[row, number])
        return line[:at] + self.table.tokens[row, number, :size].tolist()

    def plan(self, budget: int, forward_s: np.ndarray = UNKNOWN) -> Chains:
        ahead = self.requests.generation > 0
        masks = ~ahead & False, ahead, np.ones(len(ahead), np.int64)
        return self.table.plan(self.view, self.view.ends, *masks, budget, forward_s=forward_s)

    def extend(self, budget: int) -> None:
        chains = self.plan(budget)
        pairs = zip(chains.rows.tolist(), chains.numbers.tolist(), strict=True)
        tokens = [self.candidates(row, self.line(row, number)) for row, number in pairs]
        drafted = np.array(tokens, np.int32).reshape(-1, 1 + RANKS)
        self.table.append(self.view, self.view.ends, chains, drafted, np.zeros(len(tokens), np.int32))

    def commit(self, count: int) -> None:
        """Commit so many further tokens of the true output of each row."""
        self.table.publish(self.view, self.rows)
        befores, ends = self.requests.lengths[self.rows], self.view.ends[self.rows]
        self.view.take_kept(self.rows)
        commits = []
        for row in self.rows.tolist():
            first, tail = len(self.view.output(row)), self.view.tail(row).tolist()
            tested = tail[:count]
            pairs = zip(tested, self.truth[row][first:], strict=False)
            right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.tested = [self.tested[0] + min(right + 1, len(tested)), self.tested[1] + right]
            start = max(first - self.rng.randint(0, 2), 0)
            commits.append((row, start, self.truth[row][start : first + count]))
        assert all(follow(self.view, *commits))
        self.table.settle(self.view, self.cache_rows, self.rows, befores, ends)
        assert self.requests.judged[0].tolist() == self.tested, "a main chain that a branch replaced was wrong"


def planned() -> tuple[Drafting, dict[tuple[int, int, int], float]]:
    """Chains by the chance that their next token is needed: (slot, where it begins, candidate)."""
    drafting = Drafting(count=3, most=16, window=8, seed=5)
    for _ in range(3):
        drafting.extend(0)
    table, lengths, ends = drafting.table, drafting.requests.lengths, drafting.view.ends
    table.gaps[:] = np.random.default_rng(0).integers(0, 8, table.gaps.shape)
    worth: dict[tuple[int, int, int], float] = {}
    for slot in range(3):
        alive = 1.0
        for at in range(int(lengths[slot]), int(ends[slot])):
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
    assert found == set(best) and len(chains.rows) == min(budget, len(worth))
    assert (np.diff((numbers != MAIN).astype(int)) >= 0).all(), "main chains come first"
    assert (counts == 1).all()


@pytest.mark.parametrize("budget", [0, 2, 3, 5, 99])
def test_those_that_read_come_between_main_chains_and_branches(budget: int) -> None:
    """They are taken in any case, the fewer tokens to read the earlier; what they leave of the budget is for others."""
    drafting = Drafting(count=4, most=8, window=8, seed=5)
    for _ in range(3):
        drafting.extend(0)
    table, view = drafting.table, drafting.view
    reading, ahead = np.zeros((2, len(drafting.requests.lengths)), np.bool_)
    reading[[0, 2]] = ahead[[1, 3]] = True
    backlogs = np.ones(len(reading), np.int64)
    backlogs[[0, 2]] = 7, 3
    slots, numbers, begins, counts = table.plan(view, view.ends, reading, ahead, backlogs, budget)
    mains = slots[numbers == MAIN]
    assert mains[-2:].tolist() == [2, 0] and set(mains[:-2].tolist()) <= {1, 3}
    assert counts[len(mains) - 2 : len(mains)].tolist() == [3, 7] and counts.sum() == len(counts) + 8
    assert (numbers[: len(mains)] == MAIN).all() and (begins[: len(mains)] == FREE).all()
    assert set(slots[len(mains) :].tolist()) <= {1, 3} and (begins[len(mains) :] != FREE).all()
    assert len(slots) == max(budget, 4) or budget == 99
    full = table.plan(view, view.limits, reading, ahead, backlogs, budget)
    assert MAIN not in full.numbers.tolist(), "no main chain has room"


@pytest.mark.parametrize("budget", [8, 99])
@pytest.mark.parametrize("row_s", [0.0, 0.01, 0.05, 0.2, 1.0])
def test_as_many_chains_as_bring_most_needed_tokens_per_second(row_s: float, budget: int) -> None:
    """Against all numbers of chains; never fewer than main chains, nor more than the budget."""
    drafting, worth = planned()
    forward_s = 0.2 + row_s * np.arange(100)
    rates = np.cumsum(sorted(worth.values(), reverse=True)) / forward_s[1 : len(worth) + 1]
    chains = drafting.plan(budget, forward_s)
    assert len(chains.rows) == max(3, int(rates[:budget].argmax()) + 1)


def test_chances_are_learned_by_the_gap() -> None:
    drafting = Drafting(count=8, most=4, window=4, seed=1)
    for _ in range(90):
        for _ in range(3):
            drafting.extend(24)
        drafting.commit(2)
    learned = [chance(drafting.table.evidence, 0, rank) for rank in range(1 + RANKS)]
    assert abs(learned[0] - SHARES[0]) < 0.08 and learned[1:] == pytest.approx(SHARES[1:], abs=0.12)
    assert chance(drafting.table.evidence, 7, 0) == pytest.approx(0.95)


def test_a_larger_window_ends_all_branches() -> None:
    table = BranchTable(2)
    assert not len(table.fit(1, 3))
    table.ats[0, 1], table.rows[0, 1] = 4, 77
    assert table.fit(2, 9).tolist() == [77] and (table.ats == FREE).all() and table.tokens.shape == (2, 2, 16)
