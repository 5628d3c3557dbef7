"""The trainer's ranks as Ray actors, seen from the driver as one trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from specactor_ray.cluster.names import NAMESPACE, actor_name
from specactor_ray.cluster.placement import Demand, cluster_supply, demand_against_supply
from specactor_ray.cluster.supervised import readable_error
from specactor_ray.config.schema import Config
from specactor_ray.errors import ClusterError
from specactor_ray.learner.batching import Sample
from specactor_ray.learner.engines.deepspeed_engine import LOOPBACK, Rendezvous
from specactor_ray.learner.trainer import TrainerSpec
from specactor_ray.messages import WeightSet

logger = logging.getLogger(__name__)


class TrainerGroup:
    """Starts the ranks and calls them together.

    Ranks with `trainer.cores` or `trainer.gpus` get one placement group; without, they share the cores of this node
    with the verifiers, since the two work in turns.

    Args:
        config: The configuration.
        run: Name of the run.
        checkpoint: Folder of the checkpoint to go on from.

    Raises:
        ClusterError: There is no room.
        ModelLoadError, ConfigError, SpecActorError: As a rank raised it. Nothing is left running.
    """

    def __init__(self, config: Config, run: str, checkpoint: Path | None = None) -> None:
        self._config = config
        self._group: PlacementGroup | None = None
        self._ranks: list[Any] = []
        try:
            self._place()
            self._ranks = [self._launch(run, rank) for rank in range(config.trainer.ranks)]
            self._start(checkpoint)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step; returns the metrics of `PolicyUpdater.update`."""
        shared = ray.put(list(samples))
        metrics: dict[str, float] = self._call("update", shared, step, seed)[0]
        return metrics

    def teach_drafter(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Let the drafter with `online.where=trainer` learn from the samples of one step; returns its weights, if there
        is a new version of them."""
        weights: WeightSet | None = self._call("teach_drafter", ray.put(list(samples)), step)[0]
        return weights

    def export_weights(self, version: int) -> WeightSet:
        """The current weights, in the object store of rank 0's node."""
        weights: WeightSet = self._call("export_weights", version)[0]
        return weights

    def save(self, folder: Path) -> None:
        """Write the model and the state of all ranks; the folder must be one that all ranks see.

        Raises:
            OSError: It could not be written.
        """
        references = [rank.save.remote(str(folder)) for rank in self._ranks]
        try:
            ray.get(references)
        except RayTaskError as error:
            raise OSError(str(error.cause)) from None
        except RayError as error:
            raise readable_error(error, "the trainer", "failed") from None

    def offload(self) -> None:
        """Give up device memory until `reload`."""
        self._call("offload")

    def reload(self) -> None:
        self._call("reload")

    def close(self) -> None:
        """End the ranks. Harmless when repeated."""
        ranks, self._ranks = self._ranks, []
        stops = [rank.stop.remote() for rank in ranks]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=5.0)
        for rank in ranks:
            ray.kill(rank)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _place(self) -> None:
        trainer, cluster = self._config.trainer, self._config.cluster
        if trainer.cores is None and not trainer.gpus:
            return
        demand = Demand("trainer", float(trainer.cores or 1), float(trainer.gpus))
        supply = cluster_supply()
        self._group = placement_group([demand.bundle()] * trainer.ranks, strategy="PACK", lifetime=None)
        if not self._group.wait(cluster.placement_timeout_s):
            table = demand_against_supply([demand] * trainer.ranks, supply)
            problem = f"the trainer found no room within {cluster.placement_timeout_s:g} s."
            raise ClusterError(f"{problem}\n{table}")

    def _launch(self, run: str, rank: int) -> Any:
        from specactor_ray.actors.trainer import TrainerActor

        trainer = self._config.trainer
        if self._group is None:
            strategy: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            cpus = 0.0
        else:
            strategy = PlacementGroupSchedulingStrategy(self._group, rank)
            cpus = float(trainer.cores or 1)
        options: dict[str, Any] = {
            "name": actor_name(run, f"trainer-{rank}"),
            "namespace": NAMESPACE,
            "num_cpus": cpus,
            "num_gpus": trainer.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        actor: Any = ray.remote(TrainerActor)
        return actor.options(**options).remote(self._config.run.log_level)

    def _start(self, checkpoint: Path | None) -> None:
        trainer = self._config.trainer
        places = self._get([rank.find_port.remote() for rank in self._ranks])
        address, port = places[0]
        if all(place[0] == address for place in places):
            address = LOOPBACK  # nobody else is to hear of it
        threads = trainer.cores or max(1, len(os.sched_getaffinity(0)) // trainer.ranks)
        where = str(checkpoint) if checkpoint is not None else None
        specs = [
            TrainerSpec(self._config, where, Rendezvous(rank, trainer.ranks, address, port))
            for rank in range(trainer.ranks)
        ]
        self._get([rank.start.remote(spec, threads) for rank, spec in zip(self._ranks, specs, strict=True)])

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._get([getattr(rank, method).remote(*arguments) for rank in self._ranks])

    def _get(self, references: list[Any]) -> list[Any]:
        """The answers of all ranks; the first that fails ends the wait, or the others would hang in a collective."""
        waiting = list(references)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)
            return ray.get(references)  # type: ignore[no-any-return]
        except RayError as error:
            raise readable_error(error, "the trainer", "failed") from None
