"""The tail of a rollout: requests are moved to idle verifiers, and the seats of the others are lent.

One run of two verifiers with a core each serves all tests; its draft method has no seat of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from specactor_ray.modeling.loading import load_model
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.targets.base import TargetRequest
from specactor_ray.targets.hf import HfEngine
from tests.tiny import tiny_prompt_ids, tiny_target

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="every verifier is bound to a core of its own"),
]
CONTEXT = 12288
"""Room for an output that takes several times as long as a draft actor takes to start, on fast machines too."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with positions for long outputs; what it says there makes no sense, but is what it says."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(tiny_target(), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def rollout(target: Path) -> Iterator[Rollout]:
    config = from_mapping(
        {
            "mode": "decoupled",
            "target": {"model": str(target), "replicas": 2, "max_batch": 4, "kv_cache_gb": 0.05},
            "drafters": [{"method": "ngram", "replicas": 0, "cores": 0.5}],
            "cluster": {"num_cpus": 2, "health_interval_s": 0.5},
            "speculation": {"verify": "all"},
        }
    )
    assert config.cluster.pin_cores
    with Rollout(config) as running:
        yield running
    assert not ray.is_initialized()


class Oracle:
    """What plain decoding gives: the engine gets the output in question as its draft and commits its own tokens."""

    def __init__(self, target: Path) -> None:
        model = load_model(str(target))
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        from specactor_ray.modeling.ragged_model import RaggedModel

        eos = (model.generation_config.eos_token_id,)
        self._engine = HfEngine(RaggedModel(model, 2**26, []), eos, max_step_tokens=256)

    def use(self, weights: dict[str, torch.Tensor]) -> None:
        self._engine.load_weights(self._engine.weight_version + 1, weights)

    def check(self, done: list[Trajectory]) -> None:
        assert done
        for trajectory in done:
            assert not trajectory.error
            engine, name, said = self._engine, trajectory.request_id, trajectory.token_ids
            engine.add(TargetRequest(name, trajectory.prompt_token_ids, trajectory.sampling))
            plain: list[int] = []
            while engine.has_work():
                for output in engine.step({name: said[len(plain) : len(plain) + 200]}).outputs:
                    plain += output.token_ids
            assert tuple(plain) == said


@pytest.fixture(scope="module")
def oracle(target: Path) -> Oracle:
    return Oracle(target)


def sampling(max_tokens: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5, ignore_eos=True)


def rows(rollout: Rollout, kind: str, phase: str = "ready") -> list[dict[str, Any]]:
    return [row for row in rollout.status() if row["kind"] == kind and row["phase"] == phase]


class Beside(threading.Thread):
    """Watches the rollout while it streams; acts once when a draft actor sits on a lent seat and is ready."""

    def __init__(self, rollout: Rollout, act: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self._rollout, self._act, self._over = rollout, act, threading.Event()
        self.seen: list[dict[str, Any]] = []
        """The status when it was lent."""

    def run(self) -> None:
        while not self._over.wait(0.1):
            if rows(self._rollout, "drafter"):
                self.seen = self._rollout.status()
                self._act()
                return

    def __enter__(self) -> Beside:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(30)


def test_requests_move_to_the_verifier_that_falls_free(rollout: Rollout, oracle: Oracle) -> None:
    lengths = [6000, 12, 6000, 12]  # handed out in turn, so the long ones meet at one verifier
    done = rollout.generate(tiny_prompt_ids(4), [sampling(length, temperature=1.0) for length in lengths])
    assert [len(trajectory.token_ids) for trajectory in done] == lengths
    assert rollout.moved_requests == 1
    oracle.check(done)


def test_a_seat_is_lent_and_given_back(rollout: Rollout, oracle: Oracle) -> None:
    lengths = [10_000, 12, 12, 12]
    for _attempt in range(3):  # on a busy machine the draft actor may have started when all is nearly over
        with Beside(rollout) as beside:
            done = rollout.generate(tiny_prompt_ids(4), [sampling(length) for length in lengths])
        assert [len(trajectory.token_ids) for trajectory in done] == lengths
        (asleep,) = [row for row in beside.seen if row["phase"] == "asleep"]
        (guest,) = [row for row in beside.seen if row["kind"] == "drafter"]
        (serving,) = [row for row in beside.seen if row["kind"] == "verifier" and row["phase"] == "ready"]
        assert asleep["note"] == f"lent to {guest['id']}" and guest["host"] == asleep["id"]
        assert guest["cores"] == asleep["cores"] and not set(guest["cores"]) & set(serving["cores"])
        oracle.check(done)
        if done[0].stats.by_method:
            break
    else:
        pytest.fail("what was lent did not draft")

    # The verifier that slept gets the new weights before it serves again.
    weights = {name: value * 1.05 if "mlp" in name else value for name, value in oracle.weights.items()}
    assert rollout.update_weights(weights) == 1
    rollout.reset_metrics()
    again = rollout.generate(tiny_prompt_ids(6), sampling(40))
    oracle.use(weights)
    oracle.check(again)
    verifiers = rows(rollout, "verifier")
    assert {row["id"] for row in verifiers} == {asleep["id"], serving["id"]}
    assert [row["weight_version"] for row in verifiers] == [1, 1]
    served = [rollout._run.dispatcher.counters[row["id"]]["committed_tokens"] for row in verifiers]
    assert min(served) > 0, "one of them had nothing to do"


def test_the_last_verifier_dies_while_the_other_is_lent(rollout: Rollout, oracle: Oracle) -> None:
    def kill() -> None:
        (row,) = rows(rollout, "verifier")
        killed.append(row["id"])
        os.kill(row["pid"], signal.SIGKILL)

    killed: list[str] = []
    with Beside(rollout, kill) as beside:
        done = rollout.generate(tiny_prompt_ids(1, seed=7), sampling(9_000, temperature=1.0))
    assert killed, "nothing was lent, so nobody was killed"
    (asleep,) = [row for row in beside.seen if row["phase"] == "asleep"]
    assert [len(trajectory.token_ids) for trajectory in done] == [9_000]
    assert rollout._run.dispatcher.counters[asleep["id"]]["committed_tokens"] > 0
    oracle.check(done)
    deadline = time.monotonic() + 60
    while len(rows(rollout, "verifier")) < 2:
        assert time.monotonic() < deadline, "the dead verifier was not replaced"
        time.sleep(0.1)
