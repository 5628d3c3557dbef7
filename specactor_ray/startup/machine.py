"""The machine on which a run starts, and the devices that its parts take."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

from specactor_ray.cluster.address import is_connected
from specactor_ray.cluster.cores import draft_cores
from specactor_ray.config.methods import acting_drafters
from specactor_ray.config.schema import AUTO, ClusterConfig, Config
from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.core.machine import available_bytes, count_gpus, gpu_memories, hardware


class Devices(NamedTuple):
    """Devices of a cluster or a layout."""

    cores: int
    gpus: int

    def fit(self, there: Devices) -> bool:
        """Whether these are no more than those that are there."""
        return self.cores <= there.cores and self.gpus <= there.gpus


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts by which `auto` is settled and a layout is checked."""

    cores: int
    """CPU cores that this process may use."""
    gpus: int = 0
    """GPUs of a Ray cluster that starts here."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU."""
    free_bytes: float = math.inf
    """Free memory, within the limit of the container."""
    bfloat16: bool = False
    """Whether its CPU has AVX512_BF16."""
    is_connected: bool = False
    """Whether this process is in a Ray cluster already, of which this machine may be a part only."""

    @classmethod
    def here(cls) -> Machine:
        bfloat16, cores = "avx512_bf16" in hardware()["vector"], len(os.sched_getaffinity(0))
        return cls(cores, count_gpus(), tuple(gpu_memories()), available_bytes(), bfloat16, is_connected())

    def hosts(self, cluster: ClusterConfig) -> bool:
        """Whether the cluster will be started here, so that its devices are those of this machine."""
        return cluster.address == "local" and not self.is_connected

    def devices(self, cluster: ClusterConfig) -> Devices | None:
        """Devices of a `local` cluster; None for another one."""
        if cluster.address != "local":
            return None
        return Devices(cluster.num_cpus or self.cores, self.gpus if cluster.num_gpus is None else cluster.num_gpus)

    def fitting_dtype(self, dtype: str, on_gpu: bool, backend: str = "hf") -> str:
        """Data type for `auto`; any other is returned unchanged. `vllm` computes in float32 on CPUs: bits in bfloat16
        are proved to be independent of the batch only for `hf`."""
        if dtype != AUTO:
            return dtype
        return "bfloat16" if on_gpu or (backend == "hf" and self.bfloat16) else "float32"


def devices_of(config: Config, trains: bool = False) -> Devices:
    """Devices of verifiers, draft actors and, if it `trains`, the trainer, as configured."""
    target, trainer, drafters = config.target, config.trainer, acting_drafters(config)
    gpus = target.replicas * target.gpus + sum(drafter.replicas * drafter.gpus for drafter in drafters)
    cores = target.replicas * target.cores + draft_cores(drafters)
    if trains:
        cores, gpus = cores + trainer_cores(trainer), gpus + trainer_gpus(trainer)
    return Devices(cores, gpus)


def trainer_cores(trainer: TrainerConfig) -> int:
    """Cores used by the trainer alone: without `trainer.cores` it shares those of the verifiers in turns."""
    return trainer.ranks * (trainer.cores or min(trainer.gpus, 1))


def trainer_gpus(trainer: TrainerConfig) -> int:
    """GPUs used by the trainer alone."""
    return 0 if trainer.colocate else trainer.ranks * trainer.gpus
