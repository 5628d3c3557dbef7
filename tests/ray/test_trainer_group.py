"""Trainer ranks as real actors: several DeepSpeed ranks agree with one process, and files bring everything back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch

from specactor_ray.actors.trainer import HEARTBEAT, TrainerActor
from specactor_ray.config.online import OnlineConfig, OnlineWhere
from specactor_ray.config.schema import Config, DrafterConfig, ModeName
from specactor_ray.errors import ActorLostError, RemoteError
from specactor_ray.modeling.eagle_checkpoint import load_head, trained_weights
from specactor_ray.modeling.weight_buckets import unpack
from specactor_ray.training.checkpoint import CheckpointStore, TrainState, find_damage
from specactor_ray.training.trainer_group import TrainerGroup
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.training.test_update import config as make_config
from tests.unit.training.test_update import make_samples

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 3
HEAD_WEIGHT = "layers.0.self_attn.q_proj.weight"
ONLINE = OnlineConfig(where=OnlineWhere.trainer, learning_rate=1e-3, batch_tokens=64, steps_per_version=2, depths=2)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def settings(backend: str = "torch", stage: int = 2, algorithm: str = "grpo") -> Config:
    config = make_config(name=algorithm)
    config.target.model = str(tiny_target())
    config.trainer.backend = type(config.trainer.backend)(backend)
    config.trainer.zero_stage = stage
    config.trainer.ranks = 1 if backend == "torch" else 2
    config.trainer.micro_batch_tokens = 60
    config.trainer.mini_batches = 2
    config.trainer.weight_bucket_mb = 1
    return config


def weights_of(group: TrainerGroup) -> dict[str, torch.Tensor]:
    exported = group.export_weights(1)
    buckets = ray.get(list(exported.buckets))
    assert exported.num_bytes == sum(bucket.data.nbytes for bucket in buckets)
    return {name: tensor.clone() for bucket in buckets for name, tensor in unpack(bucket)}


def run(
    config: Config,
    steps: range,
    checkpoint: Path | None = None,
    save: Path | None = None,
    heads: list[torch.Tensor] | None = None,
) -> tuple[dict, dict]:
    """Weights and metrics after these steps. With `heads` a drafter is taught too; a weight of it is added to them."""
    if heads is not None:
        config.mode = ModeName.decoupled
        config.drafters = [DrafterConfig(method="eagle", model=str(tiny_eagle()), online=ONLINE)]
    with TrainerGroup(config, "test", checkpoint) as group:
        for step in steps:
            metrics = group.update(make_samples(8, seed=step), step, step)
            if heads is not None and step == 0:  # the policy's own training goes on undisturbed
                taught = group.teach_drafter(make_samples(8, seed=step), step)
                assert taught is not None and taught.version > 1
                assert group.teach_drafter([], step + 1) is None, "nothing to learn from"
                heads += [t.clone() for name, t in unpack(*ray.get(list(taught.buckets))) if name == HEAD_WEIGHT]
        if save is not None:
            group.save(save)
        return weights_of(group), metrics


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], atol: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=atol, rtol=0)


@pytest.mark.parametrize(("stage", "algorithm"), [(1, "dapo"), (2, "ppo"), (3, "grpo")])
def test_two_deepspeed_ranks_agree_with_one_process(stage: int, algorithm: str) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    heads: list[torch.Tensor] = []
    one, one_metrics = run(settings("torch", algorithm=algorithm), range(STEPS), heads=heads)
    two, two_metrics = run(settings("deepspeed", stage, algorithm), range(STEPS), heads=heads)
    # Half of one step at most, and a tenth of one but for one weight in ten thousand: AdamW makes whole steps of
    # gradients that are rounding errors, and how those come out is up to the CPU.
    assert_close(one, two, atol=5e-4)
    apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert (apart > 1e-4).float().mean() < 1e-4
    assert two_metrics == pytest.approx(one_metrics, rel=2e-3, abs=1e-5)
    before = trained_weights(load_head(str(tiny_eagle()), str(tiny_target())))[HEAD_WEIGHT]
    # So on the whole the heads that were taught go the same way.
    assert (heads[0] - heads[1]).abs().mean() < 0.1 * (heads[0] - before).abs().mean()


@pytest.mark.parametrize(("backend", "stage"), [("torch", 2), ("deepspeed", 3)])
def test_a_saved_trainer_goes_on_exactly(backend: str, stage: int, tmp_path: Path) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    config = settings(backend, stage, "ppo")
    whole, _ = run(config, range(4))
    run(config, range(2), save=tmp_path)
    resumed, _ = run(config, range(2, 4), checkpoint=tmp_path)
    assert_close(whole, resumed, atol=0.0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_not_finite_leaves_no_trace_in_any_rank(stage: int) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    config = settings("deepspeed", stage)
    config.trainer.mini_batches = 1
    good, bad = make_samples(8, seed=1), make_samples(8, seed=2)
    bad[3] = replace(bad[3], advantage=float("nan"))
    with TrainerGroup(config, "test") as group:
        before = weights_of(group)
        assert group.update(bad, 0, 0)["skipped"] == 1
        assert_close(before, weights_of(group), atol=0.0)
        group.update(good, 1, 1)
        after = weights_of(group)
    with TrainerGroup(config, "test") as group:
        group.update(good, 1, 1)
        assert_close(after, weights_of(group), atol=1e-6)


class Probe(TrainerActor):
    """Tells which thread it works in."""

    def thread(self) -> int:
        return threading.get_ident()

    @ray.method(concurrency_group=HEARTBEAT)
    def other_thread(self) -> int:
        return threading.get_ident()


def test_all_work_is_done_in_one_thread_beside_that_of_the_heartbeat() -> None:
    probe = ray.remote(concurrency_groups={HEARTBEAT: 1})(Probe).remote("WARNING")
    threads = set(ray.get([probe.thread.remote() for _ in range(20)], timeout=60))
    others = set(ray.get([probe.other_thread.remote() for _ in range(20)], timeout=60))
    ray.kill(probe)
    assert len(threads) == 1 and not threads & others


def test_a_rank_counts_its_work_while_it_does_it_and_does_a_step_once() -> None:
    with TrainerGroup(settings(), "test") as group:
        rank = group._ranks[0]
        samples = [sample for seed in range(40) for sample in make_samples(8, seed=seed)]
        before = ray.get(rank.heartbeat.remote(), timeout=60)
        update = rank.update.remote(samples, 0, 0)
        counts = set()
        while not ray.wait([update], timeout=0)[0]:
            counts.add(ray.get(rank.heartbeat.remote(), timeout=60))
        counts.discard(before)
        assert len(counts) > 1, "it answers during the update, and what it answers grows"
        weights = weights_of(group)
        assert group.update(make_samples(8, seed=1), 0, 0) == ray.get(update), "as when its answer was lost"
        assert_close(weights, weights_of(group), atol=0.0)
        assert group.update(make_samples(8, seed=1), 1, 0) != ray.get(update)


def ranks_of() -> list[int]:
    """Processes of trainer ranks on this machine."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "ray::TrainerActor" in " ".join(p.info["cmdline"] or [])]


def test_a_rank_that_stands_still_ends_the_wait() -> None:
    config = settings()
    config.trainer.stall_timeout_s = 4.0
    before = set(ranks_of())
    with TrainerGroup(config, "test") as group:
        (pid,) = set(ranks_of()) - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ActorLostError, match=r"trainer rank 0: no progress for 4 s in update; .*stall_timeout_s"):
            group.update(make_samples(8), 0, 0)
        with pytest.raises(ActorLostError, match=r"cannot be used any more: .*no progress"):
            group.export_weights(1)


def test_a_killed_rank_is_named_and_the_others_are_not_waited_for() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    before = set(ranks_of())
    with TrainerGroup(settings("deepspeed"), "test") as group:
        os.kill(max(set(ranks_of()) - before), signal.SIGKILL)
        with pytest.raises(ActorLostError, match=r"trainer rank \d, update: .*its process ended"):
            group.update(make_samples(8), 0, 0)
        with pytest.raises(ActorLostError, match=r"cannot be used any more"):
            group.save(Path("/nowhere"))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_cannot_write_keeps_in_step_with_the_others(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    refused, folder = tmp_path / "refused", tmp_path / "folder"
    with TrainerGroup(settings("deepspeed", stage), "test") as group:
        group.update(make_samples(8), 0, 0)
        # In place of the file that rank 1 wants to write; the user of the tests may be root, so modes mean nothing.
        (refused / "engine" / "deepspeed" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").mkdir(parents=True)
        with pytest.raises(OSError, match=r"trainer rank 1 on node .* could not write: .*Is a directory"):
            group.save(refused)
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(OSError, match=r"trainer rank 0 on node .* could not write: .*"):
            group.save(tmp_path / "file")
        group.update(make_samples(8, seed=1), 1, 1)
        path = CheckpointStore(folder, 1, False).save(TrainState(step=2), group.save)
        assert find_damage(path) is None
        saved = weights_of(group)
    with TrainerGroup(settings("deepspeed", stage), "test", path) as group:
        assert_close(saved, weights_of(group), atol=0.0)


def test_an_error_that_is_not_the_disks_is_not_taken_for_one(tmp_path: Path) -> None:
    with TrainerGroup(settings(), "test") as group:
        with pytest.raises(RemoteError, match=r"trainer rank 0, save: .*TypeError"):
            group._call("save", None, 1)
        group.save(tmp_path)
