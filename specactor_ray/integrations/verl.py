"""verl's trainers with our rollouts: `actor_rollout_ref.rollout.name=specactor`.

verl imports this module in each of its processes: by the entry point group `verl.plugins` if this package is installed,
else by `VERL_USE_EXTERNAL_MODULES=specactor_ray.integrations.verl`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import ray

from specactor_ray.actors.process import put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.upstream import VERL
from specactor_ray.integrations.verl_server import NAME, VerlServer, require_supported

if lacking := VERL.lacking():  # logged, since verl hides what its plugins raise
    error = ConfigError("actor_rollout_ref.rollout.name", f"no {NAME} here: {lacking}.", f"{VERL.install}.")
    logging.getLogger(__name__).error("%s", error)
    raise error

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

logger = logging.getLogger(__name__)
_SERVER = f"{NAME}_server_"
"""Prefix of the names of the servers' actors."""


class Replica(RolloutReplica):  # type: ignore[misc]
    """One rollout of this package. Its verifiers and drafters have their own resources, outside of verl's pools."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(replica_rank, config, model_config, *arguments, **options)
        VERL.note_untested(logger)
        if self.is_reward_model or self.is_teacher_model:
            problem = f"{NAME} serves the policy only, no reward model and no teacher."
            raise ConfigError("rollout.name", problem, "use another rollout for these.")
        require_supported(self.config, model_config)

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        if self.config.checkpoint_engine.backend == NAME:  # verl pushes weights to workers; this one forwards none
            pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
            made = self.get_ray_class_with_init_args()
            self.workers = RayWorkerGroup(pool, made, bin_pack=False, use_gpu=False, device_name="cpu").workers
        await self.launch_servers()

    async def init_colocated(self, resource_pool: Any) -> None:
        raise ConfigError("rollout.name", f"{NAME} is not served in processes of verl's pools.", "use another rollout.")

    async def launch_servers(self) -> None:
        model, config = self.model_config, self.config
        sleeps = bool(config.free_cache_engine) and self.rollout_mode is RolloutMode.HYBRID
        server = (
            ray.remote(VerlServer)
            .options(name=f"{_SERVER}{self.replica_rank}", num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                config,
                model.path,
                bool(model.get("trust_remote_code", False)),
                self.replica_rank,
                sleeps,
            )
        )
        self._server_address = await server.start.remote()
        self._server_handle = server
        self.servers = [server]


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The servers, as seen by a rank of the trainer. Only rank 0 calls them, all of them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = int(os.environ["RANK"]) == 0

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank:
            await asyncio.gather(*(server.wake_up.remote(tags) for server in _servers()))

    async def release(self) -> None:
        if self.is_leader_rank:
            await asyncio.gather(*(server.sleep.remote() for server in _servers()))

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_others: Any,
    ) -> None:
        if wire_format == NAME:
            return  # the trainer has sent them to the servers
        if wire_format != "named_tensors" or peft_config is not None:
            what = "adapters" if peft_config is not None else f"weights as {wire_format}"
            raise InputError(f"verl: {what} are not available with rollout.name={NAME}")
        await _send(weights, global_steps, self.is_leader_rank)


@CheckpointEngineRegistry.register(NAME)  # type: ignore[untyped-decorator]
class ObjectStore(CheckpointEngine):  # type: ignore[misc]
    """Transfer of weights from a separate trainer to its rollouts, through Ray's object store."""

    wire_format = NAME

    def __init__(self, bucket_size: int = 0, is_master: bool = False) -> None:
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, trainers: int, rollouts: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def init_process_group(self) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        await _send(weights, global_steps, self._is_master)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        return iter(())


async def _send(weights: Iterable[tuple[str, Any]], global_steps: int | None, is_leader: bool) -> None:
    """Put weights into the object store once, for all servers. Other ranks take part in gathering them."""
    if not is_leader:
        for _ in weights:
            pass
        return
    servers = _servers()
    if not servers:
        raise InputError(f"verl: there are weights for rollout.name={NAME}, and no server")
    layout = await servers[0].weight_layout.remote()
    packed = put_weights(0, layout.buckets(weights), Calls(), layout=layout)
    await asyncio.gather(*(server.update_weights.remote(packed, global_steps) for server in servers))


def _servers() -> list[Any]:
    return [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(_SERVER)]


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"
