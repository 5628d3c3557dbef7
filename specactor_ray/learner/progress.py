"""How far a trainer rank has come: its sign of life."""

from __future__ import annotations


class Progress:
    """Counts finished pieces of work: micro-batches, optimizer steps, buckets, files.

    One thread counts; others may read. A count that stands still while work is under way means that the rank hangs.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        """One more piece is done."""
        self.count += 1
