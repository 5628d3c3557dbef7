"""Trainer ranks as processes: several DeepSpeed ranks agree with one process, files bring everything back and hold data
only, and no other machine reaches the ranks."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.config.training_schema import OnlineConfig, OnlineWhere, TrainerConfig
from specactor_ray.core.errors import InputError, ModelLoadError
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.learner import deepspeed_engine
from specactor_ray.learner import engine as forwards
from specactor_ray.learner.engine import SavedPart
from specactor_ray.models.loading import load_model, tied
from specactor_ray.models.probe import eager_logprobs
from specactor_ray.models.weight_buckets import unpack
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, find_damage
from tests.fakes.forked_ranks import ForkedRanks, run_forked
from tests.families import VOCAB_SIZE, save_model
from tests.ports import free_port
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.learner.test_update import config as make_config
from tests.unit.learner.test_update import make_samples

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
STEPS = 2
CASES = [(1, "dapo", None), (2, "ppo", None), (3, "grpo", None), (3, "grpo", 4)]
RATE, SAME, CLEAR = 0.1, 1e-6, 1e-5
"""Learning rate of plain descent. Largest difference of a weight after it that is rounding. Gradients above the last
are not, by far."""
HEAD_WEIGHT = "layers.0.self_attn.q_proj.weight"
ONLINE = OnlineConfig(where=OnlineWhere.trainer, learning_rate=1e-3, batch_tokens=64, steps_per_version=2, depths=2)


def settings(backend: str = "torch", stage: int = 2, algorithm: str = "grpo", rank: int | None = None) -> Config:
    config = make_config(name=algorithm)
    config.target.model, config.target.dtype = str(tiny_target()), "float32"  # else weights are rounded when exported
    config.trainer.backend = type(config.trainer.backend)(backend)
    config.trainer.zero_stage = stage
    config.trainer.ranks = 1 if backend == "torch" else 2
    config.trainer.micro_batch_tokens = 60
    config.trainer.lora.rank = rank
    config.trainer.mini_batches = 2
    config.trainer.weight_bucket_mb = 1
    return config


def weights_of(ranks: ForkedRanks, name: str = str(tiny_target())) -> dict[str, torch.Tensor]:
    exported = ranks.export_weights(1)
    assert exported.num_bytes == sum(bucket.data.nbytes for bucket in exported.buckets)
    weights = {name: tensor.clone() for bucket in exported.buckets for name, tensor in unpack(bucket)}
    model = load_model(name)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= tied(model).keys() and not unexpected
    assert exported.probe is not None
    np.testing.assert_allclose(exported.probe.logprobs, eager_logprobs(model, exported.probe.token_ids), atol=1e-4)
    return weights


def run(
    config: Config,
    steps: range,
    checkpoint: Path | None = None,
    heads: list[torch.Tensor] | None = None,
    prepare: Callable[[], None] | None = None,
    vocab_size: int = 512,
) -> tuple[dict, dict]:
    """Weights and metrics after these steps. With `heads` a drafter is taught too; a weight of it is added to them."""
    if heads is not None:
        config.mode = ModeName.decoupled
        config.drafters = [DrafterConfig(method="eagle", model=str(tiny_eagle()), online=ONLINE)]
    with ForkedRanks(config, checkpoint, prepare) as ranks:
        for step in steps:
            samples = [
                replace(one, prompt=one.prompt % vocab_size, output=one.output % vocab_size)
                for one in make_samples(8, seed=step)
            ]
            metrics = ranks.update(samples, step, step)
            if heads is not None and step == 0:  # which does not disturb the policy's own training
                taught = ranks.train_drafter(samples, step)
                assert taught is not None and taught.version > 1
                assert ranks.train_drafter([], step + 1) is None, "nothing to learn from"
                heads += [tensor.clone() for name, tensor in unpack(*taught.buckets) if name == HEAD_WEIGHT]
        return weights_of(ranks, config.target.model), metrics


def descend() -> None:
    """Prepare ranks that step by the gradients themselves, so that weights show them: AdamW makes whole steps of
    gradients that are rounding errors. ZeRO-3 frees every weight after use, as it frees large ones."""
    settings = deepspeed_engine._settings

    class Descent(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, **unused: Any) -> None:
            super().__init__(params, lr)

    def releasing(config: TrainerConfig, world_size: int) -> dict[str, Any]:
        found = settings(config, world_size)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return found

    torch.optim.AdamW = Descent
    deepspeed_engine._settings = releasing
    forwards.CHUNK_TOKENS = 8


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=atol, rtol=0)


@needs_deepspeed
@pytest.mark.parametrize(("stage", "algorithm", "rank"), CASES)
def test_two_deepspeed_ranks_have_the_gradients_of_one_process(stage: int, algorithm: str, rank: int | None) -> None:
    """In every optimizer step: what each of them adds to the weights is linear in its gradients."""
    one_heads, two_heads = list[torch.Tensor](), list[torch.Tensor]()
    one_config = settings("torch", algorithm=algorithm, rank=rank)
    two_config = settings("deepspeed", stage, algorithm, rank)
    rate = RATE if rank is None else RATE / 50.0  # an adapter's steps are scaled up: those of the rate leave the model
    one_config.trainer.learning_rate = two_config.trainer.learning_rate = rate
    one_config.algorithm.kl_coef = two_config.algorithm.kl_coef = 0.1
    one, one_metrics = run(one_config, range(STEPS), None, one_heads, descend)
    two, two_metrics = run(two_config, range(STEPS), None, two_heads, descend)
    assert_close(one, two, atol=SAME)
    start = load_model(str(tiny_target())).state_dict()
    assert max(float((tensor - start[name]).abs().max()) for name, tensor in one.items()) > 100 * SAME
    assert two_metrics == pytest.approx(one_metrics, rel=2e-3, abs=1e-5) and one_metrics["kl"] > 1e-4
    before = trained_weights(load_head(str(tiny_eagle()), str(tiny_target())))[HEAD_WEIGHT]
    torch.testing.assert_close(one_heads, two_heads, atol=SAME, rtol=0)
    assert (one_heads[0] - before).abs().max() > 0


def watch(stage: int) -> None:
    """Prepare ranks that fail if a linear layer computes in float32, or if ZeRO-3 gets a model as a whole, which it
    would move to the device. Without a device type `torch.is_autocast_enabled` is about CUDA: here, the ranks' device.
    """
    is_enabled, linear = torch.is_autocast_enabled, torch.nn.Linear.forward
    torch.is_autocast_enabled = lambda device_type="cpu": is_enabled(device_type)

    def checked_linear(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = linear(self, x)
        assert y.dtype == torch.bfloat16 or not torch.is_grad_enabled(), "float32 in a forward of an update"
        return y

    torch.nn.Linear.forward = checked_linear
    if stage == 3:
        import deepspeed

        initialize = deepspeed.initialize

        def checked_initialize(model: torch.nn.Module, **others: Any) -> Any:
            assert all(hasattr(parameter, "ds_id") for parameter in model.parameters()), "a device holds shares only"
            return initialize(model=model, **others)

        deepspeed.initialize = checked_initialize


@pytest.mark.parametrize(
    ("backend", "stage"), [("torch", 2), *(pytest.param("deepspeed", s, marks=needs_deepspeed) for s in (2, 3))]
)
def test_bfloat16_is_bfloat16_and_a_reference_the_policy_to_the_last_bit(backend: str, stage: int) -> None:
    config = settings(backend, stage)
    config.trainer.dtype, config.trainer.mini_batches, config.algorithm.kl_coef = "bfloat16", 1, 0.1
    with ForkedRanks(config, prepare=functools.partial(watch, stage if backend == "deepspeed" else 0)) as ranks:
        start = weights_of(ranks)
        first, second = (ranks.update(make_samples(8, seed=step), step, step) for step in range(2))
        assert first["kl"] == 0.0 < second["kl"]
        assert first["grad_norm"] > 0 and max(float((start[n] - t).abs().max()) for n, t in weights_of(ranks).items())


@needs_deepspeed
def test_two_deepspeed_ranks_make_the_steps_of_one_process() -> None:
    """AdamW's first step is about the sign of a gradient, so it is compared where the gradient is not rounding."""
    one_config, two_config = settings("torch"), settings("deepspeed", 3)
    one_config.trainer.mini_batches = two_config.trainer.mini_batches = 1
    one, two = run(one_config, range(1))[0], run(two_config, range(1))[0]
    start = dict(load_model(str(tiny_target())).state_dict())
    rate, compared = one_config.trainer.learning_rate, 0
    one_config.trainer.learning_rate = RATE
    descended, _ = run(one_config, range(1), prepare=descend)
    for name in one:
        gradients = (start[name] - descended[name]) / RATE
        clear = gradients.abs() > CLEAR
        compared += int(clear.sum())
        assert ((one[name] - two[name]).abs()[clear] < SAME).all(), name
        assert ((one[name] - start[name]).abs()[clear] > rate / 2).all(), name
    assert compared > sum(weight.numel() for weight in one.values()) / 2


@needs_deepspeed
@pytest.mark.parametrize(
    ("kind", "stage", "own"),
    [
        ("gpt2", 2, "attn.weight"),
        ("doge", 3, "_residual"),
        ("gpt_oss", 3, ("sinks", "experts.down_proj")),
    ],
)
def test_layers_that_are_computed_again_have_the_same_gradients(
    kind: str, stage: int, own: str | tuple[str, ...], tmp_path: Path
) -> None:
    """Families with weights in the decoder layers themselves, or in attention and experts: ZeRO-3 must gather them for
    each of the two forwards; and one with dropout."""
    folder, found = save_model(kind, tmp_path), []
    for backend, recomputed in (("torch", False), ("deepspeed", True)):
        config = settings(backend, stage)
        config.target.model = folder
        config.trainer.gradient_checkpointing, config.trainer.learning_rate = recomputed, RATE
        found.append(run(config, range(2), prepare=descend, vocab_size=VOCAB_SIZE)[0])
    assert_close(*found, atol=SAME)
    start = dict(load_model(folder).state_dict())
    moved = [float((found[0][name] - start[name]).abs().max()) for name in start if name.endswith(own)]
    assert len(moved) >= 2 and min(moved) > 10 * SAME


@pytest.mark.parametrize("backend", ["torch", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_every_rank_refuses_a_model_whose_rows_depend_on_others(backend: str, tmp_path: Path) -> None:
    config = settings(backend)
    config.target.model = save_model("cpmant", tmp_path)
    with pytest.raises(ModelLoadError, match=r"cpmant|longer"):
        ForkedRanks(config)


@pytest.mark.parametrize(
    ("backend", "stage", "rank"),
    [
        ("torch", 2, None),
        *(pytest.param("deepspeed", s, r, marks=needs_deepspeed) for s in (2, 3) for r in (None, 4)),
    ],
)
def test_a_saved_trainer_goes_on_exactly_and_one_that_cannot_save_goes_on(
    backend: str, stage: int, rank: int | None, tmp_path: Path
) -> None:
    config = settings(backend, stage, "ppo", rank)
    config.trainer.dtype = "bfloat16"
    with ForkedRanks(config) as ranks:
        for step in range(2):
            ranks.update(make_samples(8, seed=step), step, step)
        refuse_to_save(ranks, config.trainer.ranks, tmp_path)
        before = weights_of(ranks)
        ranks.offload()  # on CPUs nothing is moved, but DeepSpeed lets go of its buffers and finds them again
        assert_close(before, weights_of(ranks), atol=0.0)
        path = CheckpointStore(tmp_path / "folder", 1, False).save(TrainState(step=2), ranks.save)
        assert find_damage(path) is None
        states = sum(file.stat().st_size for file in (path / "engine").rglob("*.pt"))
        assert rank is None or states < (path / "weights" / "model.safetensors").stat().st_size, "no frozen weights"
        ranks.reload()
        for step in range(2, 4):
            ranks.update(make_samples(8, seed=step), step, step)
        whole = weights_of(ranks)
    resumed, _ = run(config, range(2, 4), checkpoint=path)
    assert_close(whole, resumed, atol=0.0)


def refuse_to_save(ranks: ForkedRanks, count: int, folder: Path) -> None:
    """Every rank keeps in step with one that cannot write."""
    (folder / "file").write_text("no folder")
    with pytest.raises(OSError, match="rank 0"):
        ranks.save(folder / "file")
    if count > 1:
        # In place of the file that rank 1 wants to write; the user of the tests may be root, so modes mean nothing.
        taken = folder / "refused" / "engine" / "deepspeed" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        taken.mkdir(parents=True)
        with pytest.raises(OSError, match=r"rank 1 .*Is a directory"):
            ranks.save(folder / "refused")


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_not_finite_leaves_no_trace_in_any_rank(stage: int) -> None:
    config = settings("deepspeed", stage)
    config.trainer.mini_batches = 1
    good, bad = make_samples(8, seed=1), make_samples(8, seed=2)
    bad[3] = replace(bad[3], advantage=float("nan"))
    with ForkedRanks(config) as ranks:
        before = weights_of(ranks)
        assert ranks.update(bad, 0, 0)["skipped"] == 1
        assert_close(before, weights_of(ranks), atol=0.0)
        ranks.update(good, 1, 1)
        after = weights_of(ranks)
        # Nor does a step without advantages: the optimizer's moments would move the weights.
        # Squares of the second and third one's elements are infinite and 0 in float32; stage 3 adds them in float64.
        huge = "" if stage == 3 else "skipped"
        for step, advantage, left_out in ((2, 0.0, "no_gradient"), (3, 1e30, huge), (4, 1e-27, "")):
            metrics = ranks.update([replace(sample, advantage=advantage) for sample in good], step, step)
            assert [name for name in ("skipped", "no_gradient") if metrics[name]] == ([left_out] if left_out else [])
            if left_out:
                assert_close(after, weights_of(ranks), atol=0.0)
        assert metrics["grad_norm"] > 0
    with ForkedRanks(config) as ranks:
        ranks.update(good, 1, 1)
        assert_close(after, weights_of(ranks), atol=1e-6)


def test_a_step_is_done_once() -> None:
    with ForkedRanks(settings()) as ranks:
        first = ranks.update(make_samples(8), 0, 0)
        weights = weights_of(ranks)
        assert ranks.update(make_samples(8, seed=1), 0, 0) == first, "as when its answer was lost"
        assert_close(weights, weights_of(ranks), atol=0.0)
        assert ranks.update(make_samples(8, seed=1), 1, 0) != first


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_holds_data_only_and_ranks_listen_where_they_meet(stage: int, tmp_path: Path) -> None:
    run_forked(save_and_spoil, stage, tmp_path)


def save_and_spoil(stage: int, folder: Path) -> None:
    os.chdir(folder)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    here = deepspeed_engine.Rendezvous(0, 1, deepspeed_engine.LOOPBACK, free_port())
    deepspeed_engine.join(here, torch.device("cpu"))
    assert not (folder / "extensions").exists(), "no compiler is needed"
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}

    model = torch.nn.Linear(4, 4)
    engine = deepspeed_engine.DeepSpeedEngine(
        model, TrainerConfig(zero_stage=stage), here, torch.device("cpu"), lambda: None
    )
    assert type(engine._engine.optimizer.optimizer) is torch.optim.AdamW, "which needs no compiler on GPUs either"
    train_once(engine)
    with engine.gathered([model.weight]):
        trained = model.weight.detach().clone()
    checkpoint = Path("checkpoint")
    engine.save(checkpoint, SavedPart(checkpoint))
    train_once(engine)
    for group in engine._engine.optimizer.param_groups:
        group["weight_decay"] = 0.5  # of a configuration that changed
    engine.load(checkpoint)
    assert {group["weight_decay"] for group in engine._engine.optimizer.param_groups} == {0.5}
    with engine.gathered([model.weight]):
        assert torch.equal(model.weight, trained)

    for path in sorted(checkpoint.glob("*/*.pt")):
        good = path.read_bytes()
        torch.save({**torch.load(path, weights_only=False), "extra": Evil()}, path)
        with pytest.raises(InputError, match="checkpoint"):
            engine.load(checkpoint)
        assert not Path("ran").exists(), path
        path.write_bytes(good)


def train_once(engine: deepspeed_engine.DeepSpeedEngine) -> None:
    engine.backward(engine._engine(torch.ones(1, 4)).sum(), last=True)
    engine.step(0.1)
