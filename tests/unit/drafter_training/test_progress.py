"""Progress of a phase in a file: lines now and then, the rate and the time left, also after a resume."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from specactor_ray.observability.phase_progress import PhaseProgress, show_tokens


@pytest.mark.parametrize(("first", "rate", "left"), [(0, "20.0", "0:40"), (500, "20.0", "0:15")])
def test_lines_tell_rate_and_time_left(first: int, rate: str, left: str) -> None:
    seconds, stream = [100.0], io.StringIO()
    with PhaseProgress(Console(file=stream, width=200), "rollouts", 1000, clock=lambda: seconds[0]) as progress:
        show = show_tokens(progress)
        show(first)
        for tokens in (first + 100, first + 180, first + 200):
            seconds[0] = 100.0 + (tokens - first) / 20
            show(tokens)
    lines = stream.getvalue().splitlines()
    share = (first + 200) / 10
    assert lines == [
        f"rollouts: {share:.0f}%, {first + 200:,} tokens, {rate} tokens/s, {left} left",
        f"rollouts: {share:.0f}%, {first + 200:,} tokens, {rate} tokens/s in 10 s",
    ]


def test_a_phase_that_never_began_says_nothing() -> None:
    stream = io.StringIO()
    with PhaseProgress(Console(file=stream), "rollouts", 0):
        pass
    assert stream.getvalue() == ""
