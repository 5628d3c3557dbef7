"""One rank of the trainer: the policy, its update, its weights for others, and its files. Independent of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import TrainerBackend
from specactor_ray.learner.algorithms import make_recipe, uses_values
from specactor_ray.learner.batching import MicroBatch, Sample, collate, cut_by_tokens
from specactor_ray.learner.deepspeed_engine import DeepSpeedEngine, Rendezvous, join
from specactor_ray.learner.engine import (
    PartWriter,
    PolicyModel,
    SavedPart,
    TokenScores,
    TorchEngine,
    WorkCounter,
    autocast,
    layer_outputs,
)
from specactor_ray.learner.update import PolicyUpdater
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import load_model, load_tokenizer, parse_dtype
from specactor_ray.models.weight_buckets import WeightBucket, grouped, pack

WEIGHTS, ENGINE = "weights", "engine"
"""Folders of a checkpoint: the model in the format of transformers, and the engine's training state."""


@dataclass(frozen=True)
class TrainerSpec:
    """Input of a trainer rank."""

    config: Config
    checkpoint: str | None = None
    """Folder of the checkpoint to continue from; None starts from `target.model`."""
    rendezvous: Rendezvous | None = None
    """Meeting point of the ranks, for deepspeed."""


class Trainer:
    """Holds the policy and trains it. Raises ModelLoadError, and ConfigError if the back end is not installed."""

    def __init__(self, spec: TrainerSpec, progress: WorkCounter) -> None:
        config = spec.config
        self._config = config
        self.progress = progress
        self._device = torch.device("cuda" if config.trainer.gpus else "cpu")
        self._source = str(Path(spec.checkpoint) / WEIGHTS) if spec.checkpoint else config.target.model
        self._recipe = make_recipe(config)
        if config.trainer.backend is TrainerBackend.deepspeed:
            assert spec.rendezvous is not None  # set whenever there are several ranks
            join(spec.rendezvous, self._device)
            self.engine: TorchEngine = DeepSpeedEngine(
                self._make_policy(), config.trainer, spec.rendezvous, self._device, self.progress
            )
        else:
            self.engine = TorchEngine(self._make_policy(), config.trainer, self.progress)
        self.progress.tick()
        if spec.checkpoint:
            self.engine.load(Path(spec.checkpoint) / ENGINE)
            self.progress.tick()
        self._reference: PolicyModel | None = None
        if config.algorithm.kl_coef:
            self._reference = PolicyModel(self._load(config.target.model), config.sampling.temperature)
        reference = self._score_reference if self._reference is not None else None
        self._updater = PolicyUpdater(self.engine, self._recipe, config.trainer, config.sampling.max_tokens, reference)

    @property
    def rank(self) -> int:
        return self.engine.rank

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step; see `PolicyUpdater.update`."""
        return self._updater.update(samples, step, seed)

    def hidden_states(self, samples: Sequence[Sample], layers: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states of the present policy; see the function `hidden_states`. All ranks must call it together."""
        return hidden_states(self.engine, samples, layers, self._config.trainer.micro_batch_tokens)

    def buckets(self) -> Iterator[WeightBucket | None]:
        """The model's weights in the verifiers' dtype, bucket by bucket; None on ranks other than 0. All ranks iterate
        over it together."""
        dtype = parse_dtype(self._config.target.dtype)
        named, most_bytes = self.engine.policy.model.named_parameters(), self._config.trainer.weight_bucket_mb * 2**20
        for chosen in grouped(named, lambda parameter: _numel(parameter) * dtype.itemsize, most_bytes):
            with self.engine.gathered([parameter for _, parameter in chosen]):
                yield pack(chosen, dtype) if self.rank == 0 else None
            self.progress.tick()

    def save(self, folder: Path) -> SavedPart:
        """Write the model (in the format of transformers, rank 0) and the engine's state (every rank). Disk errors are
        in the result; all ranks go through it together in any case."""
        writer, engine_folder = PartWriter(folder, self.progress), folder / ENGINE
        with writer.writing():
            engine_folder.mkdir(parents=True, exist_ok=True)
        refused = self.engine.over_ranks(torch.tensor([float(bool(writer.part.problem))]), maximum=True)
        if float(refused[0]):  # all ranks return together
            return writer.part
        self.engine.save(engine_folder, writer)
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self.engine.policy.model.named_parameters():
            with self.engine.gathered([parameter]):
                if self.rank == 0:
                    state[name] = parameter.detach().to("cpu", copy=True)
            self.progress.tick()
        if self.rank == 0:
            target = self._config.target
            tokenizer: Any = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
            with quiet_transformers(), writer.writing(folder / WEIGHTS):
                self.engine.policy.model.save_pretrained(folder / WEIGHTS, state_dict=state)
                tokenizer.save_pretrained(folder / WEIGHTS)
        return writer.part

    def close(self) -> None:
        self.engine.close()

    def _make_policy(self) -> PolicyModel:
        model = self._load(self._source).requires_grad_(True)
        if self._config.trainer.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        algorithm = self._config.algorithm
        self.progress.tick()
        policy = PolicyModel(
            model, self._config.sampling.temperature, uses_values(self._recipe), bool(algorithm.entropy_coef)
        )
        return policy.to(self._device)

    def _load(self, name: str) -> Any:
        target = self._config.target
        return load_model(name, device=str(self._device), trust_remote_code=target.trust_remote_code)

    def _score_reference(self, batch: MicroBatch) -> torch.Tensor:
        assert self._reference is not None  # called only if it is set
        with autocast(self._device, self._config.trainer.dtype):
            scores: TokenScores = self._reference(batch)
        self.progress.tick()
        return scores.logprobs


def _numel(parameter: torch.nn.Parameter) -> int:
    """Number of elements of a parameter, also if ZeRO-3 holds only a share of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@torch.no_grad()
def hidden_states(
    engine: TorchEngine, samples: Sequence[Sample], layers: Sequence[int], max_tokens: int
) -> list[torch.Tensor]:
    """Outputs of some decoder layers, side by side, at all positions but the last: `(tokens - 1, layers * hidden)`
    float32 on the CPU, one per sample.

    All ranks must call it with the same samples: ZeRO-3 gathers the weights over all ranks. The forward is the one that
    scores samples, for the same reason.

    Args:
        layers: Indices of decoder layers.
        max_tokens: Most tokens, including padding, in one forward.
    """
    states = [torch.empty(0)] * len(samples)
    for group in cut_by_tokens([sample.num_tokens for sample in samples], max_tokens):
        with layer_outputs(engine.policy.model, layers) as outputs:
            engine.score(collate(samples, group).to(engine.device))
        whole = torch.cat([outputs[layer] for layer in layers], dim=-1).float().cpu()
        for row, index in enumerate(group):
            states[index] = whole[row, : samples[index].num_tokens - 1].clone()
    return states
