"""The draft loop on virtual time: a proposer that stays broken."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specactor_ray.draft.loop import DraftLoop
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.proposers import SimulatedProposer
from specactor_ray.simulation.world import World
from tests.batches import news, opening


class Broken(SimulatedProposer):
    """As after an error of the device: no draft step works any more."""

    def extend(self) -> np.ndarray:
        self._clock.work(0.1)
        if self.samplings:
            raise RuntimeError("CUDA error")
        return np.zeros(0, np.int32)


def virtual_loop(proposer: type[SimulatedProposer]) -> tuple[Kernel, VirtualClock, DraftLoop]:
    kernel = Kernel(0)
    clock = VirtualClock(kernel, Process("ngram-0"))
    return kernel, clock, DraftLoop("ngram-0", proposer("ngram-0", "ngram", clock, World(), lambda: 0.0), clock)


def play(kernel: Kernel, clock: VirtualClock, loop: DraftLoop, script: Callable[[], None]) -> bool:
    """Run the loop beside a script. Returns whether the loop had ended by itself when the script did."""
    thread = clock.spawn(loop.run, "draft")
    ended: list[bool] = []

    def run() -> None:
        script()
        ended.append(not thread.is_alive())
        loop.stop()

    clock.spawn(run, "script")
    kernel.run()
    assert not kernel.crashes
    return ended[0]


def test_a_proposer_that_stays_broken_ends_its_loop() -> None:
    kernel, clock, loop = virtual_loop(Broken)

    def open_again_and_again() -> None:
        for number in range(20):
            loop.deliver(news([opening(number)]))
            clock.sleep(1.0)

    assert play(kernel, clock, loop, open_again_and_again)
    assert loop.snapshot()["failures"] == 8
