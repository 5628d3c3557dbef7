"""One policy update from the samples of a step: the same for every algorithm and every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from specactor_ray.config.recipes import uses_values
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig, Importance, TrainerConfig
from specactor_ray.learner.algorithms import (
    Loss,
    LossInputs,
    function_of,
    generalized_advantages,
    importance_weights,
    kl_estimate,
    kl_loss,
    token_weights,
    value_loss,
)
from specactor_ray.learner.batching import MicroBatch, Sample, collate, cut_by_tokens, share_out
from specactor_ray.learner.engine import Forward, TokenScores, TorchEngine


@dataclass(slots=True)
class _Prepared:
    """One micro-batch with the values that are fixed during the update; ppo sets its advantages."""

    batch: MicroBatch
    weights: torch.Tensor
    """`(B, T)`: share of each token in the loss of its mini-batch."""
    old: TokenScores | None = None
    reference: torch.Tensor | None = None
    returns: torch.Tensor | None = None


class PolicyUpdater:
    """Turns samples into optimizer steps; `reference` is the forward of a KL term's model."""

    def __init__(
        self, engine: TorchEngine, recipe: AlgorithmConfig, config: Config, reference: Forward | None = None
    ) -> None:
        assert recipe.clip_low is not None and recipe.clip_high is not None  # filled by `make_recipe`
        self._engine, self._recipe, self._config = engine, recipe, config.trainer
        self._max_tokens = config.sampling.max_tokens
        self._reference = reference
        self._policy_loss: Loss = function_of(recipe, "loss")
        self._clips = (recipe.clip_low, recipe.clip_high, recipe.clip_dual)

    def update(self, samples: Sequence[Sample], step: int, seed: int) -> dict[str, float]:
        """Train on the samples of one step (from 0); every rank gets all of them, in the same order. `seed` orders them
        if there are several mini-batches. Returns metrics, the same on every rank; see `_Sums`."""
        sums = _Sums()
        rate = learning_rate(self._config, step)
        if not samples:  # for example if every rollout failed
            return {**dict.fromkeys(_Sums.ALWAYS, 0.0), "learning_rate": rate}
        mini_batches = self._cut(samples, seed)
        prepared = [self._prepare([samples[i] for i in part]) for part in mini_batches]
        if self._needs_old_scores:
            self._score_all([item for mini_batch in prepared for item in mini_batch], sums)
        for _ in range(self._config.epochs):
            for mini_batch in prepared:
                self._optimizer_step(mini_batch, rate, sums)
        metrics = sums.reduced(self._engine)
        metrics["learning_rate"] = rate
        return metrics

    @property
    def _needs_old_scores(self) -> bool:
        """Whether scores from before the update are needed; with a single optimizer step they are the current ones."""
        return self._config.epochs * self._config.mini_batches > 1 or uses_values(self._recipe)

    def _cut(self, samples: Sequence[Sample], seed: int) -> list[list[int]]:
        order = np.arange(len(samples))
        parts = min(self._config.mini_batches, len(samples))
        if parts > 1:
            order = np.random.default_rng(seed).permutation(len(samples))
        return [sorted(int(i) for i in part) for part in np.array_split(order, parts)]

    def _prepare(self, samples: list[Sample]) -> list[_Prepared]:
        """This rank's micro-batches of one mini-batch."""
        engine = self._engine
        lengths = [sample.num_tokens for sample in samples]
        groups = cut_by_tokens(lengths, self._config.micro_batch_tokens, engine.policy.packed)
        masks = [torch.tensor(sample.loss_mask, dtype=torch.float32) for sample in samples]
        weights = token_weights(self._recipe, pad_sequence(masks, batch_first=True), self._max_tokens)
        result = []
        for group in share_out(groups, engine.world_size)[engine.rank]:
            batch = collate(samples, group).to(engine.device)
            width = batch.mask.shape[1]
            of_rows = weights[list(group), :width] if group else torch.zeros_like(batch.mask)
            result.append(_Prepared(batch, of_rows.to(engine.device)))
        return result

    @torch.no_grad()
    def _score_all(self, items: Sequence[_Prepared], sums: _Sums) -> None:
        for item in items:
            item.old = self._engine.score(item.batch)
            sums.add_gap(item.batch, item.old)
        if uses_values(self._recipe):
            self._estimate_advantages(items)

    def _estimate_advantages(self, items: Sequence[_Prepared]) -> None:
        """GAE for all samples of the step, whitened over them."""
        over_ranks, estimates = self._engine.over_ranks, list[torch.Tensor]()
        for item in items:
            assert item.old is not None  # scored just before
            estimate, returns = generalized_advantages(
                item.batch.rewards, item.old.values, item.batch.mask, self._recipe.gae_lambda
            )
            item.returns = returns.float()
            estimates.append(estimate)
        masks = [item.batch.mask.double() for item in items]
        count = over_ranks(_total(masks))
        # Two passes: the difference of two large moments would be rounding.
        mean = over_ranks(_total([a * mask for a, mask in zip(estimates, masks, strict=True)])) / count
        centred = [(a - mean.to(a.device)) * mask for a, mask in zip(estimates, masks, strict=True)]
        variance = over_ranks(_total([a.square() for a in centred])) / count
        for item, a in zip(items, centred, strict=True):
            item.batch = replace(item.batch, advantages=(a / (variance + 1e-8).sqrt().to(a.device)).float())

    def _optimizer_step(self, mini_batch: Sequence[_Prepared], rate: float, sums: _Sums) -> None:
        bad = torch.zeros(1)
        for number, item in enumerate(mini_batch):
            if self._reference is not None and item.reference is None:
                with torch.no_grad():
                    item.reference = self._engine.score(item.batch, self._reference).logprobs
            scores = self._engine.score(item.batch)
            if not self._needs_old_scores:
                sums.add_gap(item.batch, scores)
            loss = self._loss(item, scores, sums)
            bad += float(not bool(torch.isfinite(loss.detach())))
            self._engine.backward(loss, last=number == len(mini_batch) - 1)
        if float(self._engine.over_ranks(bad)) > 0:
            self._engine.skip()
            sums.skipped += 1
            return
        norm = self._engine.step(rate)
        if math.isfinite(norm):
            sums.grad_norms.append(norm)
            sums.no_gradient += norm == 0.0
        else:
            sums.skipped += 1

    def _loss(self, item: _Prepared, scores: TokenScores, sums: _Sums) -> torch.Tensor:
        """Share of this micro-batch in the loss of its mini-batch."""
        recipe, batch, weights = self._recipe, item.batch, item.weights
        old = (item.old.logprobs if item.old is not None else scores.logprobs).detach()
        rollout, mask = batch.rollout_logprobs, batch.mask
        inputs = LossInputs(scores.logprobs, old, rollout, batch.advantages, mask, scores.entropy, *self._clips)
        per_token, metrics = self._policy_loss(inputs)
        for name, values in metrics.items():
            sums.add(name, values, mask)
        if recipe.importance is not Importance.off:
            assert recipe.importance is not None and recipe.importance_cap is not None
            correction = importance_weights(old, rollout, mask, recipe.importance, recipe.importance_cap)
            per_token = per_token * correction
            sums.add("importance_weight", correction, mask)
            sums.add("importance_ess", correction.square(), mask)
        sums.add_loss("policy_loss", per_token, weights)
        sums.add("entropy", scores.entropy, mask)
        if recipe.entropy_coef:
            per_token = per_token - recipe.entropy_coef * scores.entropy
        if item.reference is not None:
            per_token = per_token + recipe.kl_coef * kl_loss(scores.logprobs, old, item.reference, recipe.clip_dual)
            sums.add("kl", kl_estimate(scores.logprobs, item.reference), mask)
        if uses_values(recipe):
            assert item.old is not None and item.returns is not None
            value = value_loss(scores.values, item.old.values, item.returns)
            per_token = per_token + recipe.value_coef * value
            sums.add_loss("value_loss", value, weights)
        sums.add_loss("loss", per_token, weights)
        return (per_token * weights).sum()


def _total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all elements, a float64 scalar on the CPU."""
    return torch.stack([value.sum().cpu() for value in values]).sum()


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Learning rate of a step (from 0): linear warm-up, then the schedule, which reaches 0 at step
    `trainer.steps`, one after the last."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    factors: Mapping[str, float] = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))),
    }
    return config.learning_rate * max(factors[config.schedule.value], 0.0)


class _Sums:
    """Adds up metrics over micro-batches; `reduced` adds those of the ranks.

    Means per token: entropy, kl, importance_weight, those of the loss (clip_fraction), logprob_gap (|rollout -
    trainer|), logprob_gap_kl (KL(rollout ‖ trainer)). Means per optimizer step: loss, policy_loss, value_loss,
    grad_norm. Also importance_ess, logprob_gap_max, and the numbers of optimizer steps left out: skipped, as the loss
    or the gradient was not finite, and no_gradient, as it was 0.
    """

    ALWAYS = (
        *("loss", "policy_loss", "entropy", "clip_fraction", "grad_norm", "skipped", "no_gradient"),
        *("logprob_gap", "logprob_gap_kl", "logprob_gap_max"),
    )

    def __init__(self) -> None:
        self.skipped = self.no_gradient = 0
        self.grad_norms: list[float] = []
        self._sums: dict[str, list[float]] = {}
        """Name → sum, and number of tokens; of a loss 0."""
        self._gap_max = 0.0

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        self.add_loss(name, values, mask)
        self._sums[name][1] += float(mask.sum())

    def add_loss(self, name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += float((values.detach() * weights).sum())

    def add_gap(self, batch: MicroBatch, scores: TokenScores) -> None:
        logprobs = scores.logprobs.detach()
        gap = (logprobs - batch.rollout_logprobs).abs() * batch.mask
        self.add("logprob_gap", gap, batch.mask)
        self.add("logprob_gap_kl", kl_estimate(batch.rollout_logprobs, logprobs), batch.mask)
        self._gap_max = max(self._gap_max, float(gap.max()))

    def reduced(self, engine: TorchEngine) -> dict[str, float]:
        """The metrics over all ranks."""
        names, steps = sorted(self._sums), max(len(self.grad_norms) + self.skipped, 1)
        flat = torch.tensor([self._sums[name] for name in names], dtype=torch.float64)
        totals = engine.over_ranks(flat).tolist()
        metrics = {name: total / (tokens or steps) for name, (total, tokens) in zip(names, totals, strict=True)}
        if "importance_ess" in metrics:  # (Σ w)² / (n Σ w²)
            squares = metrics["importance_ess"]
            metrics["importance_ess"] = metrics["importance_weight"] ** 2 / squares if squares else 0.0
        metrics["logprob_gap_max"] = float(
            engine.over_ranks(torch.tensor([self._gap_max], dtype=torch.float64), maximum=True)
        )
        metrics["grad_norm"] = sum(self.grad_norms) / max(len(self.grad_norms), 1)
        metrics["skipped"], metrics["no_gradient"] = float(self.skipped), float(self.no_gradient)
        return metrics
