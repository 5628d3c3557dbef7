"""Threads of forwards on CPUs: PyTorch's OpenMP pool, as many threads as there are cores that no other process uses.

Compiled functions use the same pool, since a second one would compete with it.

A forward ends with its slowest thread. On a core that another process uses for a share f of the time, a thread takes
1 / (1 - f) as long, and so does the whole forward; worse, threads that spin between operations and the other process
compete for the core. Results do not depend on the number of threads (see `models/__init__.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import torch

from specactor_ray.core.jit import CFunction

_PERIOD_S = 0.5
"""Seconds over which the use of the cores is averaged; the kernel counts it in ticks of 10 ms."""
_FADE = 0.8
"""Share of a load that is expected a period later: a thread too many costs more than a thread too few."""


def threads_that_pay(cores: int, foreign: float) -> int:
    """Number of threads of the fastest forward when other processes occupy `foreign` of `cores` cores: they fill whole
    cores, and their rest is on one core, which is used if its gain exceeds the delay of the others."""
    free = min(max(cores - foreign, 0.0), float(cores))
    whole = math.floor(free)
    shared = free - whole
    return max(whole + 1 if (whole + 1) * shared > whole else whole, 1)


class ThreadCount:
    """Sets the number of torch threads of the calling thread before each forward, at most one for each of `cores`."""

    def __init__(self, cores: Collection[int]) -> None:
        self._cores = frozenset(cores)
        self.threads = len(self._cores)
        self._last = self.read()
        self._foreign = 0.0
        """Load of other processes, in cores."""

    def apply(self) -> None:
        """Set the number of threads that was best over the last period."""
        begin, busy, own = self._last
        if time.monotonic() - begin >= _PERIOD_S:
            self._last = now, busy_now, own_now = self.read()
            foreign = (busy_now - busy - (own_now - own)) / (now - begin)
            self._foreign = max(foreign, _FADE * self._foreign)
            self.threads = threads_that_pay(len(self._cores), self._foreign)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def read(self) -> tuple[float, float, float]:
        """The time, seconds that all processes have spent on the cores so far, and seconds of this one."""
        return time.monotonic(), read_busy_s(self._cores), time.process_time()


@functools.cache
def thread_count() -> ThreadCount | None:
    """The `ThreadCount` of this process; None if it has one thread, no core for each, or the kernel hides their use."""
    cores = os.sched_getaffinity(0)
    if not 1 < torch.get_num_threads() == len(cores):
        return None
    try:
        return ThreadCount(cores)
    except (OSError, AttributeError, IndexError):
        return None


def read_busy_s(cores: Collection[int]) -> float:
    """Seconds that processes, interrupts and the kernel have spent on these cores (Linux).

    Niced processes count only if this one is niced, too, as workers of Ray are by default: else they yield the core.
    """
    niced, times = os.getpriority(os.PRIO_PROCESS, 0) > 0, psutil.cpu_times(percpu=True)
    used = (times[core] for core in cores)
    return float(sum(one.user + niced * one.nice + one.system + one.irq + one.softirq for one in used))


# ---- compiled functions ----

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""Data types that compiled functions read and write → their kind."""

_local = threading.local()


def run(function: CFunction, call: bytes, threads: int = 1) -> None:
    """Run a `c_function` on the same call in every thread of a team; the call's bytes hold the counters of tasks."""
    team = _team() if threads > 1 else None
    if team is None:
        function.call(call)
    else:
        team(function.address, call, threads, 0)


def workspace(size: int) -> int:
    """Address of at least `size` bytes that belong to the calling thread."""
    made: tuple[int, int, torch.Tensor] | None = getattr(_local, "workspace", None)
    if made is None or made[0] < size:
        room = torch.empty(size, dtype=torch.uint8)
        made = _local.workspace = size, room.data_ptr(), room
    return made[1]


@functools.cache
def _team() -> Callable[[int, bytes, int, int], None] | None:
    """`GOMP_parallel` of PyTorch's OpenMP library; None if that is not GNU OpenMP."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"))
        team = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team
