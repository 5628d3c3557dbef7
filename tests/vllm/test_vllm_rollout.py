"""Rollouts with `target.backend: vllm`: real Ray, real vLLM, tokens equal to those of the `hf` backend."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.rollout import Rollout
from tests.local_ray import local_ray
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_prompts, tiny_vllm_target
from tests.vllm import needs_vllm
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.ray, pytest.mark.timeout(600)]

PROMPTS, SAMPLES = 8, 3
NGRAM = {"method": "ngram"}
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


cluster = local_ray(8, log_to_driver=False)


def config(mode: str, drafters: list[dict[str, Any]]) -> Config:
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {
            "model": str(tiny_vllm_target()),
            "backend": "vllm",
            "compiled": False,  # starts faster
            "max_model_len": 256,
            "max_batch": 6,
            "kv_cache_gb": 0.03,
            "dtype": "float32",
        },
        "drafters": drafters,
        "cluster": {"address": "local", "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 5.0},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02},
    }
    return from_mapping(settings)


def small() -> dict[str, Any]:
    return {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05}


def tokens_of(rollout: Rollout) -> dict[tuple[int, int], tuple[int, ...]]:
    done = rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
    assert len(done) == PROMPTS * SAMPLES and not any(t.error for t in done)
    return {(t.prompt_index, t.sample_index): t.token_ids for t in done}


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, int], tuple[int, ...]]:
    return plain_tokens(tiny_vllm_target(), tiny_prompts(PROMPTS), SAMPLING, SAMPLES)


def test_coupled_gives_the_tokens_of_hf(truth: Any) -> None:
    with Rollout.from_config(config("coupled", [NGRAM, small()])) as rollout:
        assert tokens_of(rollout) == truth
        metrics = rollout.metrics()
    assert metrics.accepted_tokens > 0
    assert metrics.forward_s > 0, "sampling is part of it: nothing waits between them"


def test_decoupled_gives_the_tokens_of_hf(truth: Any) -> None:
    settings = config("decoupled", [{**NGRAM, "hosted": False}, small()])
    settings.target.max_batch = 16
    settings.speculation.draft_wait_s = 1.0  # steps have drafts however busy the machine is
    with Rollout.from_config(settings) as rollout:
        while not rollout.metrics().accepted_tokens:  # up to the time limit of the test
            assert tokens_of(rollout) == truth


# ---- two ranks ----


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The engine's ranks: by the title vLLM gives them or, where setproctitle cannot write it (the first environment
    variable was changed before), by the command line of multiprocessing."""
    signs = ("VLLM::Worker", "--multiprocessing-fork")
    children = process.children(recursive=True)
    return [child for child in children if any(sign in " ".join(child.cmdline()) for sign in signs)]


def test_a_verifier_that_lost_a_rank_is_replaced(truth: Any) -> None:
    """Its requests go on, no rank is left behind, and the verifier that ends in order leaves no shared memory."""
    with Rollout.from_config(split_config()) as rollout, ThreadPoolExecutor() as pool:
        killing = pool.submit(kill_a_rank, rollout)
        assert tokens_of(rollout) == truth
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
