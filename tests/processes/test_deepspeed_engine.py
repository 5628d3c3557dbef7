"""DeepSpeed ranks: what their checkpoints may hold, and who can reach them. In a process of its own: a group of ranks
belongs to its process."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import psutil
import pytest
import torch

from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.core.errors import InputError
from specactor_ray.learner import deepspeed_engine as engines
from specactor_ray.learner.engine import PartWriter, WorkCounter
from tests.fakes.forked_ranks import run_forked
from tests.ports import free_port

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


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
    here = engines.Rendezvous(0, 1, engines.LOOPBACK, free_port())
    engines.join(here, torch.device("cpu"))
    assert not (folder / "extensions").exists(), "no compiler is needed"
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}

    model = torch.nn.Linear(4, 4)
    engine = engines.DeepSpeedEngine(model, TrainerConfig(zero_stage=stage), here, torch.device("cpu"), WorkCounter())
    train_once(engine)
    with engine.gathered([model.weight]):
        trained = model.weight.detach().clone()
    checkpoint = Path("checkpoint")
    engine.save(checkpoint, PartWriter(checkpoint, WorkCounter()))
    train_once(engine)
    engine.load(checkpoint)
    with engine.gathered([model.weight]):
        assert torch.equal(model.weight, trained)

    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    for path in sorted(checkpoint.glob("*/*.pt")):
        good = path.read_bytes()
        torch.save({**torch.load(path, weights_only=False), "extra": Evil()}, path)
        with pytest.raises(InputError, match=r"checkpoint.* is not loaded"):
            engine.load(checkpoint)
        assert not Path("ran").exists(), path
        path.write_bytes(good)
    engine.close()


def train_once(engine: engines.DeepSpeedEngine) -> None:
    engine.backward(engine._engine(torch.ones(1, 4)).sum(), last=True)
    engine.step(0.1)
