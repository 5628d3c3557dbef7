"""One rank of a DeepSpeed ZeRO group that holds the policy and its optimizer."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.learner.engine import (
    Forward,
    PolicyModel,
    SavedPart,
    Tick,
    TorchEngine,
    make_optimizer,
    round_linear_weights,
    settings_kept,
)
from specactor_ray.models.offload import held_by, offload, reload

_TAG = "deepspeed"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Meeting point of the ranks."""

    rank: int
    world_size: int
    address: str
    port: int


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Set the environment that DeepSpeed reads, and join the process group (gloo on CPUs, NCCL on GPUs). Raises
    ConfigError if DeepSpeed is not installed.

    There is no authentication: any process that reaches the port can take part. So it is opened at `rendezvous.address`
    only, not on all interfaces as torch does by default; ranks that meet at `LOOPBACK` use no other interface.
    """
    os.environ.update(
        RANK=str(rendezvous.rank),
        LOCAL_RANK="0",  # Ray makes the GPU of every rank its first one
        WORLD_SIZE=str(rendezvous.world_size),
        MASTER_ADDR=rendezvous.address,
        MASTER_PORT=str(rendezvous.port),
    )
    if rendezvous.address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError:
        fix = "pip install deepspeed, or use trainer.backend=torch."
        raise ConfigError("trainer.backend", "DeepSpeed is not installed.", fix) from None
    # On CPUs DeepSpeed would compile collectives over shared memory, with g++ for a minute; gloo has its own.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that newer torch deprecates, which users cannot change.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*deprecated", category=FutureWarning)
    backend = "gloo" if device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(
        backend, store=_store(rendezvous), rank=rendezvous.rank, world_size=rendezvous.world_size
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def _store(rendezvous: Rendezvous) -> Any:
    """Store for the rendezvous of the ranks; the first rank serves it."""
    where, listening = (rendezvous.address, rendezvous.port), None
    if rendezvous.rank == 0:
        family = socket.AF_INET6 if ":" in rendezvous.address else socket.AF_INET
        # The store owns the socket from here on.
        listening = socket.create_server(where, family=family).detach()
    distributed: Any = torch.distributed  # its stubs are incomplete
    return distributed.TCPStore(
        *where, rendezvous.world_size, is_master=listening is not None, master_listen_fd=listening
    )


class DeepSpeedEngine(TorchEngine):
    """ZeRO stage 1, 2 or 3 over a float32 policy, after `join`. Stage 3 keeps a share of it in each rank; it comes
    whole on the CPU. (Loading it in pieces, under `zero.Init`, is incompatible with the way transformers loads.)"""

    def __init__(
        self, policy: PolicyModel, config: TrainerConfig, rendezvous: Rendezvous, device: torch.device, tick: Tick
    ) -> None:
        import deepspeed

        self._tick = tick
        self.rank, self.world_size, self.device = rendezvous.rank, rendezvous.world_size, device
        self._config, self._stage = config, config.zero_stage
        self.policy = policy
        self._settings = _settings(config, self.world_size)
        self._share_out(policy)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=make_optimizer(policy, config, device), config=self._settings
        )
        self.forward = self._engine
        self._frozen = []

    def _share_out(self, model: PolicyModel) -> None:
        """Move a model to the device; with ZeRO-3 a rank keeps a share of each parameter, and the others wait on the
        CPU meanwhile: a device never holds them all."""
        import deepspeed

        if self._stage == 3:
            deepspeed.zero.Init(module=model, config_dict_or_path=self._settings)
        model.to(self.device)

    def frozen(self, model: PolicyModel) -> Forward:
        import deepspeed

        if self._stage < 3:
            return super().frozen(model)
        round_linear_weights(model, getattr(torch, self._config.dtype))
        self._share_out(model)
        forward: Forward = deepspeed.initialize(model=model, config=self._settings)[0]
        return forward

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the parts of the loss must be summed.
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)
        if not last:
            self._engine.step()
        self._tick()

    def step(self, learning_rate: float) -> float:
        norm = largest = float(self.over_ranks(self._largest_gradient(), maximum=True))
        if 0.0 < largest < math.inf:
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate
            self._engine.step()
            left_out = self._engine.optimizer.overflow  # the norm is infinite in float32
            norm = math.inf if left_out else max(float(self._engine.get_global_grad_norm()), largest)
        else:
            self.skip()
        self._tick()
        return norm

    def _largest_gradient(self) -> torch.Tensor:
        """Largest absolute element of this rank's share of the gradients; infinite if one of them is not finite."""
        shares = [gradient for group in self._shares().values() for gradient in group or () if gradient.numel()]
        largest = [torch.zeros((), device=self.device), *(share.abs().max().float() for share in shares)]
        return torch.stack(largest).max().nan_to_num(math.inf, math.inf)

    def skip(self) -> None:
        """Drop the gradients, reduced and not."""
        self._engine.optimizer.zero_grad()
        self._shares().clear()

    def _shares(self) -> dict[int, list[torch.Tensor] | None]:
        """This rank's share of the gradients, between backward and step."""
        shares: dict[int, list[torch.Tensor] | None] = self._engine.optimizer.averaged_gradients
        return shares

    def over_ranks(self, values: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        operations, on_device = torch.distributed.ReduceOp, values.to(self.device)
        torch.distributed.all_reduce(on_device, op=operations.MAX if maximum else operations.SUM)
        return on_device.to(values.device)

    @contextlib.contextmanager
    def gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
            yield

    def save(self, folder: Path, part: SavedPart) -> None:
        """Write every rank's share of the weights and the optimizer; all ranks call it with the same folder. DeepSpeed
        has barriers between two files, where a rank that raised would block the others forever."""
        files = self._engine.checkpoint_engine

        def save_one(state_dict: Any, path: str) -> None:
            with part.writing(Path(path)):
                type(files).save(files, state_dict, path)
            self._tick()

        files.save = save_one
        # Rank 0 copies a script beside its shares, which is superfluous with the whole model in `weights/`.
        self._engine._copy_recovery_script = lambda folder: None
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        """Restore the files of `save`, with the same number of ranks and the same stage. Raises FileNotFoundError if
        they are of another number, and InputError for a file that names code to run; none of it was run."""
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        # DeepSpeed loads in the mode that runs any code. From here on `torch.load` accepts data and its three classes.
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        torch.serialization.add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])
        try:
            with settings_kept(self._engine.optimizer):
                # Not strict, since frozen weights are not in it.
                path, _ = self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=False)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error)).strip()
            raise InputError(
                f"{folder}: the checkpoint holds more than numbers and is not loaded: {reason[:300]} Fix: resume from "
                "a checkpoint that specactor wrote."
            ) from error
        if path is None:
            raise FileNotFoundError(f"{folder}: DeepSpeed found no checkpoint of {self.world_size} ranks in it")

    def offload(self) -> None:
        if self._stage < 3:  # DeepSpeed moves shares of weights with its own AdamW only
            self._engine.offload_states(pin_memory=self.device.type == "cuda")
        offload(held_by(*self._frozen))

    def reload(self) -> None:
        if self._stage < 3:
            self._engine.reload_states()
        reload(held_by(*self._frozen), self.device)


def _settings(config: TrainerConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own configuration. Its batch size has no effect: this engine accumulates and steps by itself."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
        # An autocast outside of DeepSpeed would be switched off inside, on GPUs only.
        "torch_autocast": {"enabled": config.dtype != "float32", "dtype": config.dtype},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
