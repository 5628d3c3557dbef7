"""Progress of a phase and of a rollout: a bar on a terminal, elsewhere lines now and then."""

from __future__ import annotations

import io
import logging
import queue
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.core import progress as progress_module
from specactor_ray.core.console import START_LOG, log_through
from specactor_ray.core.progress import (
    PhaseProgress,
    rollout_progress,
    show_tokens,
    start_phase,
)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test moves."""
    now = [100.0]
    monkeypatch.setattr(progress_module, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("first", "left"), [(0, "0:37"), (500, "0:12")])
def test_lines_tell_rate_and_time_left_the_first_early(seconds: list[float], first: int, left: str) -> None:
    stream = io.StringIO()
    with PhaseProgress(Console(file=stream, width=200), "rollouts", 1000) as progress:
        show = show_tokens(progress)
        show(first)
        for tokens in (first + 20, first + 60, first + 200, first + 260):  # after 1, 3, 10 and 13 s
            seconds[0] = 100.0 + (tokens - first) / 20
            show(tokens)
    early, line, end = stream.getvalue().splitlines()
    assert early.startswith(f"rollouts: {(first + 60) / 10:.0f}%, {first + 60:,} tokens, 20.0 tokens/s, ")
    assert line.endswith(f", {first + 260:,} tokens, 20.0 tokens/s, {left} left")
    assert end == f"rollouts: {(first + 260) / 10:.0f}%, {first + 260:,} tokens, 20.0 tokens/s, ended after 13 s"


def test_time_left_falls_while_a_long_step_runs(seconds: list[float]) -> None:
    stream = io.StringIO()
    with PhaseProgress(Console(file=stream, width=200), "training", 10) as progress:
        for seconds[0] in (100.0, 110.0, 120.0, 130.0, 140.0, 150.0, 300.0):  # two steps in 20 s, then a longer one
            progress.update(min((seconds[0] - 100.0) // 10, 2), "step")
    lines = [line.rpartition(", ")[2] for line in stream.getvalue().splitlines()[:-1]]
    assert lines == ["1:30 left", "1:20 left", "1:10 left", "1:00 left", "0:50 left", "0:00 left"]


@pytest.mark.parametrize(("failed", "words"), [(1, ", 1 failed"), (0, "")])
def test_a_rollout_without_a_terminal(seconds: list[float], failed: int, words: str) -> None:
    out = io.StringIO()
    with rollout_progress(Console(file=out, width=200), "rollout [x]", 8, lambda: (2 + failed, failed, 250, 1.5)):
        seconds[0] = 102.0
    figures = "2/8 trajectories, 250 tokens, 125.0 tokens/s, acceptance length 1.50"
    assert out.getvalue() == f"rollout [x]: 25%, {figures}{words}, ended after 2 s\n"


@pytest.mark.parametrize(("width", "words"), [(60, "100% 8/8 traject"), (80, "10 tokens"), (160, "length 0.00")])
def test_a_rollout_on_a_terminal(width: int, words: str) -> None:
    """A narrow one cuts the figures alone."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    with rollout_progress(console, "round 1: auto", 8, lambda: (8, 0, 10, 0.0)):
        pass
    line = next(line for line in map(plain_text, out.getvalue().splitlines()) if "8/8" in line)
    assert line.startswith("round 1: auto ") and words in line and line.endswith("0:00:00") and len(line) <= width


def plain_text(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).split("\r")[-1].rstrip()


def test_a_state_that_cannot_be_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specactor_ray.core.progress._POLL_S", 0.001)
    reads, twice = list[int](), threading.Event()

    def read() -> tuple[int, int, int, float]:
        reads.append(1)
        if len(reads) == 2:
            twice.set()
        if len(reads) == 1:
            raise RuntimeError("no metrics yet")
        return 8, 0, 0, 0.0

    with rollout_progress(Console(file=io.StringIO()), "rollout", 8, read):
        assert twice.wait(60.0)


def test_a_start_names_its_phases_at_every_log_level() -> None:
    shown: queue.Queue[str] = queue.Queue()
    stream: Any = SimpleNamespace(write=shown.put, flush=lambda: None, isatty=lambda: False)
    before = logging.root.handlers[:], logging.root.level
    log_through(Console(file=stream, width=200), "ERROR")
    try:
        with start_phase("starting Ray", interval_s=0.001):
            assert [shown.get(timeout=60.0) for _ in range(3)] == ["starting Ray\n"] + ["starting Ray, 0 s\n"] * 2
    finally:
        logging.root.handlers, logging.root.level = before
        logging.getLogger(START_LOG).handlers.clear()
        logging.getLogger(START_LOG).propagate = True
