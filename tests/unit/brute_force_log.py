"""What `TokenLog` promises, by looking at every token. The oracle of the tests of the lookup methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.tails import gumbel_noise

DOUBT = 0.5
VOCABULARY = 8


class Noise(NamedTuple):
    """The target's noise of a request from an output position on."""

    seed: int
    position: int


@dataclass
class Row:
    number: int
    text: int
    token: int
    group: int
    guess: bool


class BruteForceLog:
    """Rows in the order they were written; only the last `capacity` are known."""

    def __init__(self, capacity: int, low: int, high: int) -> None:
        self.capacity, self.low, self.high = capacity, low, high
        self.rows: list[Row] = []

    def append(self, text: int, tokens: Sequence[int], group: int, guess: bool = True) -> None:
        for token in tokens:
            self.rows.append(Row(len(self.rows), text, token, group, guess))

    def alive(self) -> list[Row]:
        return self.rows[-self.capacity :]

    def occurrences(self, context: Sequence[int], group: int | None) -> tuple[int, list[Row]]:
        """(longest match, its rows from the latest on); any group for None."""
        found = []
        for row in reversed(self.alive()):
            if row.guess and group in (None, row.group):
                before = [r.token for r in self.alive() if r.text == row.text and r.number < row.number]
                length = 0
                while (
                    length < min(len(before), len(context), self.high) and before[-1 - length] == context[-1 - length]
                ):
                    length += 1
                found.append((length, row))
        longest = max((length for length, _ in found), default=0)
        return (longest, [row for length, row in found if length == longest]) if longest >= self.low else (0, [])

    def following(self, row: Row) -> Row | None:
        return next((r for r in self.rows[row.number + 1 :] if r.text == row.text), None)

    def draft(
        self,
        context: Sequence[int],
        limit: int,
        group: int | None,
        noise: Noise | None,
        floor: float,
    ) -> tuple[int, list[int], float]:
        """(match length, tokens, score)."""
        length, rows = self.occurrences(context, group)
        tokens: list[int] = []
        score, path = 0.0, 1.0
        while rows and len(tokens) < limit:
            votes: dict[int, int] = {}
            for row in rows:
                votes[row.token] = votes.get(row.token, 0) + 1
            worth = {token: float(count) for token, count in votes.items()}
            if noise is not None:
                g = gumbel_noise(noise.seed, noise.position + len(tokens), VOCABULARY)
                worth = {token: math.log(count) + float(g[token]) for token, count in votes.items()}
            winner = max(worth, key=worth.__getitem__)
            path *= votes[winner] / (len(rows) + DOUBT)
            if path < floor:
                break
            tokens.append(winner)
            score += path
            rows = [n for row in rows if row.token == winner and (n := self.following(row)) is not None]
        return length, tokens, score
