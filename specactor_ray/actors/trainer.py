"""The trainer actor: a thin shell around one rank's `Trainer`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specactor_ray.actors.process import configure_process
from specactor_ray.actors.taught_drafter import TaughtDrafter
from specactor_ray.config.online import taught_by_trainer
from specactor_ray.learner.batching import Sample
from specactor_ray.learner.trainer import Trainer, TrainerSpec
from specactor_ray.messages import WeightSet


class TrainerActor:
    """Hosts one rank. Every method is called on all ranks at once and in the same order."""

    def __init__(self, log_level: str) -> None:
        configure_process("trainer", (), log_level)
        self._trainer: Trainer | None = None
        self._pupil: TaughtDrafter | None = None

    def find_port(self) -> tuple[str, int]:
        """An address of this node and a port that is free on it, for the ranks to meet."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def start(self, spec: TrainerSpec, threads: int) -> None:
        """Load the policy and its optimizer."""
        import torch

        if not spec.config.trainer.gpus:
            os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed, where it is installed, is imported by others and looks
        torch.set_num_threads(threads)
        self._trainer = Trainer(spec)
        drafter = taught_by_trainer(spec.config)
        if drafter is not None:
            self._pupil = TaughtDrafter(drafter, spec.config, self._trainer)

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step."""
        return self._running().update(samples, step, seed)

    def teach_drafter(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Let the drafter that the trainer teaches learn from the samples of one step.

        Returns:
            Its weights, if there is a new version of them; on ranks other than 0 always None.
        """
        if self._pupil is None:
            raise RuntimeError("no drafter is taught by the trainer")
        return self._pupil.learn(samples, step)

    def export_weights(self, version: int) -> WeightSet | None:
        """Put the weights into the object store; they live as long as somebody holds the result. Rank 0's counts."""
        import ray

        references, total = [], 0
        for bucket in self._running().buckets():
            if bucket is not None:
                references.append(ray.put(bucket))
                total += bucket.data.nbytes
        return WeightSet(version, tuple(references), total) if self._running().rank == 0 else None

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint.

        Raises:
            OSError: It could not be written, whatever library noticed.
        """
        try:
            self._running().save(Path(folder))
        except Exception as error:  # noqa: BLE001 - each library has its own error for a full disk
            raise OSError(f"{type(error).__name__}: {error}") from None

    def offload(self) -> None:
        """Give up device memory until `reload`."""
        self._running().offload()

    def reload(self) -> None:
        self._running().reload()

    def stop(self) -> None:
        """End in order."""
        if self._trainer is not None:
            self._trainer.close()

    def _running(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the trainer was not started")
        return self._trainer
