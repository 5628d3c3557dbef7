"""The trainer on a GPU: it leaves the device and comes back, DeepSpeed computes in bfloat16, weights for verifiers come
through page-locked memory."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from specactor_ray.config.recipes import make_recipe
from specactor_ray.learner.engine import PolicyModel, SavedPart, TorchEngine
from specactor_ray.learner.update import PolicyUpdater
from specactor_ray.models.offload import return_memory
from specactor_ray.models.weight_buckets import pack, unpack
from tests.ports import free_port
from tests.unit.learner.test_update import config, make_policy, make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 2**20
DEVICE = "cuda"


def held(device: str) -> int:
    return_memory()
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def trained(engine: TorchEngine, policy: PolicyModel, leaves: bool, folder: Path, device: str) -> dict:
    """The weights after two steps; between them the engine gives up the device, and saves meanwhile, if it `leaves`."""
    settings = config(kl_coef=0.1)
    reference = engine.frozen(make_policy(settings))
    updater = PolicyUpdater(engine, make_recipe(settings), settings, reference)
    updater.update(make_samples(seed=1), 0, 0)
    if leaves:
        awake = held(device)
        engine.offload()
        assert held(device) < max(awake / 4, 8 * MIB), "all of it is back with the driver"
        engine.save(folder, part := SavedPart(folder))
        assert not part.problem and part.sizes
        engine.reload()
    updater.update(make_samples(seed=2), 1, 0)
    return {name: tensor.cpu() for name, tensor in policy.state_dict().items()}


def test_a_trainer_that_left_the_device_goes_on_exactly(tmp_path: Path) -> None:
    found = []
    for leaves in (False, True):
        torch.manual_seed(0)
        policy = make_policy(config()).to(DEVICE)
        found.append(trained(TorchEngine(policy, config().trainer), policy, leaves, tmp_path, DEVICE))
        del policy
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_computes_in_bfloat16_and_leaves_the_device(stage: int, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=deepspeed_rank, args=(stage, tmp_path, DEVICE))
    process.start()
    process.join(500)
    assert process.exitcode == 0


def deepspeed_rank(stage: int, folder: Path, device: str) -> None:
    from specactor_ray.learner.deepspeed_engine import LOOPBACK, DeepSpeedEngine, Rendezvous, join

    os.environ.pop("CUDA_HOME", None)  # as on a machine without a compiler
    place, settings, seen = Rendezvous(0, 1, LOOPBACK, free_port()), config().trainer, set[torch.dtype]()
    join(place, torch.device(device))
    settings.dtype, settings.gpus, settings.zero_stage = "bfloat16", 1, stage
    policy = make_policy(config())
    engine = DeepSpeedEngine(policy, settings, place, torch.device(device), lambda: None)
    linear = next(module for module in policy.modules() if type(module) is torch.nn.Linear)
    linear.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    trained(engine, policy, leaves=stage < 3, folder=folder, device=device)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_from_the_device_has_its_bits(dtype: torch.dtype) -> None:
    tensors = {f"w{n}": torch.randn(1 + 37 * n, 129, device=DEVICE) for n in range(40)}
    for _ in range(3):  # page-locked memory of the bucket before is used again
        bucket = pack(tensors.items(), dict.fromkeys(tensors, dtype))
        assert all(torch.equal(tensor, tensors[name].to("cpu", dtype)) for name, tensor in unpack(bucket))
