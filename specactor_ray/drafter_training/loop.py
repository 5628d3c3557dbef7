"""The training loop: batches, schedule, held-out figures, checkpoints, time budget.

Weights after n steps are a function of recipe and corpus, also when training was interrupted: between two steps the
state is whole, and a checkpoint holds all of it. Only where the time budget sets the learning rate does the clock
enter.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specactor_ray.drafter_training.batches import add_sums, batches_of_epoch, cut, load_batch, means
from specactor_ray.drafter_training.corpus import Record, RecordStore
from specactor_ray.drafter_training.eagle_student import EagleStudent
from specactor_ray.drafter_training.recipe import TrainRecipe
from specactor_ray.errors import InputError
from specactor_ray.files import replacing
from specactor_ray.learner.engines.torch_engine import parameter_groups

logger = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.pt"
_HELD_OUT_TOKENS = 2048
"""Most output tokens that the figures during training are made from."""


@dataclass(slots=True)
class LoopState:
    """Where training is, between two steps."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Batches of this epoch that are done."""
    seconds: float = 0.0
    """Time spent in training so far."""
    tokens: int = 0
    """Output tokens learnt from so far, repetitions included."""
    skipped: int = 0
    """Steps left out because the gradient was not finite."""
    history: list[dict[str, float]] = field(default_factory=list)
    """A record per measurement on held-out rollouts: step, seconds, loss, matches, and the training loss since."""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """What there is to show after a step."""

    fraction: float
    """Of the budget, 0 to 1."""
    step: int
    loss: float
    tokens_per_s: float
    match_rate: float
    """Of the last measurement."""


class TrainLoop:
    """Trains a student on recorded rollouts.

    Args:
        student: On its device.
        recipe: Budget, schedule and batches.
        train: Records to learn from, with the store that holds their states.
        held_out: Records to measure on, with theirs.
        folder: Of the checkpoint.
        clock: Monotonic seconds.
        shield: What runs inside is not interrupted by a signal.
        checkpoint_s: Seconds between checkpoints.
        measure_s: Seconds between measurements on held-out rollouts.
        on_progress: Called after every step.
    """

    def __init__(
        self,
        student: EagleStudent,
        recipe: TrainRecipe,
        train: tuple[Sequence[Record], RecordStore],
        held_out: tuple[Sequence[Record], RecordStore],
        folder: Path,
        clock: Callable[[], float],
        shield: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        checkpoint_s: float = 120.0,
        measure_s: float = 60.0,
        on_progress: Callable[[LoopProgress], None] | None = None,
    ) -> None:
        self.student, self.state = student, LoopState()
        self._recipe, self._clock, self._shield, self._show = recipe, clock, shield, on_progress
        self._train, self._store = train
        self._held_out = _held_out_batches(*held_out, recipe.batch_tokens)
        self._path = folder / CHECKPOINT_FILE
        self._checkpoint_s, self._measure_s = checkpoint_s, measure_s
        self._optimizer = torch.optim.AdamW(
            parameter_groups(student.module, recipe.weight_decay), lr=recipe.learning_rate, betas=(0.9, 0.95)
        )
        self._since: dict[str, float] = {}
        self._order: list[list[int]] = []
        self._of_epoch = -1

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder; False if there is none.

        Raises:
            InputError: It cannot be read.
        """
        if not self._path.is_file():
            return False
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
            self.student.load_trained(saved["student"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.state = LoopState(**saved["state"])
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{self._path} cannot be read ({reason}). Fix: remove it; training then begins anew"
            ) from None
        return True

    def run(self) -> LoopState:
        """Train until the budget is used; an interruption saves a checkpoint and goes on upwards.

        Raises:
            KeyboardInterrupt: It was interrupted, at the end of a step.
            OSError: A checkpoint could not be written.
        """
        begin, state = self._clock() - self.state.seconds, self.state
        saved_at = measured_at = state.seconds
        try:
            if not state.history:
                self._measure()
            while self.fraction < 1.0:
                with self._shield():
                    self._step()
                    state.seconds = self._clock() - begin
                if state.seconds - measured_at >= self._measure_s:
                    self._measure()
                    measured_at = state.seconds
                if state.seconds - saved_at >= self._checkpoint_s:
                    self.save()
                    saved_at = state.seconds
            if state.history[-1]["step"] < state.step:
                self._measure()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return state

    @property
    def fraction(self) -> float:
        """Share of the budget that is used: of the time or of the epochs, whichever is further."""
        recipe, state = self._recipe, self.state
        by_time = 0.0 if recipe.minutes is None else state.seconds / (60.0 * recipe.minutes)
        by_epochs = 0.0
        if recipe.epochs is not None:
            by_epochs = (state.epoch + state.position / max(len(self._batches()), 1)) / recipe.epochs
        return min(max(by_time, by_epochs), 1.0)

    def save(self) -> None:
        """Write the checkpoint; the one before it stays until the new one is whole."""
        with self._shield():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            state = {name: getattr(self.state, name) for name in LoopState.__dataclass_fields__}
            content = {"student": self.student.trained(), "optimizer": self._optimizer.state_dict(), "state": state}
            with replacing(self._path, self._path.with_suffix(".partial")) as partial:
                torch.save(content, partial)

    def _batches(self) -> list[list[int]]:
        if self._of_epoch != self.state.epoch:
            self._of_epoch = self.state.epoch
            recipe = self._recipe
            self._order = batches_of_epoch(self._train, recipe.batch_tokens, recipe.corpus.seed, self._of_epoch)
        return self._order

    def _step(self) -> None:
        state, batches = self.state, self._batches()
        begin = self._clock()
        chosen = [self._train[i] for i in batches[state.position]]
        rate = learning_rate(self._recipe, state.step, self.fraction)
        sums = self.student.backward(load_batch(chosen, self._store.states))
        self._update(rate)
        state.step, state.position = state.step + 1, state.position + 1
        state.tokens += int(sums["tokens"])
        if state.position == len(batches):
            state.epoch, state.position = state.epoch + 1, 0
        add_sums(self._since, sums)
        if self._show is not None:
            seconds = max(self._clock() - begin, 1e-9)
            match_rate = state.history[-1]["matches"]
            loss = means(sums)["loss"]
            self._show(LoopProgress(self.fraction, state.step, loss, sums["tokens"] / seconds, match_rate))

    def _update(self, rate: float) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(self.student.module.parameters(), self._recipe.max_grad_norm))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self.state.skipped += 1
            logger.warning("step %d is left out: its gradient is not finite", self.state.step)
        self._optimizer.zero_grad(set_to_none=True)

    def _measure(self) -> None:
        sums: dict[str, float] = {}
        for batch in self._held_out():
            add_sums(sums, self.student.held_out(batch))
        record = {"step": float(self.state.step), "seconds": self.state.seconds, **means(sums)}
        record |= {f"train_{name}": value for name, value in means(self._since).items()}
        self._since = {}
        self.state.history.append(record)


def learning_rate(recipe: TrainRecipe, step: int, fraction: float) -> float:
    """Of a step (from 0): linear warm-up over `warmup_steps`, times half a cosine to 0 at the end of the budget."""
    warm_up = min(1.0, (step + 1) / max(recipe.warmup_steps, 1))
    return recipe.learning_rate * warm_up * 0.5 * (1.0 + math.cos(math.pi * min(fraction, 1.0)))


def _held_out_batches(records: Sequence[Record], store: RecordStore, max_tokens: int) -> Callable[[], Any]:
    """Batches of the first held-out records, read afresh at each measurement."""
    chosen: list[Record] = []
    for record in records:
        if chosen and sum(len(r.output_token_ids) for r in chosen) + len(record.output_token_ids) > _HELD_OUT_TOKENS:
            break
        chosen.append(record)
    order = sorted(range(len(chosen)), key=lambda i: (chosen[i].num_tokens, i))
    groups = cut(chosen, order, max_tokens)

    def batches() -> Any:
        return (load_batch([chosen[i] for i in group], store.states) for group in groups)

    return batches
