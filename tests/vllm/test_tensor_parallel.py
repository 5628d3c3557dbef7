"""A verifier of two ranks, each a process with a CPU core of its own: same tokens, same states, new weights, deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from specactor_ray.config import Config
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.rollout.rollout import Rollout
from tests.tiny import tiny_vllm_target
from tests.unit.engine_conformance import Driver, answers, noisy_tails, requests
from tests.unit.target.test_hf_engine import load
from tests.unit.target.test_hf_engine import make as make_hf
from tests.vllm import needs_vllm
from tests.vllm.test_vllm_engine import make, states_of
from tests.vllm.test_vllm_rollout import NGRAM, config, plain_truth, tokens_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

LAYERS = (0, 3, HEAD_INPUT)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The engine's ranks: by the title vLLM gives them or, where setproctitle cannot write it (the first environment
    variable was changed before), by the command line of multiprocessing."""
    signs = ("VLLM::Worker", "--multiprocessing-fork")
    children = process.children(recursive=True)
    return [child for child in children if any(sign in " ".join(child.cmdline()) for sign in signs)]


class TestInThisProcess:
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Driver]:
        engine = make(tensor_parallel=2, cores=2, hidden_layers=LAYERS)
        ranks = ranks_of(psutil.Process())
        assert len(ranks) == 2
        yield engine
        engine.close()
        assert not psutil.wait_procs(ranks, timeout=240)[1], "ranks outlive their engine"

    @pytest.mark.parametrize(("temperature", "filters"), [(0.0, {}), (1.0, {}), (0.7, {"top_k": 30, "top_p": 0.9})])
    def test_ranks_verify_the_same_drafts_and_choose_the_tokens_of_hf(
        self, engine: Driver, temperature: float, filters: dict[str, Any]
    ) -> None:
        batch, reference = requests(8, temperature, **filters), make_hf(load(tiny_vllm_target()), hidden_layers=LAYERS)
        truth, plain = answers(reference, batch), answers(engine, batch)
        drafted = answers(engine, batch, noisy_tails(truth.tokens, 4, engine.vocab_size))
        assert plain.tokens == drafted.tokens == truth.tokens
        assert sum(output.num_accepted for output in drafted.outputs) > 50
        for request_id, expected in truth.logprobs.items():
            assert drafted.logprobs[request_id] == pytest.approx(expected, abs=1e-3)
            assert torch.allclose(states_of(drafted, request_id), states_of(truth, request_id), atol=1e-3)

    def test_every_rank_takes_its_part_of_new_weights(self, engine: Driver) -> None:
        original = load(tiny_vllm_target()).state_dict()
        model = load(tiny_vllm_target())
        model.load_state_dict({name: tensor * 1.3 for name, tensor in original.items()})
        batch = requests(4, 1.0)
        before = answers(engine, batch).tokens
        engine.load_weights(1, model.state_dict())
        after = answers(engine, batch).tokens
        assert after != before and after == answers(make_hf(model), batch).tokens
        engine.load_weights(2, original)
        assert answers(engine, batch).tokens == before


@pytest.mark.ray
class TestOverRay:
    @pytest.fixture(autouse=True)
    def cluster(self) -> Iterator[None]:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()

    def test_a_verifier_that_lost_a_rank_is_replaced(self) -> None:
        """Its requests go on, no rank is left behind, and the verifier that ends in order leaves no shared memory."""
        with Rollout.from_config(split_config()) as rollout, ThreadPoolExecutor() as pool:
            killing = pool.submit(kill_a_rank, rollout)
            assert tokens_of(rollout) == plain_truth()
            seen = killing.result(120)
            ranks = wait_until(lambda: replacements(rollout, seen), "ranks of another verifier", 120.0)
            shared = shared_memory(ranks)
            assert shared, "a verifier shares memory with its ranks"
        assert not psutil.wait_procs([*seen, *ranks], timeout=240)[1]
        assert not [path for path in shared if path.exists()]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Segments that multiprocessing made and one of these processes uses."""
    maps = {mapped.path for process in processes for mapped in process.memory_maps()}
    return {Path(path) for path in maps if path.startswith("/dev/shm/psm_")}


def split_config() -> Config:
    settings = config("decoupled", [{**NGRAM, "hosted": False}])
    settings.target.cores = settings.target.tensor_parallel = 2
    settings.cluster.health_timeout_s = 20.0
    return settings


def verifier_pid(rollout: Rollout) -> int:
    (pid,) = [row["pid"] for row in rollout.status() if row["kind"] == "verifier" and row["phase"] == "ready"]
    return int(pid)


def replacements(rollout: Rollout, lost: list[psutil.Process]) -> list[psutil.Process]:
    """Both ranks of a verifier that is ready, none of which is one of `lost`; empty before there are such."""
    pids = [row["pid"] for row in rollout.status() if row["kind"] == "verifier" and row["phase"] == "ready"]
    ranks = ranks_of(psutil.Process(pids[0])) if pids and psutil.pid_exists(pids[0]) else []
    return ranks if len(ranks) == 2 and not {*ranks} & {*lost} else []


def kill_a_rank(rollout: Rollout) -> list[psutil.Process]:
    """Kill the second of a verifier's two ranks while the stream runs. Returns both."""
    while rollout.committed_tokens == 0:
        time.sleep(0.02)
    ranks = ranks_of(psutil.Process(verifier_pid(rollout)))
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    return ranks
