"""Training in the virtual cluster: the product's own steps, ranks and checkpoints around a trainer that takes time.

The trainer's weights are a checksum of all it was ever trained on. So whatever was lost, killed and resumed, the end
must be the one that the data alone determines: each step done once, with the samples of its own version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specactor_ray.actors.trainer import TrainerActor
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.engine import SavedPart, Tick
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.network import VirtualActor, VirtualTransport
from specactor_ray.trainer.steps import Training as Steps
from specactor_ray.trainer.trainer_ranks import TrainerRanks
from specactor_ray.transport.messages import Broadcast, WeightSet
from tests.number_text import stopped_output

if TYPE_CHECKING:
    from tests.faults.run import Simulation

STEPS = 6
_RANKS = 2
_STALL_S = 30.0
_MICRO_BATCHES, _MICRO_BATCH_S = 5, 0.2
_MOST_RESTARTS = 200


def digest_of(outputs: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Checksum of the tokens of a step: request id and output, in any order."""
    return zlib.crc32(repr(sorted((name, tuple(tokens)) for name, tokens in outputs)).encode())


def learn(weights: int, samples: int, step: int) -> int:
    """The weights after one more step."""
    return zlib.crc32(b"%d %d %d" % (weights, samples, step))


class _Rank:
    """What `learner.trainer.Trainer` is to the actor: one rank's state and work."""

    def __init__(self, rank: int, weights: int, clock: VirtualClock, tick: Tick) -> None:
        self.rank, self.weights = rank, weights
        self._clock, self.tick = clock, tick
        self.engine = self
        self.use_device: Callable[[bool], None] = lambda uses: None

    def reload(self) -> None:
        self.use_device(True)
        self._clock.work(_MICRO_BATCH_S)

    def offload(self) -> None:
        self._clock.work(_MICRO_BATCH_S)
        self.use_device(False)

    def update(self, samples: Sequence[int], step: int, seed: int) -> dict[str, float]:
        for _ in range(_MICRO_BATCHES):
            self._clock.work(_MICRO_BATCH_S)
            self.tick()
        self.weights = learn(self.weights, samples[0], step)
        return {"skipped": 0.0, "grad_norm": 1.0, "weights": self.weights}

    def save(self, folder: Path) -> SavedPart:
        self._clock.work(0.1)
        part = SavedPart(folder)
        file = folder / f"weights/rank-{self.rank}.json"
        with part.writing(file):
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(self.weights), encoding="utf-8")
        self.tick()
        return part


class SimulatedTrainerActor(TrainerActor):
    """The product's trainer actor, without a model."""

    def __init__(self, actor: VirtualActor, simulation: Simulation, rank: int, weights: int) -> None:
        self._online, self._sender, self._pieces, self._last = None, None, 0, {}
        clock = VirtualClock(simulation.kernel, actor.process)
        self._trainer: Any = _Rank(rank, weights, clock, self._tick)
        self._trainer.use_device = functools.partial(simulation.models.use_device, "trainer", actor)
        self._transport = VirtualTransport(simulation.network, actor)
        self._actor, self._clock, self._groups = actor, clock, simulation.models.groups

    def _export(self, version: int) -> WeightSet | None:
        bucket = self._transport.put(self._trainer.weights)
        offer = Broadcast(self._actor, "", 0)
        return WeightSet(version, (bucket,), 1, broadcast=offer) if self._trainer.rank == 0 else None

    def send_weights(self, weights: WeightSet) -> None:
        self._groups.take_part(self._actor, self._clock, weights)


@dataclass
class _Record:
    """The metrics of a run, as they would stand in its file."""

    steps: dict[int, float] = field(default_factory=dict)
    problem: str = ""

    def begin(self, step: int) -> None:
        pass

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        yield

    def end(self, step: int, experience: Any, update: Mapping[str, float], sync_bytes: int) -> None:
        self.steps[step] = update["weights"]

    def finish(self, status: str, checkpoint_failures: int, error: str = "") -> RunOutcome:
        return RunOutcome(Path(), {"status": status, "error": error})


class _Rollout:
    """The part of a `Rollout` that the steps and the maker use, on the real queue."""

    def __init__(self, simulation: Simulation) -> None:
        self._queue = simulation.queue
        self._world = simulation
        self.stream = simulation.stream

    def update_weights(self, weights: WeightSet, policy: str | None = None) -> None:
        self._world.version = weights.version
        self._queue.update_weights(weights)

    def update_drafter(self, weights: WeightSet) -> None:
        raise AssertionError("no drafter is taught here")

    def sleep(self, keep_weights: bool) -> None:
        self._queue.call_verifiers("sleep", keep_weights)

    def wake(self) -> None:
        self._queue.call_verifiers("wake")


class Training:
    """Trains to the end, resuming from the newest checkpoint after every loss, and checks the outcome."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._record = _Record()

    def run(self) -> None:
        """Runs as the driver's task."""
        simulation = self._simulation
        simulation.config.trainer.steps = STEPS
        with tempfile.TemporaryDirectory(prefix="specactor-simulation-") as folder:
            store = CheckpointStore(Path(folder), keep_last=2, keep_best=False)
            for restarts in range(_MOST_RESTARTS):
                simulation.report.restarts = restarts
                if restarts == _MOST_RESTARTS // 2:
                    simulation.injector.heal()
                if self._attempt(store):
                    break
                simulation.end_run()
            else:
                simulation.fail(f"training did not end with {_MOST_RESTARTS} restarts")
        simulation.end_run()
        self._check()

    def _attempt(self, store: CheckpointStore) -> bool:
        """Train as far as it goes. Returns whether all steps are done and saved."""
        found = store.newest_sound()
        state, weights = (TrainState(), 0) if found is None else (found[1], _read(found[0]))
        store.remove_after(state.step)
        self._record.steps = {step: value for step, value in self._record.steps.items() if step <= state.step}
        self._simulation.version = state.step
        try:
            self._simulation.start_run()
            return self._steps(store, state, weights).run().status == "complete"
        except SpecActorError:
            return False

    def _steps(self, store: CheckpointStore, state: TrainState, weights: int) -> Steps:
        simulation = self._simulation
        run: Any = SimpleNamespace(store=store, state=state, is_saved=True)
        ranks = TrainerRanks([self._start_rank(rank, weights) for rank in range(_RANKS)], simulation.calls, _STALL_S)
        rollout: Any = _Rollout(simulation)
        maker: Any = SimpleNamespace(collect=self._collect)
        record: Any = self._record
        return Steps(simulation.config, run, rollout, ranks, maker, record, say=lambda line: None)

    def _collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Any:
        ended = list(rollout.stream(self._simulation.entries(step)))
        for entry in ended:
            self._simulation.check_entry(entry)
        samples = [digest_of((entry.request_id, entry.token_ids) for entry in ended)]
        return SimpleNamespace(samples=samples, rewards=(1.0,), is_unusable=False, position=(0, 0))

    def _start_rank(self, rank: int, weights: int) -> VirtualActor:
        simulation = self._simulation

        def make(actor: VirtualActor) -> SimulatedTrainerActor:
            return SimulatedTrainerActor(actor, simulation, rank, weights)

        return simulation.network.start_actor(f"trainer-{rank}", simulation.head, make, 0.1, concurrency=1)

    def _check(self) -> None:
        """Every step was done once, on what plain decoding gives."""
        weights = 0
        for step in range(STEPS):
            entries = self._simulation.entries(step)
            outputs = [(entry.request_id, stopped_output(entry.sampling, step)[0]) for entry in entries]
            weights = learn(weights, digest_of(outputs), step)
            if self._record.steps.get(step + 1) != weights:
                self._simulation.fail(f"step {step + 1} of training left other weights than a calm run")
                return


def _read(checkpoint: Path) -> int:
    """The weights in a checkpoint; those of both ranks are the same."""
    found: int = json.loads((checkpoint / "weights/rank-0.json").read_text(encoding="utf-8"))
    return found
