"""The machine on which a run starts, and the devices that its parts take."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from specactor_ray.cluster.address import is_connected
from specactor_ray.cluster.cores import draft_cores
from specactor_ray.config.accelerators import allows_kind, has_bfloat16, sets_of
from specactor_ray.config.methods import acting_drafters
from specactor_ray.config.schema import AUTO, ClusterConfig, Config
from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.core.machine import available_bytes, count_gpus, gpu_kind, gpu_memories, hardware


class Devices(NamedTuple):
    """Devices of a cluster or a layout."""

    cores: int
    gpus: int
    kinds: Mapping[str, int] = MappingProxyType({})
    """GPUs of each kind: of a cluster, all that have a known one; of a layout, those with a key `accelerator`, by its
    value."""

    def fit(self, there: Devices) -> bool:
        """Whether these are no more than those that are there."""
        return self.cores <= there.cores and self.gpus <= there.gpus and not self.lacking(there)

    def lacking(self, there: Devices) -> tuple[str, ...]:
        """The fewest values of `accelerator` that together need more GPUs than they may have; empty if there are
        none."""
        too_few = (one for one in sets_of(self.kinds) if sum(map(self.kinds.__getitem__, one)) > there.of_kind(*one))
        return next(too_few, ())

    def shortage(self, there: Devices) -> str:
        """Those that are lacking, in words; empty if there are none."""
        kinds = self.lacking(there)
        number, named = sum(self.kinds[one] for one in kinds), " and ".join(kinds)
        return f"{number} GPU(s) of {named} in all, and there are {there.of_kind(*kinds)}" if kinds else ""

    def of_kind(self, *accelerators: str | None) -> int:
        """GPUs that one of these values of `accelerator` allows: of a layout those of the very values; without kinds
        all."""
        mine = (
            number
            for kind, number in self.kinds.items()
            if any(kind == one or allows_kind(one, kind) for one in accelerators)
        )
        return sum(mine) if self.kinds and None not in accelerators else self.gpus

    def share(self, one: str | None, other: str | None) -> bool:
        """Whether some GPUs are of both values of `accelerator`."""
        if one is None or other is None or one == other:
            return True
        return any(allows_kind(one, kind) and allows_kind(other, kind) for kind in self.kinds)


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
    kind: str = ""
    """Kind of its GPUs, as Ray names it; empty if it does not know it."""

    @classmethod
    def here(cls) -> Machine:
        bfloat16, cores, gpus = "avx512_bf16" in hardware()["vector"], len(os.sched_getaffinity(0)), count_gpus()
        kind = gpu_kind() if gpus else ""
        return cls(cores, gpus, tuple(gpu_memories()), available_bytes(), bfloat16, is_connected(), kind)

    def hosts(self, cluster: ClusterConfig) -> bool:
        """Whether the cluster will be started here, so that its devices are those of this machine."""
        return cluster.address == "local" and not self.is_connected

    def devices(self, cluster: ClusterConfig) -> Devices | None:
        """Devices of a `local` cluster; None for another one."""
        if cluster.address != "local":
            return None
        gpus = self.gpus if cluster.num_gpus is None else cluster.num_gpus
        return Devices(cluster.num_cpus or self.cores, gpus, {self.kind: gpus} if self.kind else {})

    def kind_of(self, cluster: ClusterConfig) -> str:
        """Kind of the GPUs of a `local` cluster; empty for another one."""
        return self.kind if cluster.address == "local" else ""

    def fitting_dtype(
        self, dtype: str, on_gpu: bool, backend: str = "hf", accelerator: str | None = None, kind: str = ""
    ) -> str:
        """Data type for `auto`; any other is returned unchanged. `kind`: that of the GPUs if `accelerator` names none.
        `vllm` computes in float32 on CPUs: bits in bfloat16 are proved to be independent of the batch only for `hf`."""
        if dtype != AUTO:
            return dtype
        if on_gpu:
            return "bfloat16" if has_bfloat16(accelerator, kind) else "float16"
        return "bfloat16" if backend == "hf" and self.bfloat16 else "float32"


def devices_of(config: Config, trains: bool = False) -> Devices:
    """Devices of verifiers, draft actors and, if it `trains`, the trainer, as configured."""
    target, trainer, drafters = config.target, config.trainer, acting_drafters(config)
    gpus = target.replicas * target.gpus + sum(drafter.replicas * drafter.gpus for drafter in drafters)
    cores, kinds = target.replicas * target.cores + draft_cores(drafters), Counter[str]()
    for accelerator, number in (
        (target.accelerator, target.replicas * target.gpus),
        *((one.accelerator, one.replicas * one.gpus) for one in drafters),
        (trainer.accelerator, trainer_gpus(trainer) if trains else 0),
    ):
        kinds.update({accelerator: number} if accelerator else {})
    if trains:
        cores, gpus = cores + trainer_cores(trainer), gpus + trainer_gpus(trainer)
    return Devices(cores, gpus, +kinds)


def trainer_cores(trainer: TrainerConfig) -> int:
    """Cores used by the trainer alone: without `trainer.cores` it shares those of the verifiers in turns."""
    return trainer.ranks * (trainer.cores or min(trainer.gpus, 1))


def trainer_gpus(trainer: TrainerConfig) -> int:
    """GPUs used by the trainer alone."""
    return 0 if trainer.colocate else trainer.ranks * trainer.gpus
