"""The policy and its optimizer in one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.learner.batching import MicroBatch
from specactor_ray.learner.policy import PolicyModel, TokenScores
from specactor_ray.learner.saving import PartWriter, WorkCounter

_STATE_FILE = "optimizer.pt"


class TorchEngine:
    """AdamW over a float32 policy.

    Args:
        policy: The policy, on its device, with gradients.
        progress: Counts micro-batches and optimizer steps.
    """

    rank, world_size = 0, 1

    def __init__(self, policy: PolicyModel, config: TrainerConfig, progress: WorkCounter | None = None) -> None:
        self.policy, self._config = policy, config
        self._progress = progress if progress is not None else WorkCounter()
        self.device = next(policy.parameters()).device
        self._optimizer = torch.optim.AdamW(
            parameter_groups(policy, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=self.device.type == "cuda",
        )

    def score(self, batch: MicroBatch) -> TokenScores:
        with autocast(self.device, self._config.dtype):
            scores: TokenScores = self.policy(batch)
        self._progress.tick()
        return scores

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()
        self._progress.tick()

    def step(self, learning_rate: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.skip()
        self._progress.tick()
        return norm

    def skip(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values

    @contextlib.contextmanager
    def gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters are whole in this process."""
        yield

    def save(self, folder: Path, writer: PartWriter) -> None:
        """Write the training state besides the weights: the optimizer's state, and the value head."""
        state = {"optimizer": self._optimizer.state_dict(), "heads": self.policy.heads()}
        with writer.writing(folder / _STATE_FILE):
            torch.save(state, folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore the files of `save`; the model's weights were loaded already."""
        state = torch.load(folder / _STATE_FILE, map_location=self.device, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy.load_heads(state["heads"])

    def offload(self) -> None:
        """Move the optimizer's state to host memory until `reload`."""
        self._move_state(torch.device("cpu"))

    def reload(self) -> None:
        self._move_state(self.device)

    def close(self) -> None:
        """No operation for a single process."""

    def _move_state(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[name] = value.to(device)


def parameter_groups(policy: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: matrices, with weight decay, and norms and biases, without."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    dims = [getattr(parameter, "ds_shape", parameter.shape) for parameter in trained]
    decayed = [parameter for parameter, shape in zip(trained, dims, strict=True) if len(shape) >= 2]
    others = [parameter for parameter, shape in zip(trained, dims, strict=True) if len(shape) < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@contextlib.contextmanager
def autocast(device: torch.device, dtype: str) -> Iterator[None]:
    """Inside, arithmetic is in bfloat16, or unchanged in float32."""
    if dtype == "float32":
        yield
        return
    with torch.autocast(device.type, dtype=getattr(torch, dtype)):
        yield
