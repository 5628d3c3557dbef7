"""Faults of a simulated run: what may strike, when, and how it ends again.

Swarm testing: each run draws its own subset of the kinds and its own rates from its seed, so that runs differ in what
they are rich in. All faults end when the run's number of them is used up; then the checks of `run.py` are due.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.config.methods import draft_actors
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.simulation.network import Node, VirtualActor
from specactor_ray.transport.messages import TailBatch
from tests.faults.network import LinkFaults

if TYPE_CHECKING:
    from tests.faults.run import Simulation

SCHEDULED = (
    *("kill verifier", "kill drafter", "freeze actor", "freeze controller", "freeze driver", "wedge engine"),
    *("slow actor", "bad links", "partition", "lose node", "late joiners", "corrupt drafts", "malformed messages"),
    *("lose objects", "scale"),
)
OF_TRAINING = ("kill trainer", "freeze trainer")
"""Scheduled too, where there is a trainer."""
BY_ROUND = ("poison", "close early")
"""Switched on for a whole run; they strike at the start of a round."""
EARLY = ("from the start",)
"""Switched on for a whole run: the scheduled ones strike while it starts, too."""
RARE = ("kill controller",)
"""Ends the run; drawn seldom."""
KINDS = (*SCHEDULED, *OF_TRAINING, *BY_ROUND, *EARLY, *RARE)
_HARMLESS_TO_STARTS = ("scale", "freeze driver", "corrupt drafts", "malformed messages", "lose objects")
_DELAYS = ("freeze actor", "freeze controller", "slow actor", "bad links", "partition")
"""Two of them may take longer than a start may."""


@dataclass(frozen=True)
class FaultPlan:
    """Which kinds may strike, and how often."""

    kinds: tuple[str, ...] = ()
    """Empty: a calm run."""
    count: int = 0
    """How many faults are scheduled. Those that bad links inflict on single calls come on top."""
    interval_s: float = 1.0
    """Mean virtual seconds between two of them."""

    @classmethod
    def draw(cls, seed: int, count: int, training: bool = False) -> FaultPlan:
        """The plan of a seed: each kind is on in half of all plans."""
        rng = random.Random(f"plan {seed}")
        possible = (*SCHEDULED, *(OF_TRAINING if training else BY_ROUND))
        kinds = tuple(kind for kind in possible if rng.random() < 0.5) or ("kill verifier",)
        rare = tuple(kind for kind in RARE if rng.random() < 0.05)
        interval_s = 10.0 ** rng.uniform(-1.0, 0.2)
        early = tuple(kind for kind in EARLY if rng.random() < 0.5)
        return cls((*kinds, *early, *rare), count, interval_s)


class Injector:
    """Strikes one simulation according to a plan."""

    def __init__(self, simulation: Simulation, plan: FaultPlan) -> None:
        self.plan = plan
        self.struck: Counter[str] = Counter()
        self.left = plan.count if any(kind not in BY_ROUND + EARLY for kind in plan.kinds) else 0
        """Faults that are still to come."""
        self.last_at = 0.0
        """Virtual time of the last one."""
        self.controller_killed = False
        self._simulation = simulation
        self._kernel, self._network, self._models = simulation.kernel, simulation.network, simulation.models
        self._rng = random.Random(f"faults {simulation.scenario.seed}")
        self._kinds = [kind for kind in plan.kinds if kind in SCHEDULED + OF_TRAINING]
        self._wanted = dict(draft_actors(simulation.config))
        self._nodes = 0
        self._paused, self._scheduled = True, False
        self._before_start, self._lasting = Counter[str](), 0
        """What had struck when the last start began, and how many faults lasted."""
        self._undo: list[Callable[[], None]] = []
        """Ends of faults that last, for `heal`."""
        self._on_actors: dict[str, tuple[str, Callable[[VirtualActor], object]]] = {
            "kill verifier": ("verifier", self._network.kill),
            "kill drafter": ("drafter", self._network.kill),
            "kill trainer": ("trainer", self._network.kill),
            "freeze actor": ("", self._freeze),
            "freeze trainer": ("trainer", self._freeze),
            "slow actor": ("", self._slow),
            "corrupt drafts": ("drafter", self._corrupt),
            "malformed messages": ("verifier", self._send_garbage),
        }
        """Kinds that strike one actor: of which sort, and how."""

    def start_begins(self) -> None:
        """No strikes until `resume`, unless this run's faults strike from the start."""
        self._paused = True
        self._before_start, self._lasting = Counter(self.struck), len(self._undo)
        if "from the start" in self.plan.kinds:
            self.resume()

    def may_end_start(self) -> bool:
        """Whether what has struck since `start_begins` may end a start: losses of actors only if there are many."""
        struck = self.struck - self._before_start
        if struck["kill controller"] or struck["late joiners"]:
            return True
        weights = {kind: 1 + (kind in _DELAYS) for kind in struck if kind not in _HARMLESS_TO_STARTS}
        total = self._lasting + sum(weight * struck[kind] for kind, weight in weights.items())
        return total >= ReplacementLimits().max_start_failures

    def resume(self) -> None:
        """The run has started."""
        self._paused = False
        if self.left and not self._scheduled:
            self._schedule()

    def heal(self) -> None:
        """No more faults; what lasts ends now."""
        self.left = 0
        undo, self._undo = self._undo, []
        for end in undo:
            end()
        self._network.faults = LinkFaults()

    def on(self, kind: str) -> bool:
        """Whether a kind that is switched on for a whole run is, and has faults left."""
        return kind in self.plan.kinds and self.left > 0

    def closes_early(self) -> bool:
        strikes = self.on("close early") and self._rng.random() < 0.3
        self.struck["close early"] += strikes
        return strikes

    def poison(self, length: int) -> tuple[str, int] | None:
        """How a request of this length breaks engines, and where; None for nearly all."""
        if not self.on("poison") or self._rng.random() > 0.01:
            return None
        self.struck["poison"] += 1
        return self._rng.choice(["crash", "wedge"]), self._rng.randrange(length)

    def wanted_drafters(self) -> dict[str, int]:
        """Draft method → how many there should be now."""
        return dict(self._wanted)

    # ---- strikes ----

    def _schedule(self) -> None:
        self._scheduled = True
        self._kernel.at(self._kernel.now + self._rng.expovariate(1.0 / self.plan.interval_s), self._strike)

    def _strike(self) -> None:
        self._scheduled = False
        if self.left <= 0 or self._paused or self._simulation.done:
            return
        self.left, self.last_at = self.left - 1, self._kernel.now
        if "kill controller" in self.plan.kinds and self._rng.random() < 2.0 / max(self.plan.count, 2):
            self.struck["kill controller"] += 1
            self._kill_controller()
        elif self._kinds:
            kind = self._rng.choice(self._kinds)
            if kind in self._on_actors:
                self.struck[kind] += self._on_one(*self._on_actors[kind])
            else:
                self.struck[kind] += bool(getattr(self, "_" + kind.replace(" ", "_"))())
        if self.left > 0:
            self._schedule()

    def _kill_controller(self) -> None:
        """Its actors and placement groups are owned by it and end with it."""
        self.controller_killed = True
        self._network.kill(self._simulation.controller)
        for actor in self._alive():
            self._network.kill(actor)
        self._simulation.machines.groups.clear()
        if not self._simulation.scenario.training:  # which resumes, while a stream ends with it
            self.left = 0

    def _freeze(self, actor: VirtualActor) -> None:
        if actor.process.frozen or actor.process.dead:
            return
        self._kernel.freeze(actor.process)
        self._for(10.0 ** self._rng.uniform(-1.0, 1.3), lambda: self._kernel.thaw(actor.process))

    def _wedge_engine(self) -> bool:
        """Its next step does not end. Only where one is under way: idle ones that break the moment a request comes
        could not be told from a request that breaks them."""
        busy = [one for one in self._alive() if one.name in self._models.busy and one.name not in self._models.wedged]
        if busy:
            self._models.wedged.add(self._rng.choice(busy).name)
        return bool(busy)

    def _freeze_controller(self) -> bool:
        self._freeze(self._simulation.controller)
        return True

    def _freeze_driver(self) -> bool:
        self._freeze(self._simulation.driver)
        return True

    def _slow(self, actor: VirtualActor) -> None:
        actor.process.slowness = self._rng.uniform(2.0, 20.0)
        self._for(self._rng.uniform(1.0, 10.0), lambda: setattr(actor.process, "slowness", 1.0))

    def _bad_links(self) -> bool:
        rng = self._rng
        faults = self._network.faults
        for name in ("lost_before", "lost_after", "repeated", "delayed"):
            if rng.random() < 0.6:
                setattr(faults, name, 10.0 ** rng.uniform(-2.5, -0.5))
        faults.delay_s = 10.0 ** rng.uniform(-1.0, 0.8)
        self._for(rng.uniform(0.5, 15.0), self._mend_links)
        return True

    def _mend_links(self) -> None:
        self._network.faults = LinkFaults(object_lost=self._network.faults.object_lost)

    def _partition(self) -> bool:
        node = self._rng.choice(self._simulation.machines.nodes)
        self._network.cut_off.add(node)
        self._for(self._rng.uniform(0.2, 15.0), lambda: self._network.cut_off.discard(node))
        return node.alive

    def _lose_node(self) -> bool:
        machines = self._simulation.machines
        alive = [node for node in machines.nodes if node.alive]
        if len(alive) < 2:
            return False
        self._network.lose_node(self._rng.choice(alive))
        self._nodes += 1
        fresh = Node(f"spare-{self._nodes}", cpus=8.0)
        self._for(self._rng.uniform(0.5, 20.0), lambda: machines.nodes.append(fresh))
        return True

    def _late_joiners(self) -> bool:
        backend = self._simulation.backend
        if backend is None:
            return False
        backend.start_s = (0.1, self._rng.uniform(5.0, 40.0))  # the latest of them misses the limit for a start
        usual = type(backend).start_s
        self._for(self._rng.uniform(2.0, 20.0), lambda: setattr(backend, "start_s", usual))
        return True

    def _corrupt(self, actor: VirtualActor) -> None:
        self._models.corrupt.add(actor.name)
        self._for(self._rng.uniform(1.0, 20.0), lambda: self._models.corrupt.discard(actor.name))

    def _send_garbage(self, actor: VirtualActor) -> None:
        for message in [self._garbage() for _ in range(self._rng.randrange(1, 20))]:
            self._network.send(self._simulation.driver, actor, "deliver", [message])

    def _garbage(self) -> Any:
        rng = self._rng
        strange: list[Any] = [None, -1, 3, 1.5, "x", (), (None,), ("a",), (10**9,), True, float("nan"), {}, b"y"]
        names = [one.name for one in self._alive()]
        if rng.random() < 0.2:
            return rng.choice(strange)
        return TailBatch(rng.choice(names), *(self._strange_array() for _ in range(6)))

    def _strange_array(self) -> Any:
        """Wrong in its type, its length, or its values; now and then in order."""
        rng = self._rng
        if rng.random() < 0.2:
            return rng.choice([None, 3, "x", (), [1, 2]])
        values = [rng.choice([0, 1, 7, -1, 10**9, 2**31 - 1]) for _ in range(rng.randrange(4))]
        return np.array(values, rng.choice([np.int32, np.int32, np.int32, np.int64, np.float32, np.bool_]))

    def _lose_objects(self) -> bool:
        self._network.faults.object_lost = self._rng.uniform(0.1, 0.9)
        self._for(self._rng.uniform(0.5, 10.0), lambda: setattr(self._network.faults, "object_lost", 0.0))
        return True

    def _scale(self) -> bool:
        if not self._wanted:  # no draft actors in this mode
            return False
        method = self._rng.choice(list(self._wanted))
        self._wanted[method] = self._rng.randrange(0, 5)
        simulation = self._simulation
        # Sent until it arrives, as a person at a terminal would.
        self._kernel.spawn(lambda: simulation.scale(dict(self._wanted)), "scale", simulation.driver.process)
        return True

    # ---- helpers ----

    def _alive(self) -> list[VirtualActor]:
        backend = self._simulation.backend
        return [] if backend is None else [one for one in backend.actors.values() if not one.process.dead]

    def _on_one(self, sort: str, do: Callable[[VirtualActor], object]) -> bool:
        """Do something to one of the actors of a sort (`verifier`, `drafter`, `trainer`, or any of the controller's).
        False when there are none."""
        if sort == "trainer":
            able = [one for one in self._network.actors if one.name.startswith("trainer") and not one.process.dead]
        else:
            able = [one for one in self._alive() if not sort or one.name.startswith("verifier") == (sort == "verifier")]
        if able:
            do(self._rng.choice(able))
        return bool(able)

    def _for(self, seconds: float, end: Callable[[], None]) -> None:
        """End a fault after a while, or when all is healed; whichever comes first."""
        self._undo.append(end)

        def due() -> None:
            if end in self._undo:
                self._undo.remove(end)
                end()

        self._kernel.at(self._kernel.now + seconds, due)
