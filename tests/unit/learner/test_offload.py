"""Trainers that give up their device: everything large goes to host memory, and they go on as if they had not."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch

from specactor_ray.config.recipes import make_recipe
from specactor_ray.learner import engine as engines
from specactor_ray.learner.engine import SavedPart, TorchEngine
from specactor_ray.learner.update import PolicyUpdater
from tests.unit.learner.test_update import config, make_policy, make_samples

torch.set_num_threads(1)


class Device:
    """In place of a GPU: notes what of a trainer's tensors is on it; `limit`: most bytes that it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, int] = {}
        self.limit = 1 << 40
        monkeypatch.setattr(engines, "offload", self.offload)
        monkeypatch.setattr(engines, "reload", self.reload)

    @property
    def bytes(self) -> int:
        return sum(self.held.values())

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.held.pop(id(tensor), None)

    def reload(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        for tensor in tensors:
            self.held[id(tensor)] = tensor.nbytes
            if self.bytes > self.limit:
                raise torch.OutOfMemoryError("the device is full")


def test_all_that_is_large_leaves_the_device_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    device, settings = Device(monkeypatch), config(kl_coef=0.1)
    policy = make_policy(settings)
    weights = sum(one.nbytes for one in policy.parameters())
    engine, reference = TorchEngine(policy, settings.trainer), copy.deepcopy(policy)
    updater = PolicyUpdater(engine, make_recipe(settings), settings, engine.frozen(reference))
    updater.update(make_samples(), 0, 0)
    engine.reload()
    buffers = sum(one.nbytes for model in (policy, reference) for one in model.buffers())
    assert device.bytes == 4 * weights + buffers, "weights, two moments and a reference; gradients are dropped"
    engine.backward(sum(one.sum() for one in policy.parameters()), last=True)  # of an update that was broken off
    engine.offload()
    engine.offload()
    assert device.bytes == 0 and all(one.grad is None for one in policy.parameters())
    device.limit = 2 * weights
    with pytest.raises(torch.OutOfMemoryError):
        engine.reload()
    engine.save(tmp_path, part := SavedPart(tmp_path))
    assert not part.problem, "what was learnt is saved whatever the device holds"
    engine.offload()
    assert device.bytes == 0
