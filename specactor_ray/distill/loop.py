"""The training loop: batches, schedule, held-out figures, checkpoints, time budget.

Weights after n steps are a function of recipe and corpus, also if training was interrupted: between two steps the state
is complete, and a checkpoint holds all of it. Only a learning rate that follows the time budget depends on the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import replacing
from specactor_ray.distill.corpus import CorpusRecord, RecordStore
from specactor_ray.distill.eagle_student import Batch, EagleStudent
from specactor_ray.distill.recipe import TrainRecipe
from specactor_ray.learner.batching import cut_by_tokens
from specactor_ray.learner.engine import parameter_groups

logger = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.pt"
_BUCKET = 16
"""Number of batches whose records are sorted by length together: less padding, and still a new mix every epoch."""
_HELD_OUT_TOKENS = 2048
"""Most output tokens of the measurements during training."""


@dataclass(slots=True)
class LoopState:
    """State of training between two steps."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Number of finished batches of this epoch."""
    seconds: float = 0.0
    """Seconds of training so far."""
    tokens: int = 0
    """Number of output tokens trained on so far, including repetitions."""
    skipped: int = 0
    """Number of steps left out because the gradient was not finite."""
    history: list[dict[str, float]] = field(default_factory=list)
    """A record per measurement on held-out rollouts: step, seconds, loss, matches, and the training loss since."""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """Figures to show after a step."""

    fraction: float
    """Used share of the budget, 0 to 1."""
    step: int
    loss: float
    tokens_per_s: float
    match_rate: float
    """Match rate of the last measurement."""


class TrainLoop:
    """Trains a student on recorded rollouts.

    Args:
        train: Records to train on, with the store that holds their states.
        held_out: Records to measure on, with their store.
        clock: Monotonic seconds.
        shield: Context manager in which signals do not interrupt.
        checkpoint_s: Seconds between checkpoints.
        measure_s: Seconds between measurements on held-out rollouts.
        on_progress: Called after every step.
    """

    def __init__(
        self,
        student: EagleStudent,
        recipe: TrainRecipe,
        train: tuple[Sequence[CorpusRecord], RecordStore],
        held_out: tuple[Sequence[CorpusRecord], RecordStore],
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
        self._held_out, self._held_out_store = _first(held_out[0], _HELD_OUT_TOKENS), held_out[1]
        self._path = folder / CHECKPOINT_FILE
        self._checkpoint_s, self._measure_s = checkpoint_s, measure_s
        self._optimizer = torch.optim.AdamW(
            parameter_groups(student.module, recipe.weight_decay), lr=recipe.learning_rate, betas=(0.9, 0.95)
        )
        self._since: dict[str, float] = {}
        self._order: list[list[int]] = []
        self._of_epoch = -1

    def resume(self) -> bool:
        """Continue from the checkpoint in the folder; False if there is none. Raises InputError if it is unreadable."""
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
        """Train until the budget is used; an interruption saves a checkpoint and is raised again.

        Raises:
            KeyboardInterrupt: Training was interrupted, at the end of a step.
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
        """Used share of the budget: of the time or of the epochs, whichever is larger."""
        recipe, state = self._recipe, self.state
        by_time = 0.0 if recipe.minutes is None else state.seconds / (60.0 * recipe.minutes)
        by_epochs = 0.0
        if recipe.epochs is not None:
            by_epochs = (state.epoch + state.position / max(len(self._batches()), 1)) / recipe.epochs
        return min(max(by_time, by_epochs), 1.0)

    def save(self) -> None:
        """Write the checkpoint; the previous one stays until the new one is complete."""
        with self._shield():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            state, optimizer = asdict(self.state), self._optimizer.state_dict()
            content = {"student": self.student.trained(), "optimizer": optimizer, "state": state}
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
        rate = learning_rate(self._recipe, state.step, self.fraction)
        sums = self.student.backward(_load(self._train, batches[state.position], self._store))
        self._update(rate)
        state.step, state.position = state.step + 1, state.position + 1
        state.tokens += int(sums["tokens"])
        if state.position == len(batches):
            state.epoch, state.position = state.epoch + 1, 0
        _add(self._since, sums)
        if self._show is not None:
            seconds = max(self._clock() - begin, 1e-9)
            match_rate = state.history[-1]["matches"]
            loss = _means(sums)["loss"]
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
        for group in cut_by_tokens(self._held_out, self._recipe.batch_tokens, longest_first=False):
            _add(sums, self.student.held_out(_load(self._held_out, group, self._held_out_store)))
        record = {"step": float(self.state.step), "seconds": self.state.seconds, **_means(sums)}
        record |= {f"train_{name}": value for name, value in _means(self._since).items()}
        self._since = {}
        self.state.history.append(record)


def learning_rate(recipe: TrainRecipe, step: int, fraction: float) -> float:
    """Learning rate of a step (from 0): linear warm-up over `warmup_steps`, times half a cosine to 0 at the end."""
    warm_up = min(1.0, (step + 1) / max(recipe.warmup_steps, 1))
    return recipe.learning_rate * warm_up * 0.5 * (1.0 + math.cos(math.pi * min(fraction, 1.0)))


def batches_of_epoch(records: Sequence[CorpusRecord], max_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices into `records`, each once, in batches of similar lengths; a function of the arguments.

    Args:
        max_tokens: Most positions of a batch, including padding; a longer record is a batch by itself.
    """
    rng = np.random.default_rng([seed, epoch])
    order = [int(i) for i in rng.permutation(len(records))]
    mean = sum(record.num_tokens for record in records) / max(len(records), 1)
    size = max(int(_BUCKET * max_tokens / max(mean, 1.0)), 1)
    batches: list[list[int]] = []
    for begin in range(0, len(order), size):
        bucket = sorted(order[begin : begin + size])
        groups = cut_by_tokens([records[i] for i in bucket], max_tokens, longest_first=False)
        batches += [[bucket[place] for place in group] for group in groups]
    return [batches[int(i)] for i in rng.permutation(len(batches))]


def _first(records: Sequence[CorpusRecord], max_tokens: int) -> list[CorpusRecord]:
    """The first records, up to `max_tokens` output tokens, and at least one."""
    totals = itertools.accumulate(len(record.output_token_ids) for record in records)
    count = sum(total <= max_tokens for total in totals)
    return list(records[: max(count, 1)])


def _load(records: Sequence[CorpusRecord], chosen: Sequence[int], store: RecordStore) -> Batch:
    return [(records[index], store.states(records[index].index)) for index in chosen]


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    for name, value in part.items():
        total[name] = total.get(name, 0.0) + value


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens → means per token, without `tokens` itself."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {name: value / tokens for name, value in sums.items() if name != "tokens"}
