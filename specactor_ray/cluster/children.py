"""The processes that an actor's process started, such as the ranks of a model that is split over several.

They must be asked for while their parent lives: once it is gone, nothing says whose they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from specactor_ray.leftovers import start_ticks


@dataclass(frozen=True, slots=True)
class Child:
    """A process of this machine, told from a later one of the same pid by its start time."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def descendants(pid: int) -> tuple[Child, ...]:
    """The living children of a process of this machine, and theirs, parents first; none when it is gone."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return ()
    aged = ((child.pid, start_ticks(child.pid)) for child in found)
    return tuple(Child(child, ticks) for child, ticks in aged if ticks is not None)
