"""Turns of verifiers and trainer on one device (`trainer.offload`): its memory never holds the cache of the one and the
states of the other.

    rollout → asleep → training → offloaded → loaded → rollout

New weights go to host memory while the trainer has the device, and into the verifiers' while it has not, before there
is a cache again: no two sets of weights are ever on it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from specactor_ray.core.errors import SpecActorError

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.trainer.trainer_ranks import TrainerRanks
    from specactor_ray.transport.messages import WeightSet


class DeviceState(StrEnum):
    """What has memory on the device."""

    ROLLOUT = "rollout"
    """Weights and caches of the verifiers."""
    ASLEEP = "asleep"
    TRAINING = "training"
    """Weights, gradients and optimizer of the trainer."""
    OFFLOADED = "offloaded"
    LOADED = "loaded"
    """New weights of the verifiers."""
    UNKNOWN = "unknown"
    """A change has failed: the run ends, with a checkpoint if the trainer can still write one."""


class DeviceTurns:
    """The changes of state, each from the one before it only; raises their errors."""

    def __init__(self, rollout: Rollout, trainer: TrainerRanks) -> None:
        self._rollout, self._trainer = rollout, trainer
        self.state = DeviceState.ROLLOUT

    def to_trainer(self) -> None:
        """Let the verifiers sleep, which need new weights then, and bring the trainer to the device."""
        self._change(DeviceState.ROLLOUT, DeviceState.ASLEEP, lambda: self._rollout.sleep(keep_weights=False))
        self._change(DeviceState.ASLEEP, DeviceState.TRAINING, self._trainer.reload)

    def to_rollout(self, weights: WeightSet) -> None:
        """Free the trainer's memory, and wake the verifiers with these weights."""
        self._change(DeviceState.TRAINING, DeviceState.OFFLOADED, self._trainer.offload)
        self._change(DeviceState.OFFLOADED, DeviceState.LOADED, lambda: self._rollout.update_weights(weights))
        self._change(DeviceState.LOADED, DeviceState.ROLLOUT, self._rollout.wake)

    def _change(self, before: DeviceState, after: DeviceState, change: Callable[[], object]) -> None:
        if self.state is not before:
            raise SpecActorError(f"the state of the device is {self.state}, and {after} follows {before} only")
        self.state = DeviceState.UNKNOWN
        change()
        self.state = after
