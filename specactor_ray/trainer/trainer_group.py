"""The trainer's ranks as Ray actors: their placement, start and end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.cores import limit_spins
from specactor_ray.cluster.names import NAMESPACE, actor_name
from specactor_ray.cluster.placement import Demand, cluster_supply, demand_against_supply
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ClusterError
from specactor_ray.learner.deepspeed_engine import LOOPBACK, Rendezvous
from specactor_ray.learner.trainer import TrainerSpec
from specactor_ray.trainer.trainer_ranks import TrainerRanks


class TrainerGroup(TrainerRanks):
    """Places and starts the ranks, and calls them together.

    Ranks with `trainer.cores` or `trainer.gpus` get one placement group; otherwise they share the cores of this node
    with the verifiers, since trainer and verifiers work in turns.

    Args:
        checkpoint: Folder of the checkpoint to continue from.

    Raises:
        ClusterError: There is no room for the ranks.
        ModelLoadError, ConfigError, SpecActorError: As raised by a rank. Nothing is left running.
    """

    def __init__(self, config: Config, run: str, checkpoint: Path | None = None, calls: Calls | None = None) -> None:
        super().__init__([], calls if calls is not None else Calls(), config.trainer.stall_timeout_s)
        self._config = config
        self._group: PlacementGroup | None = None
        try:
            self._place()
            self._ranks = [self._launch(run, rank) for rank in range(config.trainer.ranks)]
            self._start(checkpoint)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks and free their resources. Idempotent."""
        ranks = self._ranks
        super().close()
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
        from specactor_ray.actors.trainer import HEARTBEAT, TrainerActor

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
            "runtime_env": {"env_vars": limit_spins()},
        }
        remote: Any = ray.remote
        actor = remote(concurrency_groups={HEARTBEAT: 1})(TrainerActor)
        return actor.options(**options).remote(self._config.run.log_level)

    def _start(self, checkpoint: Path | None) -> None:
        trainer = self._config.trainer
        limit_s = self._config.cluster.start_timeout_s
        asked = [self._calls.start(rank, "find_port", deadline_s=limit_s) for rank in self._ranks]
        places = self._calls.ask_all(asked)
        address, port = places[0]
        if all(place[0] == address for place in places):
            address = LOOPBACK  # no other machine is involved
        threads = trainer.cores or max(1, len(os.sched_getaffinity(0)) // trainer.ranks)
        where = str(checkpoint) if checkpoint is not None else None
        specs = [
            TrainerSpec(self._config, where, Rendezvous(rank, trainer.ranks, address, port))
            for rank in range(trainer.ranks)
        ]
        self._call_each("start", [(spec, threads) for spec in specs])
