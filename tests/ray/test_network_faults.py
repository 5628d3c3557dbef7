"""Faults that Ray itself injects into its calls: a rollout loses no token and no actor, and its tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.core.types import SamplingParams
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: Ray reads its faults from the environment once, and the driver is to have them, too.
PROGRAM = """
import json, sys
from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from tests.tiny import tiny_prompts

with Rollout(from_mapping(json.loads(sys.argv[1]))) as rollout:
    sampling = SamplingParams(temperature=1.0, max_tokens=48, seed=3)
    done = rollout.generate(tiny_prompts(12), sampling, n=2)
    ids = sorted(row["id"] for row in rollout.status() if row["phase"] == "ready")
    print(json.dumps({
        "tokens": [one.token_ids for one in done],
        "errors": [one.error for one in done if one.error],
        "ready": len(ids),
    }))
"""


def test_calls_that_fail_and_answers_that_are_late_change_nothing() -> None:
    """A fifth of all calls to actors fails, on the way there, on the way back, or while it is carried out."""
    failing = {"num_failures": 300, "req_failure_prob": 7, "resp_failure_prob": 7, "in_flight_failure_prob": 6}
    faults = {
        "RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": failing}),
        "RAY_testing_asio_delay_us": "CoreWorkerService.grpc_server.PushTask=0:50000",
    }
    settings = {
        "mode": "decoupled",
        "target": {
            "model": str(tiny_target()),
            "dtype": "float32",
            "replicas": 2,
            "max_batch": 6,
            "kv_cache_gb": 0.05,
        },
        "drafters": [
            {"method": "ngram", "hosted": False},
            {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05},
        ],
        "cluster": {"num_cpus": 6, "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 20.0},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, **faults},
    )
    assert done.returncode == 0, done.stderr
    shaken = json.loads(done.stdout.splitlines()[-1])
    assert not shaken["errors"] and shaken["ready"] == 4
    plain = plain_tokens(tiny_target(), tiny_prompts(12), SamplingParams(temperature=1.0, max_tokens=48, seed=3), 2)
    assert [tuple(tokens) for tokens in shaken["tokens"]] == list(plain.values())
