"""Draft actors by load in a real run. The load is set, not measured: what machines are busy with decides nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.cloudpickle

from specactor_ray import Rollout, SamplingParams
from specactor_ray.actors.draft import DraftActor
from specactor_ray.actors.verifier import VerifierActor
from specactor_ray.cluster.calls import Calls
from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.members import ActorClasses
from specactor_ray.controller.start import start_controller
from specactor_ray.core.errors import ConfigError
from specactor_ray.rollout.prompts import encode_prompts
from specactor_ray.rollout.rollout import samples_of
from specactor_ray.rollout.run_client import SHUTDOWN_S, RunClient
from tests.tiny import tiny_draft, tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S = 120.0
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)
STEPS = 1000
"""Steps that a verifier reports between two health checks."""


class SetVerifier(VerifierActor):
    """A real verifier that reports the load that it was given."""

    load, pings, steps, row_steps = 0, 0, 0, 0

    def set_load(self, rows: int) -> None:
        """Requests in each step; 0: it takes none."""
        self.load = rows

    def count_pings(self) -> int:
        return self.pings

    def ping(self) -> dict[str, Any]:
        counters = super().ping()
        self.pings += 1
        self.steps, self.row_steps = self.steps + STEPS * (self.load > 0), self.row_steps + STEPS * self.load
        counters |= {"steps": 1 + self.steps, "row_steps": self.row_steps, "supplied_row_steps": self.row_steps // 2}
        ladder = [{"method": "draft_model", "positions": "0-63", "drafted": 100.0, "acceptance": 0.7}]
        cost = [(1.0, 0.008), (256.0, 0.010), (1024.0, 0.036)]
        return {**counters, "suspended_steps": 0, "cost": cost, "ladder": ladder}


class SetDrafter(DraftActor):
    """A real draft actor that reports a time that rises with its requests."""

    def ping(self) -> dict[str, Any]:
        return {**super().ping(), "cost": [(1.0, 0.001), (16.0, 0.0015), (20.0, 0.004), (64.0, 0.012)]}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # others cannot import it
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def settings(mode: str, **drafter: Any) -> Config:
    model = {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.02, "cores": 0.1, "replicas": 0}
    return from_mapping(
        {
            "mode": mode,
            "target": {"model": str(tiny_target()), "replicas": 1, "max_batch": 4, "kv_cache_gb": 0.05},
            "drafters": [{**model, **drafter}],
            "cluster": {"address": "auto", "pin_cores": False, "health_interval_s": 0.5},
            "speculation": {"branches": 0, "verify": "all", "draft_wait_s": 0.02},
            "elastic": {"up_s": 0.0, "down_s": 0.0},
        }
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_from_none_to_four_to_one_to_none_while_requests_run() -> None:
    prompts = tiny_prompts(4)
    with Rollout(settings("plain")) as rollout:
        truth = [one.token_ids for one in rollout.generate(prompts, SAMPLING)]
        tokenizer = rollout.engine.tokenizer

    config = settings("decoupled", max_replicas=4)
    handle, _ = start_controller(config, ActorClasses(SetVerifier, SetDrafter))
    client = RunClient(config, handle, Calls())
    client.engine.tokenizer = tokenizer
    ends, outputs, failures = threading.Event(), list[list[tuple[int, ...]]](), list[Exception]()

    def generate() -> None:
        try:
            number = 0
            while not ends.is_set():
                number += 1
                encoded = encode_prompts(tokenizer, prompts, config.data.chat)
                samples = samples_of(encoded, [SAMPLING] * len(prompts), 1, (), f"{number}-")
                entries = [entry for entry, _ in samples]
                for _ in client.run(entries):
                    pass
                outputs.append([tuple(entry.token_ids) for entry in entries])
        except Exception as error:  # noqa: BLE001 - the test raises it
            failures.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    try:
        (verifier,) = client.view().verifiers.values()

        def ready() -> int:
            rows = client.status()
            phases = [row["phase"] for row in rows if row["kind"] == "drafter"]
            return len(phases) if set(phases) <= {"ready"} else -1

        def health_checks(number: int) -> None:
            """Wait for this many health checks."""
            until = ray.get(verifier.count_pings.remote()) + number
            wait_until(lambda: ray.get(verifier.count_pings.remote()) >= until, "health checks")

        def load(rows: int, expected: int) -> None:
            """Set the load; with the draft actors that it pays for, requests go on."""
            ray.get(verifier.set_load.remote(rows))
            wait_until(lambda: ready() == expected, f"{expected} draft actors with {rows} requests: {client.status()}")
            served = len(outputs)
            wait_until(lambda: failures or len(outputs) >= served + 2, "requests go on")
            assert not failures

        thread.start()
        load(0, 0)
        load(64, 4)
        load(1, 1)
        load(0, 0)
        # A number that a person sets holds whatever the load, until it is given back.
        client.scale({"draft_model": 2})
        load(64, 2)
        health_checks(6)
        assert ready() == 2
        client.scale({"draft_model": None})
        load(64, 4)
        load(0, 0)
        with pytest.raises(ConfigError, match="'suffix' is not configured"):
            client.scale({"suffix": None})
    finally:
        ends.set()
        thread.join(LIMIT_S)
        client.engine.close()
        assert ray.get(handle.shutdown.remote(), timeout=SHUTDOWN_S)
        ray.kill(handle)
    assert not failures and all(output == truth for output in outputs)
