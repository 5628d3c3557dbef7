"""DeepSpeed ranks: what their checkpoints may hold, and who can reach them. In a process of its own: a group of ranks
belongs to its process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
pytestmark = [needs_deepspeed, pytest.mark.slow]
ROOT = Path(__file__).parents[3]

RANK = """
import os, pathlib, socket, sys
import psutil, torch
from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.errors import InputError
from specactor_ray.learner.engines import deepspeed_engine as engines
from specactor_ray.learner.progress import Progress
from specactor_ray.learner.saving import PartWriter

class Evil:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("ran"),))

with socket.socket() as probe:
    probe.bind(("", 0))
    port = probe.getsockname()[1]
here = engines.Rendezvous(0, 1, engines.LOOPBACK, port)
engines.join(here, torch.device("cpu"))
listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
assert listening == {"127.0.0.1"}, listening

model = torch.nn.Linear(4, 4)
config = TrainerConfig(zero_stage=int(sys.argv[1]))
engine = engines.DeepSpeedEngine(model, config, here, torch.device("cpu"))
engine.backward(engine._engine(torch.ones(1, 4)).sum(), last=True)
engine.step(0.1)
with engine.gathered([model.weight]):
    trained = model.weight.detach().clone()
folder = pathlib.Path("checkpoint")
engine.save(folder, PartWriter(folder, Progress()))
engine.backward(engine._engine(torch.ones(1, 4)).sum(), last=True)
engine.step(0.1)
engine.load(folder)
with engine.gathered([model.weight]):
    assert torch.equal(model.weight, trained)

assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
for path in sorted(folder.glob("*/*.pt")):
    good = path.read_bytes()
    torch.save({**torch.load(path, weights_only=False), "extra": Evil()}, path)
    try:
        engine.load(folder)
    except InputError as error:
        assert "is not loaded" in str(error) and "checkpoint" in str(error), error
    else:
        raise AssertionError(f"{path} was loaded")
    assert not os.path.exists("ran"), path
    path.write_bytes(good)
engine.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_holds_data_only_and_ranks_listen_where_they_meet(stage: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{RANK}", str(stage)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
