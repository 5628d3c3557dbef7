"""The drafter that a trainer rank trains beside the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specactor_ray.actors.process import put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import Config, DrafterConfig
from specactor_ray.distill.eagle import EagleExample
from specactor_ray.distill.training import EagleLearner, choose_samples, load_learner
from specactor_ray.draft.eagle.checkpoint import read_head_config
from specactor_ray.learner.batching import Sample
from specactor_ray.learner.trainer import Trainer
from specactor_ray.models.weight_buckets import pack
from specactor_ray.transport.messages import WeightSet


class TaughtDrafter:
    """An EAGLE head that learns from the samples of a training step. Rank 0 holds it; the other ranks help with the
    policy's hidden states.

    Raises:
        ModelLoadError: The head cannot be loaded.
    """

    def __init__(self, drafter: DrafterConfig, config: Config, trainer: Trainer, calls: Calls) -> None:
        assert drafter.model is not None  # validated
        target = config.target
        head = read_head_config(drafter.model, target.model, trust_remote_code=target.trust_remote_code)
        self._online, self._trainer, self._layers = drafter.online, trainer, head.exported_layers
        self._calls = calls
        self._learner: EagleLearner | None = None
        if trainer.rank == 0:
            self._learner = load_learner(drafter, target, "cuda" if config.trainer.gpus else "cpu")

    def learn(self, samples: Sequence[Sample], step: int) -> WeightSet | None:
        """Train on as many of the samples as the buffer holds, until all passes are done.

        Returns:
            The newest version, if there is a new one; on ranks other than 0 None.
        """
        chosen = choose_samples([sample.num_tokens for sample in samples], self._online.buffer_tokens, step)
        taken = [samples[index] for index in chosen]
        states = self._trainer.engine.hidden_states(taken, self._layers)
        if self._learner is None:
            return None
        examples = [
            EagleExample((*sample.prompt.tolist(), *sample.output.tolist()), len(sample.prompt), known)
            for sample, known in zip(taken, states, strict=True)
        ]
        before = self._learner.version
        for batch in self._learner.batches(examples):
            self._learner.step(batch)
            self._trainer.progress.tick()
        if self._learner.version == before:
            return None
        bucket = pack(self._learner.weights().items(), torch.float32)
        return put_weights(self._learner.version, [bucket], self._calls)
