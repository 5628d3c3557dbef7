"""The stages that stream: a calm run, then the same requests again and again while faults strike."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console

from specactor_ray import Rollout, SamplingParams
from specactor_ray.actors.process import put_weights
from specactor_ray.cluster.calls import Calls
from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import draft_actors
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.models.loading import load_model
from specactor_ray.models.weight_buckets import pack
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.transport.messages import WeightSet
from tests.chaos.faults import Injector, Schedule
from tests.chaos.machine import OutOfMemory, SharedMemoryWatch, alive
from tests.chaos.nodes import TwoNodes
from tests.chaos.record import Stage
from tests.chaos.watch import Watch, unsettled
from tests.tiny import tiny_draft, tiny_prompts, tiny_target

PROMPTS, SAMPLES = 16, 4
SAMPLING = SamplingParams(temperature=1.0, max_tokens=64, seed=11)
VERIFIERS = 2
STUCK_S = 300.0
"""A stream without a single new token for so long has failed."""
NETWORK_STREAMS = 12
CPUS = 3.0
"""Of each node: all actors find room on two nodes, and some on one."""
Output = tuple[tuple[int, ...], str]


def chaos_config(address: str, folder: Path) -> Config:
    model = {"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05, "replicas": 1, "cores": 0.5}
    return from_mapping(
        {
            "mode": "decoupled",
            "run": {"dir": str(folder)},
            "target": {"model": str(tiny_target()), "replicas": VERIFIERS, "max_batch": 16, "kv_cache_gb": 0.05},
            "drafters": [
                {"method": "ngram", "hosted": False, "replicas": 2, "cores": 0.5},
                {"method": "suffix", "replicas": 1, "cores": 0.5, "min_match": 1},
                model,
            ],
            "cluster": {
                "address": address,
                "pin_cores": False,
                "health_interval_s": 0.5,
                "health_timeout_s": 6.0,
                "stall_timeout_s": 60.0,
                "start_timeout_s": 120.0,
                "placement_timeout_s": 120.0,
            },
            "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02},
        }
    )


class Weights:
    """The target's own weights and others, in turn."""

    def __init__(self, rollout: Rollout) -> None:
        import torch

        self._rollout = rollout
        own = {name: value.clone() for name, value in load_model(str(tiny_target())).state_dict().items()}
        noise = torch.Generator().manual_seed(5)
        other = {
            name: value + 0.1 * value.std() * torch.randn(value.shape, generator=noise) if value.dim() > 1 else value
            for name, value in own.items()
        }
        self._sets = [own, other]
        self.version = 0
        self._held: WeightSet | None = None

    @property
    def kind(self) -> int:
        """Which of the two is in place."""
        return self.version % 2

    def update(self) -> None:
        """Bring the other ones to the verifiers.

        Raises:
            SpecActorError: They were not taken, although asked for several times.
        """
        self.version += 1
        bucket = pack(self._sets[self.kind].items(), torch.float32)
        self._held = put_weights(self.version, [bucket], Calls())
        for _attempt in range(2):
            with contextlib.suppress(SpecActorError):
                self._rollout.update_weights(self._held)
                return
        self._rollout.update_weights(self._held)


class Streams:
    """Streams requests and holds what comes back against the calm run."""

    def __init__(self, rollout: Rollout, stage: Stage) -> None:
        self.rollout, self.stage = rollout, stage
        self.weights = Weights(rollout)
        self.calm: list[dict[str, Trajectory]] = []
        self.streaming = False
        self.count = 0

    def run_calm(self) -> None:
        for _kind in range(2):
            done = self.rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
            self.calm.append({_place(one): one for one in done})
            for one in done:
                if one.error:
                    self.stage.differ(f"calm run: {_place(one)} failed: {one.error}")
            self.weights.update()
        if self.calm[0] and all(self.calm[0][at].token_ids == self.calm[1][at].token_ids for at in self.calm[0]):
            self.stage.differ("calm run: other weights gave the same tokens")

    def run_one(self, closes: Callable[[], bool] = lambda: False) -> None:
        """One stream; `closes` says whether to leave it now."""
        self.count += 1
        expected, seen = self.calm[self.weights.kind], set()
        stream = self.rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        for one in stream:
            place = _place(one)
            if place in seen:
                self.stage.differ(f"stream {self.count}: {place} came twice")
            seen.add(place)
            self._compare(one, expected[place])
            if closes():
                stream.close()  # type: ignore[attr-defined]
                return
        if len(seen) != len(expected):
            self.stage.differ(f"stream {self.count}: {len(expected) - len(seen)} requests did not end")

    def _compare(self, one: Trajectory, calm: Trajectory) -> None:
        self.stage.compared += 1
        where = f"stream {self.count}, version {self.weights.version}, {_place(one)}"
        if (one.token_ids, one.finish_reason) != (calm.token_ids, calm.finish_reason):
            self.stage.differ(f"{where}: {one.finish_reason} {one.error} {one.token_ids}, calm: {calm.token_ids}")
        elif len(one.logprobs) != len(calm.logprobs) or not all(
            math.isclose(mine, theirs, abs_tol=1e-3) for mine, theirs in zip(one.logprobs, calm.logprobs, strict=True)
        ):
            self.stage.differ(f"{where}: log-probabilities {one.logprobs}, calm: {calm.logprobs}")


def _place(one: Trajectory) -> str:
    return f"{one.prompt_index}/{one.sample_index}"


def run_streams(folder: Path, mark: str, schedule: Schedule, console: Console) -> Stage:
    """Stage `streams`: processes, nodes, memory, object store, scaling and streams left early."""
    stage = Stage("streams")
    shared = SharedMemoryWatch(mark)
    with OutOfMemory(mark) as memory, TwoNodes(folder / "ray", CPUS) as nodes:
        stage.notes.append(f"out of memory: {'memory control group' if memory.available else 'not to be had here'}")
        with Rollout(chaos_config(nodes.address, folder)) as rollout:
            streams = Streams(rollout, stage)
            streams.run_calm()
            wanted = draft_actors(rollout.config)
            with Watch(rollout.status, lambda: rollout.committed_tokens, VERIFIERS, wanted) as watch:
                injector = Injector(rollout, nodes, watch, stage, schedule, memory)
                try:
                    with Watchdog(watch, stage):
                        _stream_under_faults(streams, injector, len(schedule.kinds), console, shared)
                        streams.run_one()
                        _await_settled(watch, stage)
                finally:
                    injector.close()
                if injector.error:
                    stage.differ(f"the injector failed: {injector.error}")
                stage.figures = _figures(rollout, streams, watch)
                pids = [row["pid"] for row in rollout.status() if row["pid"]]
        shared.look()
        _look_for_leftovers(stage, pids)
    stage.figures["shared_memory_seen"] = shared.left()
    return stage


def _stream_under_faults(
    streams: Streams, injector: Injector, count: int, console: Console, shared: SharedMemoryWatch
) -> None:
    wishes, stage = injector.wishes, streams.stage

    def closes() -> bool:
        leaves = wishes.close_early.is_set()
        wishes.close_early.clear()
        return leaves

    with PhaseProgress(console, "faults", count) as progress:
        injector.start()
        while not injector.done.is_set():
            if wishes.new_weights.is_set():
                streams.weights.update()
                wishes.new_weights.clear()
            streams.run_one(closes)
            shared.look()
            last = stage.faults[-1].kind if stage.faults else "none"
            progress.update(len(stage.faults), f"stream {streams.count}, {len(stage.differences)} differences, {last}")


def _await_settled(watch: Watch, stage: Stage, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not watch.settled and time.monotonic() < end:
        time.sleep(0.2)
    for problem in unsettled(watch.rows, VERIFIERS, watch.wanted):
        stage.differ(f"{timeout_s:.0f} s after the last fault: {problem}")


def _figures(rollout: Rollout, streams: Streams, watch: Watch) -> dict[str, Any]:
    return {
        "streams": streams.count,
        "weight_versions": streams.weights.version,
        "tokens": rollout.committed_tokens,
        "reissued_requests": rollout.reissued_requests,
        "incarnations": len(watch.incarnations),
    }


def _look_for_leftovers(stage: Stage, pids: Sequence[int], timeout_s: float = 30.0) -> None:
    """The rollout is closed, its cluster still runs."""
    end = time.monotonic() + timeout_s
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.2)
    stage.left += [f"actor process {pid}" for pid in pids if alive(pid)]
    groups = ray.util.placement_group_table().values()
    stage.left += [f"placement group {group['name']}" for group in groups if group["state"] != "REMOVED"]
    named = ray.util.list_named_actors(all_namespaces=True)
    stage.left += [f"actor {actor['name']}" for actor in named if "specactor" in actor["name"]]


class Watchdog:
    """Ends a stream that is stuck: the main thread gets a `StuckError`."""

    def __init__(self, watch: Watch, stage: Stage) -> None:
        self._watch, self._stage = watch, stage
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._before = signal.signal(signal.SIGALRM, _raise_stuck)
        self._watch.moved_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.signal(signal.SIGALRM, self._before)

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            if time.monotonic() - self._watch.moved_at > STUCK_S:
                self._stage.differ(f"no token for {STUCK_S:.0f} s; status: {self._watch.rows}")
                os.kill(os.getpid(), signal.SIGALRM)
                return


class StuckError(Exception):
    pass


def _raise_stuck(_number: int, _frame: Any) -> None:
    raise StuckError("the stream is stuck")


def run_network(folder: Path, _mark: str, _schedule: Schedule, console: Console) -> Stage:
    """Stage `network`: Ray's own faults, see `NETWORK`; here they must change nothing."""
    stage = Stage("network")
    with TwoNodes(folder / "ray", CPUS) as nodes, Rollout(chaos_config(nodes.address, folder)) as rollout:
        streams = Streams(rollout, stage)
        streams.run_calm()
        wanted = draft_actors(rollout.config)
        watch = Watch(rollout.status, lambda: rollout.committed_tokens, VERIFIERS, wanted)
        with watch, Watchdog(watch, stage):
            with PhaseProgress(console, "streams over a bad network", NETWORK_STREAMS) as progress:
                for number in range(NETWORK_STREAMS):
                    streams.run_one()
                    if number % 3 == 2:
                        streams.weights.update()
                    progress.update(number + 1, f"{len(stage.differences)} differences")
            _await_settled(watch, stage)
            stage.figures = _figures(rollout, streams, watch)
    stage.notes = [f"{name}={os.environ[name]}" for name in ("RAY_testing_rpc_failure", "RAY_testing_asio_delay_us")]
    return stage
