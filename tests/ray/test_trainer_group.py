"""Trainer ranks as Ray actors. What ranks compute, save and refuse is in `tests.processes.test_ranks.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.cluster.backend import RayBackend
from specactor_ray.controller.seating import Seating
from specactor_ray.core.errors import ActorLostError
from specactor_ray.models.weight_buckets import unpack
from specactor_ray.trainer.trainer_ranks import TrainerRanks, trainer_group
from tests.fakes.forked_ranks import ForkedRanks
from tests.local_ray import local_ray
from tests.processes.test_ranks import assert_close, settings
from tests.processes.test_ranks import weights_of as forked_weights
from tests.unit.learner.test_update import make_samples

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


cluster = local_ray(4, num_gpus=2)


def gpus_of(_actor: object) -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


class Guest:
    """In place of a verifier or a rank, which would need a real GPU."""

    def __init__(self, _argument: object) -> None:
        pass

    def find_port(self) -> tuple[str, int]:
        return "host", 1

    def start(self, *arguments: object) -> None:
        pass

    def heartbeat(self) -> int:
        return 0


def test_a_rank_is_on_the_gpu_of_its_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    config, backend = settings(), RayBackend()
    config.target.gpus, config.target.replicas = 1, 2
    config.trainer.gpus, config.trainer.colocate, config.trainer.ranks = 1, True, 2
    seating, desired = Seating("pair", config, backend), {VERIFIER: 2}
    seating.form(desired, 0.0)
    seats = seating.claim([VERIFIER] * 2)
    ray.get([seat.gang.group.ready() for seat in seats[:1]])
    verifiers = [
        backend.launch(Guest, (), f"v{n}", one.gang.group, one.bundle, one.demand) for n, one in enumerate(seats)
    ]
    monkeypatch.setattr("specactor_ray.actors.trainer.TrainerActor", Guest)
    try:
        with trainer_group(config, "pair") as group:
            found = [ray.get([one.__ray_call__.remote(gpus_of) for one in of]) for of in (verifiers, group._ranks)]
            assert found[0] == found[1] and found[0][0] != found[0][1]
        assert ray.get(verifiers[0].find_port.remote()) == ("host", 1), "the verifier's bundle outlives the trainer"
    finally:
        seating.close()


def weights_of(group: TrainerRanks) -> dict[str, torch.Tensor]:
    buckets = ray.get(list(group.export_weights(1).buckets))
    return {name: tensor.clone() for bucket in buckets for name, tensor in unpack(bucket)}


def ranks_of() -> list[int]:
    """Processes of trainer ranks of this cluster; another one may run beside it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::TrainerActor" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def hold(_actor: object, file: str) -> None:
    """Keep the thread of the actor's work until the file exists."""
    while not os.path.exists(file):
        time.sleep(0.05)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_ranks_train_answer_heartbeats_meanwhile_and_a_killed_one_is_named(tmp_path: Path) -> None:
    before = set(ranks_of())
    config = settings("deepspeed")
    with trainer_group(config, "test") as group, ForkedRanks(config) as forked:
        spins = [psutil.Process(pid).environ().get("GOMP_SPINCOUNT") for pid in ranks_of()]
        assert "3000" in spins, "set before the process loads torch, or its idle threads take cores from others"
        rank = group._ranks[0]
        call = rank.__ray_call__.remote
        assert len(set(ray.get([call(lambda _: threading.get_ident()) for _ in range(20)], timeout=240))) == 1
        busy = call(hold, str(tmp_path / "go"))
        beats = ray.get(rank.heartbeat.remote(), timeout=240)
        assert not ray.wait([busy], timeout=0)[0]
        (tmp_path / "go").touch()
        assert group.update(make_samples(8), 0, 0) == pytest.approx(forked.update(make_samples(8), 0, 0))
        assert ray.get(rank.heartbeat.remote(), timeout=240) > beats
        assert_close(weights_of(group), forked_weights(forked), atol=1e-6)
        os.kill(max(set(ranks_of()) - before), signal.SIGKILL)
        with pytest.raises(ActorLostError, match=r"trainer rank \d, update"):
            group.update(make_samples(8), 1, 0)
        with pytest.raises(ActorLostError):
            group.save(Path("/nowhere"))
