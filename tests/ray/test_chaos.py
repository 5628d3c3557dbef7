"""Real faults on real clusters: outputs and training equal those of a calm run, and lost actors come back.

`tests/faults` has every kind of fault on virtual time. Here is what it replaces: processes, nodes, Ray's calls.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from specactor_ray import Rollout, SamplingParams
from specactor_ray.cluster.backend import on_node
from specactor_ray.cluster.connection import find_controller
from specactor_ray.cluster.names import NAMESPACE
from specactor_ray.config.load import from_mapping
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.runs.training import read_metrics
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, SEED, MAX_TOKENS = 16, 3, 11, 64
SAMPLING = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=SEED)
STORE_MB = 80
"""Object store of each node."""
ACTORS = {"": 2, "ngram": 2, "draft_model": 1}
"""Desired number of actors by method; verifiers have none."""


def settings(**cluster: Any) -> dict[str, Any]:
    target = {"model": str(tiny_target()), "dtype": "float32", "replicas": 2, "max_batch": 6, "kv_cache_gb": 0.05}
    small = {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05, "cores": 0.5}
    return {
        "mode": "decoupled",
        "target": target,
        "drafters": [{"method": "ngram", "hosted": False, "replicas": 2, "cores": 0.5}, small],
        "cluster": {"pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 6.0, **cluster},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02},
    }


@pytest.fixture(scope="module")
def truth() -> list[tuple[int, ...]]:
    return list(plain_tokens(tiny_target(), tiny_prompts(PROMPTS), SAMPLING, SAMPLES).values())


class Running:
    """A rollout on two nodes, the second of which can be lost and replaced."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.second = self._add_node()
        self.rollout = Rollout(from_mapping(settings(address=cluster.address)))

    def _add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=3, object_store_memory=STORE_MB << 20)

    def ready(self, kind: str = "") -> list[dict[str, Any]]:
        return [row for row in self.rollout.status() if row["phase"] == "ready" and row["kind"].startswith(kind)]

    def is_settled_without(self, lost: Iterable[str]) -> bool:
        """Whether the desired actors are ready and answer, none of which is one of `lost`."""
        rows = self.ready()
        methods = [row["method"] for row in rows]
        is_whole = {method: methods.count(method) for method in ACTORS} == ACTORS
        return is_whole and not {row["id"] for row in rows} & {*lost} and all(row["silent_s"] < 3.0 for row in rows)

    def signal(self, kind: str, number: signal.Signals) -> list[str]:
        row = self.ready(kind)[0]
        os.kill(row["pid"], number)
        return [row["id"]]

    def lose_node(self) -> list[str]:
        lost = [row["id"] for row in self.ready() if row["node_id"] == self.second.node_id]
        self._cluster.remove_node(self.second, allow_graceful=False)
        self.second = self._add_node()
        return lost

    def stop_controller(self) -> list[str]:
        controller = find_controller(self.rollout.run_name)
        pid = ray.get(controller.__ray_call__.remote(lambda _self: os.getpid()), timeout=60)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()
        return []


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    cluster = Cluster(shutdown_at_exit=False)
    cluster.add_node(num_cpus=3, include_dashboard=False, object_store_memory=STORE_MB << 20)
    ray.init(address=cluster.address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
    running = Running(cluster)
    yield running
    running.rollout.close()
    ray.shutdown()
    cluster.shutdown()


def tokens_of(done: Iterable[Trajectory]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in sorted(done, key=lambda one: (one.prompt_index, one.sample_index))]


STRIKES: dict[str, Callable[[Running], list[str]]] = {
    "kill verifier": lambda running: running.signal("verifier", signal.SIGKILL),
    "kill drafter": lambda running: running.signal("drafter", signal.SIGKILL),
    "stop verifier": lambda running: running.signal("verifier", signal.SIGSTOP),
    "stop controller": Running.stop_controller,
    "lose node": Running.lose_node,
}


@pytest.mark.parametrize("kind", STRIKES)
def test_outputs_under_faults_are_those_of_plain_decoding(kind: str, running: Running, truth: Any) -> None:
    wait_until(lambda: running.is_settled_without(()), "all actors", 240.0)
    stream = running.rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
    first = next(stream)
    lost = STRIKES[kind](running)
    assert tokens_of([first, *stream]) == truth
    wait_until(lambda: running.is_settled_without(lost), f"replacements of {lost}", 240.0)
    assert tokens_of(running.rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == truth


@ray.remote
def hold_object_store(seconds: float) -> int:
    """Fill the object store of this node, and hold it for a while. Returns the number of MB."""
    held: list[Any] = []
    with suppress(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        while 8 * len(held) < STORE_MB:
            reference = ray.put(np.ones(8 << 20, dtype=np.uint8))
            held.append((reference, ray.get(reference)))  # what is in use cannot be spilled
    threading.Event().wait(seconds)
    return 8 * len(held)


def test_weights_arrive_although_the_object_store_is_full(running: Running, truth: Any) -> None:
    wait_until(lambda: running.is_settled_without(()), "all actors", 240.0)
    held = hold_object_store.options(**on_node(ray.get_runtime_context().get_node_id())).remote(5.0)
    version = running.rollout.update_weights(tiny_target())
    done = running.rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
    assert tokens_of(done) == truth and {one.weight_version for one in done} == {version}
    assert ray.get(held, timeout=60) > STORE_MB / 2


# In a process of its own: Ray reads its faults from the environment once, and the driver is to have them, too.
PROGRAM = f"""
import json, sys
from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from tests.tiny import tiny_prompts
from tests.waiting import wait_until

with Rollout(from_mapping(json.loads(sys.argv[1]))) as rollout:
    sampling = SamplingParams(temperature=1.0, max_tokens={MAX_TOKENS}, seed={SEED})
    done = rollout.generate(tiny_prompts({PROMPTS}), sampling, n={SAMPLES})
    wait_until(lambda: sum(row["phase"] == "ready" for row in rollout.status()) == {sum(ACTORS.values())}, "all actors")
    print(json.dumps([[one.token_ids for one in done], [one.error for one in done if one.error]]))
"""


def test_calls_that_fail_and_answers_that_are_late_change_nothing(truth: Any) -> None:
    """A fifth of all calls to actors fails, on the way there, on the way back, or while it is carried out."""
    failing = {"num_failures": 300, "req_failure_prob": 7, "resp_failure_prob": 7, "in_flight_failure_prob": 6}
    faults = {
        "RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": failing}),
        "RAY_testing_asio_delay_us": "CoreWorkerService.grpc_server.PushTask=0:50000",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings(num_cpus=6, health_timeout_s=20.0))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, **faults}, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, errors = json.loads(done.stdout.splitlines()[-1])
    assert [tuple(one) for one in tokens] == truth and not errors


def train(folder: Path, name: str) -> subprocess.Popen[str]:
    overrides = [
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.path={folder / 'tasks.jsonl'}",
        f"target.model={tiny_target()}",
        "target.dtype=float32",
        "target.kv_cache_gb=0.05",
        "drafters=[{method: ngram, hosted: false, cores: 0.5}]",
        "cluster.num_cpus=2",
        "cluster.pin_cores=false",
        "reward.functions=[{name: 'tests.fakes.reward_functions:sleepy'}]",
        "data.n=4",
        "sampling.max_tokens=32",
        "trainer.steps=6",
        "trainer.prompts_per_step=8",
        "checkpoint.every=2",
        "tracking.tensorboard=false",
        "resume=auto",
    ]
    command = [sys.executable, "-m", "specactor_ray.cli.main", "train", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def learnt(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [record["train"] for record in read_metrics(path)] if path.exists() else []


def test_training_continues_exactly_after_rays_head_was_killed(tmp_path: Path) -> None:
    tasks = [{"prompt": prompt} for prompt in tiny_prompts(64)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    struck = train(tmp_path, "struck")
    wait_until(lambda: len(learnt(tmp_path / "struck")) >= 3, "step 3", 200.0)
    (head,) = [one for one in psutil.Process(struck.pid).children(recursive=True) if "gcs_server" in one.cmdline()[0]]
    head.kill()
    output = struck.communicate(timeout=240)[0]
    assert struck.returncode == 1 and "Traceback" not in output, output
    for name in ("struck", "calm"):
        process = train(tmp_path, name)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0 and ("continues from" in output) is (name == "struck"), output
    assert len(learnt(tmp_path / "calm")) == 6
    assert learnt(tmp_path / "struck") == learnt(tmp_path / "calm")
