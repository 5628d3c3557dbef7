"""The trainer actor: a thin shell around one rank's `Trainer`. `ray.remote` is applied where the actor is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from specactor_ray.actors.broadcast import WeightSender, uses_nccl
from specactor_ray.actors.process import COMMAND_TIMEOUT_S, collected_once, configure_process, put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.methods import online_drafter
from specactor_ray.config.schema import Config, DrafterConfig
from specactor_ray.config.training_schema import WeightTransport
from specactor_ray.distill.eagle import sampled_example
from specactor_ray.distill.training import EagleLearner, choose_samples, load_learner
from specactor_ray.draft.eagle.checkpoint import read_head_config
from specactor_ray.learner.batching import Sample
from specactor_ray.learner.deepspeed_engine import LOOPBACK, Rendezvous
from specactor_ray.learner.engine import SavedPart
from specactor_ray.learner.trainer import Trainer
from specactor_ray.models.offload import held_by, offload, reload
from specactor_ray.models.weight_buckets import pack
from specactor_ray.transport.messages import WeightSet

T = TypeVar("T")
SENDING = "sending"
"""Concurrency group of broadcasts: one that waits for a lost receiver delays no update."""
HEARTBEAT = "heartbeat"
"""Concurrency group that answers while the rank computes. All else runs in the one thread of the default group: OpenMP
teams and CUDA contexts belong to threads."""


class OnlineDrafter:
    """An EAGLE head that learns from the samples of a training step. Rank 0 holds it; the other ranks help with the
    policy's hidden states."""

    def __init__(self, drafter: DrafterConfig, config: Config, trainer: Trainer, calls: Calls) -> None:
        assert drafter.model is not None  # validated
        target = config.target
        head = read_head_config(drafter.model, target.model, trust_remote_code=target.trust_remote_code)
        self._online, self._trainer, self._layers = drafter.online, trainer, head.exported_layers
        self._method, self._calls = drafter.method, calls
        self._learner: EagleLearner | None = None
        if trainer.rank == 0:
            self._learner = load_learner(drafter, target, "cuda" if config.trainer.gpus else "cpu")

    def learn(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Train on as many of the samples as the buffer holds, until all passes are done. Returns the newest version
        if there is a new one; on ranks other than 0 None."""
        chosen = choose_samples([sample.num_tokens for sample in samples], self._online.buffer_tokens, step)
        taken = [samples[index] for index in chosen]
        states = self._trainer.engine.hidden_states(taken, self._layers)
        if self._learner is None:
            return None
        examples = [sampled_example(sample, known) for sample, known in zip(taken, states, strict=True)]
        before = self._learner.version
        for batch in self._learner.batches(examples):
            self._learner.step(batch)
            self._trainer.tick()
        if self._learner.version == before:
            return None
        taught = self._learner.weights()
        bucket = pack(taught.items(), dict.fromkeys(taught, torch.float32))
        return put_weights(self._learner.version, [bucket], self._calls, self._method)

    def offload(self) -> None:
        """Move the head and its optimizer to host memory until `reload`."""
        if self._learner is not None:
            offload(held_by(self._learner.head, optimizer=self._learner.optimizer))

    def reload(self) -> None:
        if self._learner is not None:
            reload(held_by(self._learner.head, optimizer=self._learner.optimizer), self._trainer.engine.device)


class TrainerActor:
    """Hosts one rank. Every method is called on all ranks at once and in the same order, and may be sent again when its
    answer was lost: it is carried out once."""

    def __init__(self, log_level: str, calls: Calls | None = None) -> None:
        configure_process("trainer", (), log_level)
        self._calls = calls if calls is not None else Calls()
        self._trainer: Trainer | None = None
        self._online: OnlineDrafter | None = None
        self._sender: WeightSender | None = None
        self._pieces = 0
        self._last: dict[str, tuple[Hashable, Any]] = {}

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self) -> int:
        """A number that grows while the rank makes progress; answered also while another method runs."""
        return self._pieces

    def find_port(self) -> tuple[str, int]:
        """An address of this node and a free port on it, for the rendezvous of the ranks."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    @collected_once()
    def start(self, config: Config, checkpoint: Path | None, rendezvous: Rendezvous, threads: int) -> None:
        """Load the policy and its optimizer."""
        if self._trainer is not None:
            return
        if not config.trainer.gpus:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read by DeepSpeed, which other packages import where it is installed
        torch.set_num_threads(threads)
        self._trainer = Trainer(config, checkpoint, rendezvous, self._tick)
        if config.trainer.weight_transport is WeightTransport.broadcast and self._trainer.rank == 0:
            address = LOOPBACK if config.cluster.address == "local" else ray.util.get_node_ip_address()
            self._sender = WeightSender(ray.get_runtime_context().current_actor, address, uses_nccl(config))
        drafter = online_drafter(config)
        if drafter is not None:
            self._online = OnlineDrafter(drafter, config, self._trainer, self._calls)

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step."""
        return self._once("update", step, lambda: self._running().update(samples, step, seed))

    def train_drafter(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Train the online drafter on the samples of one step; returns as `OnlineDrafter.learn`."""
        drafter = self._online
        if drafter is None:
            raise RuntimeError("the trainer trains no drafter")
        return self._once("train_drafter", step, lambda: drafter.learn(samples, step))

    def export_weights(self, version: int, number: int) -> WeightSet | None:
        """Put the weights into the object store as this version; they live as long as the result is held. Rank 0's
        result counts. `number` identifies the request: a repeated request has the same number, the next one another."""
        return self._once("export_weights", number, lambda: self._export(version))

    @ray.method(concurrency_group=SENDING)
    def send_weights(self, weights: WeightSet) -> None:
        """Send a version to the members of its broadcast. FetchError: it failed."""
        assert self._sender is not None  # it made the offer
        self._sender.send(weights, self._calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S))

    def save(self, folder: str, number: int) -> SavedPart:
        """Write this rank's part of a checkpoint; disk errors are in the result. `number`: as in `export_weights`."""
        return self._once("save", number, lambda: self._running().save(Path(folder)))

    def offload(self) -> None:
        """Give up the device's memory until `reload`."""
        self._running().engine.offload()
        if self._online is not None:
            self._online.offload()

    def reload(self) -> None:
        self._running().engine.reload()
        if self._online is not None:
            self._online.reload()

    def _export(self, version: int) -> WeightSet | None:
        trainer = self._running()
        weights = put_weights(
            version, trainer.buckets(), self._calls, layout=trainer.layout
        )  # all ranks gather together
        trainer.tick()
        if self._sender is not None:
            weights = self._sender.offer(weights, self._calls.transport.fetch(weights.buckets, COMMAND_TIMEOUT_S))
        return weights if trainer.rank == 0 else None

    def _once(self, method: str, key: Hashable, work: Callable[[], T]) -> T:
        """The result of `work`, or the last result if that call had the same key."""
        last = self._last.get(method)
        if last is not None and last[0] == key:
            result: T = last[1]
            return result
        self._last.pop(method, None)  # releases the weights of the previous version
        result = work()
        self._last[method] = (key, result)
        return result

    def _tick(self) -> None:
        self._pieces += 1

    def _running(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the trainer was not started")
        return self._trainer
