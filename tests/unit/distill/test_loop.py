"""The training loop: the head learns, and an interruption changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.distill.eagle_student import EagleStudent
from specactor_ray.distill.loop import CHECKPOINT_FILE, LoopProgress, TrainLoop, learning_rate
from specactor_ray.distill.recipe import CorpusRecipe, TrainRecipe
from tests.tiny import tiny_target
from tests.unit.distill.recorded import recorded


def recipe(epochs: float = 5.0, **changes: Any) -> TrainRecipe:
    corpus = CorpusRecipe(str(tiny_target()))
    return TrainRecipe(corpus, draft_vocab=256, depths=2, minutes=None, epochs=epochs, **changes)


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def make_loop(folder: Path, wanted: TrainRecipe, **options: Any) -> TrainLoop:
    student, (records, store) = EagleStudent(wanted, "cpu"), recorded("train")
    student.prepare(records, store.states)
    return TrainLoop(student, wanted, (records, store), recorded("heldout"), folder, Clock(), **options)


def weights_of(loop: TrainLoop) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in loop.student.trained().items()}


class TestLoop:
    def test_training_lowers_the_loss_and_raises_the_match_rate(self, tmp_path: Path) -> None:
        history = make_loop(tmp_path, recipe()).run().history
        assert history[-1]["loss"] < 0.8 * history[0]["loss"]
        assert history[-1]["matches"] > history[0]["matches"] + 0.05

    def test_resumed_training_gives_the_same_weights(self, tmp_path: Path) -> None:
        whole = make_loop(tmp_path / "whole", recipe(2.0))
        whole.run()

        def interrupt(progress: LoopProgress) -> None:
            if progress.step in (3, whole.state.step // 2 + 2):
                raise KeyboardInterrupt

        for _ in range(2):
            loop = make_loop(tmp_path / "parts", recipe(2.0), on_progress=interrupt)
            loop.resume()
            with pytest.raises(KeyboardInterrupt):
                loop.run()
        last = make_loop(tmp_path / "parts", recipe(2.0))
        assert last.resume() and last.state.step == whole.state.step // 2 + 2
        assert last.run().step == whole.state.step and last.state.tokens == whole.state.tokens
        expected = weights_of(whole)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(last).items())

    def test_a_time_budget_ends_training_also_across_a_resume(self, tmp_path: Path) -> None:
        wanted = TrainRecipe(CorpusRecipe(str(tiny_target())), draft_vocab=256, depths=2, minutes=1.0)
        loop = make_loop(tmp_path, wanted, on_progress=lambda progress: None, checkpoint_s=10.0)
        state = loop.run()
        assert 60.0 <= state.seconds < 75.0 and 1 < state.step < 60
        again = make_loop(tmp_path, wanted)
        assert again.resume() and again.run().step == state.step, "the budget is used up"

    def test_a_damaged_checkpoint_is_named(self, tmp_path: Path) -> None:
        (tmp_path / CHECKPOINT_FILE).write_bytes(b"PK\x03\x04 nothing of use")
        with pytest.raises(InputError, match=CHECKPOINT_FILE):
            make_loop(tmp_path, recipe()).resume()

    def test_a_gradient_that_is_not_finite_is_left_out(self, tmp_path: Path) -> None:
        loop = make_loop(tmp_path, recipe(0.3))
        backward = loop.student.backward

        def poisoned(batch: Any) -> dict[str, float]:
            sums = backward(batch)
            if loop.state.step == 1:
                loop.student.module.fc.weight.grad.fill_(float("inf"))
            return sums

        loop.student.backward = poisoned  # type: ignore[method-assign]
        state = loop.run()
        assert state.skipped == 1 and math.isfinite(state.history[-1]["loss"])


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    wanted = recipe()
    assert learning_rate(wanted, 0, 0.0) == pytest.approx(wanted.learning_rate / wanted.warmup_steps)
    assert learning_rate(wanted, 50, 0.0) == pytest.approx(wanted.learning_rate)
    assert learning_rate(wanted, 50, 0.5) == pytest.approx(wanted.learning_rate / 2)
    assert learning_rate(wanted, 50, 1.0) == pytest.approx(0.0, abs=1e-12)
