"""Progress of a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from specactor_ray.observability.phase_progress import PhaseProgress


@dataclass(frozen=True, slots=True)
class ProgressState:
    """What there is to show at one moment."""

    done: int = 0
    """Trajectories that ended, the failed ones included."""
    failed: int = 0
    tokens: int = 0
    """Output tokens so far."""
    acceptance_length: float = 0.0
    supply: float = 0.0


class RolloutProgress(PhaseProgress):
    """Shows the state that `read` returns, while the `with` block runs.

    Args:
        console: Where to show it; a bar if it is a terminal, else plain lines.
        title: What runs.
        total: Trajectories in all.
        read: Returns the present state; called from another thread, so it may only read.
        line_interval_s: Seconds between plain lines.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        read: Callable[[], ProgressState],
        line_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def show(progress: PhaseProgress) -> None:
            state = read()
            finished = state.done - state.failed
            counts = f"{finished}/{total} trajectories, {state.tokens:,} tokens"
            progress.update(finished, f"{counts}, {figures(state, progress.seconds)}")

        super().__init__(console, title, total, line_interval_s, clock, show)


def figures(state: ProgressState, seconds: float) -> str:
    """`98.2 tokens/s, acceptance length 1.42, supply 2.10`, and the failures if there are any."""
    parts = [
        f"{state.tokens / max(seconds, 1e-9):.1f} tokens/s",
        f"acceptance length {state.acceptance_length:.2f}",
        f"supply {state.supply:.2f}",
    ]
    if state.failed:
        parts.append(f"{state.failed} failed")
    return ", ".join(parts)
