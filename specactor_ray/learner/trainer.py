"""One rank of the trainer: the policy, its update, its weights for others, and its files. Independent of Ray.

Forwards of the policy are compared at load with transformers' eager forward in evaluation mode, whatever else is in the
micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specactor_ray.config.recipes import make_recipe, uses_values
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig, TrainerBackend
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.learner.batching import MicroBatch, Sample, collate
from specactor_ray.learner.deepspeed_engine import DeepSpeedEngine, Rendezvous, join
from specactor_ray.learner.engine import Forward, PolicyModel, SavedPart, Tick, TokenScores, TorchEngine
from specactor_ray.learner.update import PolicyUpdater
from specactor_ray.models.adapter import Adapter, policy_weights
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import load_model, load_tokenizer, recompute_layers, wrong_value_errors
from specactor_ray.models.packed_attention import PACKED_NAME, register
from specactor_ray.models.probe import eager_logprobs, far_from, probe_model
from specactor_ray.models.weight_buckets import WeightBucket, WeightLayout, grouped, pack

WEIGHTS, ADAPTER, ENGINE = "weights", "adapter", "engine"
"""Folders of a checkpoint: the model in the format of transformers, the adapter in that of peft (`trainer.lora`), and
the engine's training state."""


class Trainer:
    """Holds the policy, of a checkpoint or of `target.model`, and trains it. `rendezvous`: where deepspeed's ranks
    meet. Raises ModelLoadError, and ConfigError if the back end is not installed."""

    def __init__(self, config: Config, checkpoint: Path | None, rendezvous: Rendezvous, tick: Tick) -> None:
        self._config, self.tick = config, tick
        self._device = torch.device("cuda" if config.trainer.gpus else "cpu")
        recipe = make_recipe(config)
        self._adapter: Adapter | None = None
        if config.trainer.backend is TrainerBackend.deepspeed:
            join(rendezvous, self._device)
            policy = self._make_policy(checkpoint, recipe)
            self.engine: TorchEngine = DeepSpeedEngine(policy, config.trainer, rendezvous, self._device, tick)
        else:
            self.engine = TorchEngine(self._make_policy(checkpoint, recipe), config.trainer, tick)
        tick()
        if checkpoint:
            self.engine.load(checkpoint / ENGINE)
            tick()
        reference = None
        if config.algorithm.kl_coef and self._adapter is not None:
            reference = functools.partial(_without, self._adapter, self.engine.forward)
        elif config.algorithm.kl_coef:
            kept = PolicyModel(self._load(config.target.model, "cpu"), config.sampling.temperature)
            # Of the policy's architecture, which was compared.
            kept.model.set_attn_implementation(self.engine.policy.model.config._attn_implementation)
            reference = self.engine.frozen(kept)
        self._updater = PolicyUpdater(self.engine, recipe, config, reference)

    @property
    def rank(self) -> int:
        return self.engine.rank

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step; see `PolicyUpdater.update`."""
        return self._updater.update(samples, step, seed)

    @functools.cached_property
    def layout(self) -> WeightLayout:
        """The layout of the weights for verifiers."""
        target, size = self._config.target, self._config.trainer.weight_bucket_mb * 2**20
        trust, longest = target.trust_remote_code, target.max_model_len
        return WeightLayout.of(target.model, target.dtype, size, trust_remote_code=trust, max_model_len=longest)

    def buckets(self) -> Iterator[WeightBucket | None]:
        """The model's weights as verifiers hold them, bucket by bucket; None on ranks other than 0. All ranks iterate
        over it together."""
        weights, layout = ((one.name, one) for one in policy_weights(self.engine.policy.model)), self.layout
        for chosen in grouped(weights, lambda one: 4 * one.numel, layout.bucket_bytes):  # of at most 4 bytes each
            with self.engine.gathered([part for _, one in chosen for part in one.parameters]):
                merged = ((name, one.merged()) for name, one in chosen)
                yield pack(merged, layout.dtypes) if self.rank == 0 else None
            self.tick()

    def save(self, folder: Path) -> SavedPart:
        """Write the model (in the format of transformers, rank 0) and the engine's state (every rank). Disk errors are
        in the result; all ranks go through it together in any case."""
        part, engine_folder = SavedPart(folder), folder / ENGINE
        with part.writing():
            engine_folder.mkdir(parents=True, exist_ok=True)
        refused = self.engine.over_ranks(torch.tensor([float(bool(part.problem))]), maximum=True)
        if float(refused[0]):  # all ranks return together
            return part
        self.engine.save(engine_folder, part)
        state, matrices = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for one in policy_weights(self.engine.policy.model):
            with self.engine.gathered(one.parameters):
                if self.rank == 0:
                    state[one.name] = one.merged().detach().to("cpu", copy=True)
                    matrices |= {name: matrix.detach().to("cpu", copy=True) for name, matrix in one.matrices.items()}
            self.tick()
        if self.rank == 0:
            target = self._config.target
            tokenizer: Any = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
            with quiet_transformers(), part.writing(folder / WEIGHTS):
                self.engine.policy.model.save_pretrained(folder / WEIGHTS, state_dict=state)
                tokenizer.save_pretrained(folder / WEIGHTS)
            if self._adapter is not None:
                with part.writing(folder / ADAPTER):
                    self._adapter.save(folder / ADAPTER, matrices)
            self.tick()
        return part

    def _make_policy(self, checkpoint: Path | None, recipe: AlgorithmConfig) -> PolicyModel:
        trainer = self._config.trainer
        shared = trainer.backend is TrainerBackend.deepspeed and trainer.zero_stage == 3
        device = torch.device("cpu") if shared else self._device  # the whole may be larger than a device
        whole = checkpoint if trainer.lora.rank is None else None  # an adapter's base is what the run began with
        model = self._load(str(whole / WEIGHTS) if whole else self._config.target.model, str(device))
        if trainer.lora.rank is None:
            model.requires_grad_(True)
        else:
            saved = checkpoint / ADAPTER if checkpoint else None
            self._adapter = Adapter(model, trainer.lora, saved, self._config.sampling.seed)
        if trainer.gradient_checkpointing:
            recompute_layers(model)
        self.tick()
        temperature = self._config.sampling.temperature
        policy = PolicyModel(model, temperature, uses_values(recipe), bool(recipe.entropy_coef)).to(device)
        attend_as_in_eager_mode(policy)
        self.tick()
        return policy

    def _load(self, name: str, device: str) -> Any:
        trust, longest = self._config.target.trust_remote_code, self._config.target.max_model_len
        return load_model(name, device=device, trust_remote_code=trust, max_model_len=longest)


def _without(adapter: Adapter, forward: Forward, batch: MicroBatch, chunks: int) -> TokenScores:
    """Scores of the policy without its adapter: of the initial model."""
    with adapter.off():
        return forward(batch, chunks)


# ---- forwards of the policy beside transformers' ----


def attend_as_in_eager_mode(policy: PolicyModel) -> None:
    """Give a loaded policy the fastest attention that leaves nothing out: in packed rows, else padded by its own form,
    else eager. SDPA has no soft cap of scores, and what else differs shows in a comparison, of a sequence alone, beside
    a longer one and beside a shorter one. ModelLoadError: with eager attention, too, a sequence has other
    log-probabilities than in transformers."""
    model, found = policy.model, ""
    register()
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    own = "eager" if capped else model.config._attn_implementation
    # In 16 bits a few wrong positions, as of a convolution behind another sequence, could pass for rounding.
    exact = model.dtype == torch.float32
    for form in (*[PACKED_NAME] * exact, own, "eager"):
        try:
            model.set_attn_implementation(form)
            found = _difference(policy)
        except torch.OutOfMemoryError:
            raise
        except wrong_value_errors() as error:
            found = f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if not found:
            return
    raise ModelLoadError(
        f"{type(model).__name__} does not give the log-probabilities of transformers in a micro-batch of the "
        f"trainer: {found}. Fix: train another model"
    )


def _difference(policy: PolicyModel) -> str:
    """Where the policy differs from transformers by more than rounding explains; empty if it does not."""
    long = probe_model(policy.model)
    tokens = long.token_ids[::-1][: max(len(long.token_ids) // 3, 2)].copy()
    short = long._replace(token_ids=tokens, logprobs=eager_logprobs(policy.model, tokens))
    exact = policy.model.dtype == torch.float32
    (alone,) = _logprobs(policy, [long.token_ids])
    with_shorter, with_longer = _logprobs(policy, [long.token_ids, short.token_ids])
    for what, truth, found in (
        ("alone", long, alone),
        ("beside a shorter one", long, with_shorter),
        ("beside a longer one", short, with_longer),
    ):
        if far := far_from(truth, found, exact):
            return f"those of a sequence {what} differ by {far}"
    return ""


@torch.no_grad()
def _logprobs(policy: PolicyModel, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 `(n - 1,)` for each row of `n` tokens in one micro-batch: log-probabilities at temperature 1 of all its
    tokens but the first."""
    samples = [
        Sample(row[:1], row[1:], np.zeros(len(row) - 1, np.float32), 0.0, 0.0, np.ones(len(row) - 1, np.bool_))
        for row in (row.astype(np.int64) for row in rows)
    ]
    temperature, policy.temperature = policy.temperature, 1.0
    try:
        scores = policy(collate(samples, range(len(samples))).to(policy.model.device), chunks=2).logprobs
    finally:
        policy.temperature = temperature
    return [found[: len(row) - 1].cpu().numpy() for found, row in zip(scores, rows, strict=True)]
