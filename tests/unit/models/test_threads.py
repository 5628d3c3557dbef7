"""How many threads a forward uses beside other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from specactor_ray.models import threads
from specactor_ray.models.threads import ThreadCount, read_busy_s, threads_that_pay


@pytest.mark.parametrize(
    ("cores", "foreign", "expected"),
    [
        (1, 1.0, 1),
        (2, 0.0, 2),
        (2, 0.3, 2),
        (2, 0.6, 1),  # half a core on two threads is what one thread has alone
        (2, 1.0, 1),
        (2, -0.2, 2),  # clocks that disagree
        (8, 0.05, 8),
        (8, 0.5, 7),
        (8, 3.1, 5),
    ],
)
def test_as_many_threads_as_cores_are_left(cores: int, foreign: float, expected: int) -> None:
    assert threads_that_pay(cores, foreign) == expected


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_a_busy_neighbour_takes_a_thread_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = busy = own = 0.0
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now, process_time=lambda: own))
    monkeypatch.setattr(threads, "read_busy_s", lambda cores: busy)
    count = ThreadCount({0, 1})

    def pass_by(seconds: float, ours: float, theirs: float) -> int:
        nonlocal now, busy, own
        now, own, busy = now + seconds, own + ours, busy + ours + theirs
        count.apply()
        assert torch.get_num_threads() == count.threads
        return count.threads

    assert pass_by(1.0, 2.0, 0.0) == 2
    assert pass_by(0.1, 0.1, 0.1) == 2  # too short to judge by
    assert pass_by(0.9, 0.9, 0.9) == 1
    assert pass_by(1.0, 1.0, 1.0) == 1
    assert [pass_by(1.0, 1.0, 0.1) for _ in range(4)] == [1, 1, 1, 2]  # it may come back


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux")
def test_the_kernel_counts_what_others_do_on_these_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In niced processes, as workers of Ray are."""
    monkeypatch.setattr(os, "getpriority", lambda *_: 15)
    cores, burn = os.sched_getaffinity(0), "import time\nwhile time.process_time() < 0.5: pass"
    before = read_busy_s(cores)
    subprocess.run(["nice", "-n", "15", sys.executable, "-c", burn], check=True, timeout=200)
    assert read_busy_s(cores) - before > 0.3
    assert read_busy_s(()) == 0.0
