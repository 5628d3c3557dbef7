"""Pruning, the loss and its gradient, and the loop: it learns, and an interruption changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.drafter_training.distill import DraftModelStudent, head_of
from specactor_ray.drafter_training.evaluation import replay
from specactor_ray.drafter_training.loop import CHECKPOINT_FILE, LoopProgress, TrainLoop, learning_rate
from specactor_ray.drafter_training.pruning import prune_layers
from specactor_ray.drafter_training.recipe import CorpusRecipe, TrainRecipe
from specactor_ray.drafter_training.student import load_batch
from specactor_ray.errors import InputError
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from tests.by_name import ByName
from tests.tiny import tiny_target
from tests.unit.drafter_training.recorded import recorded


def recipe(epochs: float = 5.0, **changes: Any) -> TrainRecipe:
    corpus = CorpusRecipe(str(tiny_target()))
    return TrainRecipe(corpus, layers="2", minutes=None, epochs=epochs, learning_rate=3e-3, **changes)


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def make_loop(folder: Path, wanted: TrainRecipe, **options: Any) -> TrainLoop:
    student = DraftModelStudent.from_recipe(wanted, "cpu")
    return TrainLoop(student, wanted, recorded("train"), recorded("heldout"), folder, Clock(), **options)


def weights_of(loop: TrainLoop) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in loop.student.trained().items()}


class TestPruning:
    def test_kept_layers_and_everything_else_are_the_targets(self) -> None:
        target = load_model(str(tiny_target()))
        pruned = prune_layers(target, (0, 3))
        assert pruned.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 4
        theirs, ours = target.state_dict(), pruned.state_dict()
        for name, weight in ours.items():
            origin = name.replace("layers.1.", "layers.3.")
            assert torch.equal(weight, theirs[origin])
            assert weight.data_ptr() != theirs[origin].data_ptr(), "training must not change the target"
        assert len(ours) < len(theirs)
        assert pruned.generation_config.eos_token_id == target.generation_config.eos_token_id

    def test_all_layers_give_the_target(self) -> None:
        target = load_model(str(tiny_target()))
        ids = torch.arange(5, 25)[None]
        with torch.no_grad():
            assert torch.equal(prune_layers(target, range(4))(ids).logits, target(ids).logits)

    @pytest.mark.parametrize("family", ["GPT2", "Qwen3", "Gemma2"])
    def test_other_families(self, family: str) -> None:
        import transformers

        shapes: dict[str, dict[str, Any]] = {
            "GPT2": {"n_embd": 16, "n_layer": 4, "n_head": 2},
            "Qwen3": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
                      "num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"] * 4},
            "Gemma2": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
                       "num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 0.05},
        }  # fmt: skip
        config = getattr(transformers, f"{family}Config")(vocab_size=64, pad_token_id=0, **shapes[family])
        target = transformers.AutoModelForCausalLM.from_config(config).eval()
        pruned = prune_layers(target, (0, 3))
        ids = torch.arange(10)[None]
        with torch.no_grad():
            logits = pruned(ids).logits[0]
            states = pruned.base_model(ids).last_hidden_state[0]
            assert torch.allclose(head_of(pruned)(states), logits, atol=1e-6)
        assert logits.shape == (10, 64)
        if family == "Gemma2":
            assert pruned.config.layer_types == [target.config.layer_types[0], target.config.layer_types[3]]
            assert float(logits.abs().max()) <= 0.05, "the soft cap belongs to the logits"


class TestLoss:
    def test_value_and_gradient_are_those_of_autograd(self) -> None:
        wanted = recipe(1.0)
        student = DraftModelStudent.from_recipe(wanted, "cpu")
        student._temperature = 0.7
        records, store = recorded("train")
        batch = load_batch(records[:3], store.states)
        num_outputs = sum(len(record.output_token_ids) for record in batch.records)
        sums = student.backward(batch)
        ours = {name: weight.grad.clone() for name, weight in student.trained().items() if weight.grad is not None}
        student.model.zero_grad()
        target, total = load_model(str(tiny_target())), torch.zeros(())
        for record in batch.records:
            context = torch.tensor([[*record.prompt_token_ids, *record.output_token_ids]])
            span = slice(len(record.prompt_token_ids) - 1, -1)
            q = torch.log_softmax(student.model(context).logits[0, span] / 0.7, dim=-1)
            p = torch.log_softmax(target(context).logits[0, span] / 0.7, dim=-1)
            total = total + torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
        assert sums["tokens"] == num_outputs
        assert sums["loss"] == pytest.approx(float(total.detach()), rel=1e-3)
        (total / num_outputs).backward()
        assert ours.keys() == student.trained().keys()
        for name, weight in student.trained().items():
            assert weight.grad is not None
            assert torch.allclose(ours[name], weight.grad, atol=1e-4), name

    def test_matches_are_what_the_proposer_hits_after_the_recorded_prefix(self) -> None:
        student = DraftModelStudent.from_recipe(recipe(), "cpu")
        records, store = recorded("heldout")
        records = records[:8]
        sums = student.held_out(load_batch(records, store.states))
        # With a window of 1 each step drafts one token after a prefix that is the target's own.
        proposer = ByName(DraftModelProposer(RaggedModel(student.model, 64 << 20)))
        hits = 0
        for record in records:
            sampling = record.sampling
            for position in range(len(record.output_token_ids)):
                proposer.open("r", record.prompt_token_ids, record.output_token_ids[:position], sampling, 1)
                proposer.extend()
                hits += proposer.tail("r")[1] == record.output_token_ids[position : position + 1]
        assert hits == sums["matches"]


class TestLoop:
    def test_distillation_lowers_the_loss_and_raises_acceptance(self, tmp_path: Path) -> None:
        loop = make_loop(tmp_path, recipe())
        records, _ = recorded("heldout")

        def acceptance() -> float:
            loop.student.save(tmp_path / "draft")
            model = RaggedModel(load_model(str(tmp_path / "draft")), 64 << 20)
            return replay(DraftModelProposer(model), records, 4).acceptance_length

        before = acceptance()
        state = loop.run()
        assert state.history[-1]["loss"] < 0.4 * state.history[0]["loss"]
        assert state.history[-1]["matches"] > state.history[0]["matches"] + 0.1
        assert acceptance() > before + 0.5
        frozen = load_model(str(tiny_target())).state_dict()
        for name, weight in load_model(str(tmp_path / "draft")).state_dict().items():
            if "layers." not in name:
                assert torch.equal(weight, frozen[name]), "embeddings, last norm and output layer stay the target's"

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
        wanted = TrainRecipe(CorpusRecipe(str(tiny_target())), layers="2", minutes=1.0)
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
                next(iter(loop.student.trained().values())).grad.fill_(float("inf"))
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
