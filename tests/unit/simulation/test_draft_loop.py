"""The draft loop on virtual time: a proposer that stays broken."""

from __future__ import annotations

import numpy as np

from specactor_ray.draft.loop import DraftLoop
from specactor_ray.simulation.proposers import SimulatedProposer
from specactor_ray.simulation.world import World
from tests.batches import news, opening
from tests.fakes.virtual import Bench
from tests.number_text import HashedText


class Broken(SimulatedProposer):
    """As after an error of the device: no draft step works any more."""

    def extend(self) -> np.ndarray:
        self._clock.work(0.1)
        if self._generations.any():
            raise RuntimeError("CUDA error")
        return np.zeros(0, np.int32)


def test_a_proposer_that_stays_broken_ends_its_loop() -> None:
    bench = Bench()
    loop = DraftLoop("ngram-0", Broken("ngram", bench.clock, World(HashedText())), bench.clock)

    def open_again_and_again() -> bool:
        thread = bench.clock.spawn(loop.run, "draft")
        for number in range(20):
            loop.deliver(news([opening(number)]))
            bench.clock.sleep(1.0)
        return thread.is_alive()

    assert not bench.run(open_again_and_again)
    assert loop.snapshot()["failures"] == 8
