"""A policy with true figures: the upper bound with which the package's own policy is compared.

It uses the true probability of each guess (not its outcome), the true cost of every step and the length of every
output, and the package's own rules of decision. If all requests arrive at once, it sends the longest first. Decisions
are optimal for each step, not for the whole rollout.
"""

from __future__ import annotations

import numpy as np

from specactor_ray.plan.costs import StepCost
from specactor_ray.simulation.engine import SimulatedEngine
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.world import World
from specactor_ray.verify.table import Acceptance, RequestTable

_POINTS = 33
"""Number of draft positions at which a step's cost is computed; the cost is linear in between."""


class KnownAcceptance(Acceptance):
    """True probabilities, from the world's text."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def probability(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        known = np.zeros((len(self.prior), len(rows)))
        positions = table.committed[rows].tolist()
        for index, (row, position) in enumerate(zip(rows.tolist(), positions, strict=True)):
            seed = table.requests[row].sampling.seed
            for number, method in enumerate(self.methods):
                known[number, index] = self._world.text.probability(method, seed, position)
        return known


class KnownCost(StepCost):
    """True seconds of a step, the package's Python included."""

    is_known = True

    def __init__(self, world: World, engine: SimulatedEngine, clock: VirtualClock) -> None:
        super().__init__()
        self._world, self._engine, self._clock = world, engine, clock

    def curve(self, num_rows: int, most: int) -> np.ndarray:
        process, context = self._clock.process, self._engine.cached_tokens
        at = np.unique(np.linspace(0, most, _POINTS).astype(int))
        forward = [self._world.target.seconds(num_rows, num_rows + int(extra), context) for extra in at]
        python_s = self._world.python.verify_s(process, num_rows, speculates=True)
        return np.interp(np.arange(most + 1), at, np.array(forward) * process.slowness + python_s)
