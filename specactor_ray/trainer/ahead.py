"""Rollouts that run ahead of the trainer by a bounded number of weight versions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from specactor_ray.core.clock import SYSTEM, Clock, Thread
from specactor_ray.core.types import SamplingParams

if TYPE_CHECKING:
    from specactor_ray.trainer.experience import Experience
    from specactor_ray.trainer.steps import MakerPart


class AheadMaker:
    """Makes the experience of later steps in a separate thread while the trainer updates.

    The experience of step t begins when the weights have version `t - max_staleness` or a newer one: the steps collect
    the experience of step t at version t.

    Args:
        maker: Makes the experience of one step after the other.
        max_staleness: Largest number of versions to run ahead, at least 1.
        steps: Number of steps of the whole run; no later ones are made.
        clock: Starts the thread.
    """

    def __init__(self, maker: MakerPart, max_staleness: int, steps: int, clock: Clock = SYSTEM) -> None:
        self._maker, self._ahead, self._steps, self._clock = maker, max_staleness, steps, clock
        self._changed = clock.condition()
        self._thread: Thread | None = None
        self._next, self._allowed = 0, -1
        """The step to make next, and the last one that may begin."""
        self._made: dict[int, Experience] = {}
        self._problem: BaseException | None = None

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """The experience of this step; the weights have had as many updates. Re-raises the error of its making."""
        with self._changed:
            self._allowed = min(step + self._ahead, self._steps - 1)
            if self._thread is None:
                self._next = step
                self._thread = self._clock.spawn(partial(self._run, rollout, sampling), "rollouts ahead")
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._made or self._problem is not None)
            if step not in self._made:
                assert self._problem is not None
                raise self._problem
            return self._made.pop(step)

    def close(self) -> None:
        """Begin no further step; the one in progress ends with the rollout."""
        with self._changed:
            self._steps = 0
            self._changed.notify_all()

    def _run(self, rollout: Any, sampling: SamplingParams) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next <= self._allowed or self._next >= self._steps)
                if self._next >= self._steps:
                    return
            try:
                made = self._maker.collect(rollout, sampling, self._next)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that collects it
                with self._changed:
                    self._problem = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._made[self._next] = made
                self._next += 1
                self._changed.notify_all()
