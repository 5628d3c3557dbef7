"""The faults that strike a rollout on a cluster of two nodes, and who strikes them when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from specactor_ray import Rollout
from specactor_ray.cluster.backend import on_node
from specactor_ray.cluster.connection import find_actor
from tests.chaos.machine import OutOfMemory, alive
from tests.chaos.nodes import TwoNodes
from tests.chaos.record import Fault, Stage
from tests.chaos.watch import Open, Watch

RECOVER_S = 240.0
"""Longest wait for all to be well again after a fault."""
KINDS = (
    "kill verifier",
    "kill drafter",
    "stop verifier",
    "stop drafter",
    "stop controller",
    "stop driver",
    "stop raylet",
    "lose node",
    "out of memory",
    "full object store",
    "scale to zero",
    "close stream early",
    "new weights",
)
WEIGHTS = {"kill verifier": 3, "kill drafter": 3, "stop verifier": 2, "stop drafter": 2, "new weights": 2}


@dataclass(frozen=True)
class Schedule:
    """What strikes, in order."""

    seed: int
    kinds: tuple[str, ...]
    together: float = 0.25
    """Share of the faults after which the next one strikes before all is well again."""

    @classmethod
    def draw(cls, seed: int, count: int, together: float) -> Schedule:
        """Each kind once if `count` allows, the rest by weight."""
        rng = random.Random(f"chaos {seed}")
        weights = [WEIGHTS.get(kind, 1) for kind in KINDS]
        kinds = [*KINDS, *rng.choices(KINDS, weights, k=max(0, count - len(KINDS)))]
        rng.shuffle(kinds)
        return cls(seed, tuple(kinds[:count]), together)


@dataclass
class Wishes:
    """What the injector asks of the thread that streams."""

    close_early: threading.Event = field(default_factory=threading.Event)
    new_weights: threading.Event = field(default_factory=threading.Event)


class Injector:
    """Strikes according to the schedule, in a thread of its own; `done` when all faults are used up and healed."""

    def __init__(
        self,
        rollout: Rollout,
        nodes: TwoNodes,
        watch: Watch,
        stage: Stage,
        schedule: Schedule,
        memory: OutOfMemory,
    ) -> None:
        self.wishes, self.done = Wishes(), threading.Event()
        self.error = ""
        self._rollout, self._nodes, self._watch, self._stage = rollout, nodes, watch, stage
        self._schedule, self._memory = schedule, memory
        self._rng = random.Random(f"strikes {schedule.seed}")
        self._begin = time.monotonic()
        self._stopped: set[int] = set()
        self._struck: list[Open] = []
        self._quit = threading.Event()
        handle = find_actor(rollout.run_name)
        self._controller_pid = ray.get(handle.__ray_call__.remote(lambda _self: os.getpid()), timeout=60)
        self._normal = dict(watch.wanted)
        self._thread = threading.Thread(target=self._run, name="injector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No more faults; whatever is stopped continues."""
        self._quit.set()
        for pid in list(self._stopped):
            self._signal(pid, signal.SIGCONT)
        self._thread.join(60.0)

    def _run(self) -> None:
        try:
            for kind in self._schedule.kinds:
                if self._quit.wait(self._rng.uniform(0.1, 1.0)):
                    return
                opened = self._strike(kind)
                if self._rng.random() >= self._schedule.together:
                    self._await(opened)
            for opened in self._struck:
                self._await(opened)
        except Exception as error:  # noqa: BLE001 - the stage reports it
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.done.set()

    def _strike(self, kind: str) -> Open:
        fault = Fault(kind, at_s=round(time.monotonic() - self._begin, 2))
        self._stage.faults.append(fault)
        strike: Callable[[Fault], Open] = getattr(self, "_" + kind.replace(" ", "_"))
        opened = strike(fault)
        self._struck.append(opened)
        return opened

    def _await(self, opened: Open) -> None:
        end = time.monotonic() + RECOVER_S
        while not opened.recovered.wait(0.2) and not self._quit.is_set():
            if time.monotonic() > end:
                what = f"{opened.fault.kind} ({opened.fault.target})"
                self._stage.differ(f"{RECOVER_S:.0f} s after {what} all was not well: {self._ill()}")
                return

    def _ill(self) -> str:
        rows = [f"{row['id']} {row['phase']} {row['silent_s']} {row['note']}" for row in self._watch.rows]
        return f"wanted {self._watch.wanted}, tokens {self._rollout.committed_tokens}, status {rows}"

    # ---- processes ----

    def _victim(self, kind: str) -> dict[str, Any]:
        end = time.monotonic() + RECOVER_S
        while time.monotonic() < end and not self._quit.is_set():
            rows = [row for row in self._watch.rows if row["kind"] == kind and row["phase"] == "ready"]
            rows = [row for row in rows if row["pid"] and alive(row["pid"])]
            if rows:
                return self._rng.choice(rows)
            time.sleep(0.1)
        raise RuntimeError(f"no {kind} to strike within {RECOVER_S:.0f} s: {self._ill()}")

    def _kill(self, fault: Fault, kind: str) -> Open:
        row = self._victim(kind)
        fault.target = row["id"]
        opened = self._watch.begin(fault, [row["id"]], fatal=True)
        self._signal(row["pid"], signal.SIGKILL)
        self._watch.over(opened)
        return opened

    def _kill_verifier(self, fault: Fault) -> Open:
        return self._kill(fault, "verifier")

    def _kill_drafter(self, fault: Fault) -> Open:
        return self._kill(fault, "drafter")

    def _stop(self, fault: Fault, pid: int, seconds: float, targets: list[str]) -> Open:
        opened = self._watch.begin(fault, targets)
        self._stopped.add(pid)
        self._signal(pid, signal.SIGSTOP)
        self._quit.wait(seconds)
        self._signal(pid, signal.SIGCONT)
        self._stopped.discard(pid)
        self._watch.over(opened)
        return opened

    def _stop_actor(self, fault: Fault, kind: str) -> Open:
        row = self._victim(kind)
        fault.target = row["id"]
        return self._stop(fault, row["pid"], self._rng.choice([0.5, 2.0, 12.0]), [row["id"]])

    def _stop_verifier(self, fault: Fault) -> Open:
        return self._stop_actor(fault, "verifier")

    def _stop_drafter(self, fault: Fault) -> Open:
        return self._stop_actor(fault, "drafter")

    def _stop_controller(self, fault: Fault) -> Open:
        return self._stop(fault, self._controller_pid, self._rng.choice([1.0, 8.0, 20.0]), [])

    def _stop_raylet(self, fault: Fault) -> Open:
        fault.target = "second node"
        return self._stop(fault, self._nodes.second_raylet(), self._rng.uniform(1.0, 6.0), [])

    def _stop_driver(self, fault: Fault) -> Open:
        """This process, all threads: another one has to let it continue."""
        opened = self._watch.begin(fault)
        pid, seconds = os.getpid(), self._rng.choice([1.0, 6.0])
        script = f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
        subprocess.run(["sh", "-c", script], check=True, timeout=60)
        self._watch.over(opened)
        return opened

    def _out_of_memory(self, fault: Fault) -> Open:
        row = self._victim("verifier")
        fault.target = row["id"]
        opened = self._watch.begin(fault, [row["id"]], fatal=True)
        fault.note = self._memory.strike(row["pid"])
        self._watch.over(opened)
        return opened

    # ---- the cluster ----

    def _lose_node(self, fault: Fault) -> Open:
        """The second node goes and, a while later, another one comes."""
        lost = self._nodes.second_id()
        targets = [row["id"] for row in self._watch.rows if row["node_id"] == lost and row["pid"]]
        fault.target = f"{len(targets)} actors"
        opened = self._watch.begin(fault, targets, fatal=True)
        self._nodes.lose_second()
        self._quit.wait(self._rng.uniform(0.0, 4.0))
        self._nodes.add_second()
        self._watch.over(opened)
        return opened

    def _full_object_store(self, fault: Fault) -> Open:
        opened = self._watch.begin(fault)
        held = _hold_object_store.options(**on_node(ray.get_runtime_context().get_node_id()))
        filled = ray.get(held.remote(self._nodes.STORE_MB, self._rng.uniform(1.0, 4.0)), timeout=120)
        fault.note = f"{filled} of {self._nodes.STORE_MB} MB held"
        self._watch.over(opened)
        return opened

    # ---- wishes ----

    def _scale_to_zero(self, fault: Fault) -> Open:
        opened = self._watch.begin(fault)
        for wanted in (dict.fromkeys(self._normal, 0), self._normal):
            self._watch.wanted = dict(wanted)
            self._rollout.scale(wanted)
            if not any(wanted.values()):
                self._quit.wait(self._rng.uniform(0.5, 4.0))
        self._watch.over(opened)
        return opened

    def _wish(self, fault: Fault, wish: threading.Event) -> Open:
        opened = self._watch.begin(fault)
        wish.set()
        end = time.monotonic() + RECOVER_S
        while wish.is_set() and time.monotonic() < end and not self._quit.is_set():
            time.sleep(0.05)
        self._watch.over(opened)
        return opened

    def _close_stream_early(self, fault: Fault) -> Open:
        return self._wish(fault, self.wishes.close_early)

    def _new_weights(self, fault: Fault) -> Open:
        return self._wish(fault, self.wishes.new_weights)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@ray.remote
def _hold_object_store(megabytes: int, seconds: float) -> int:
    """Fill the object store of this node, hold it for a while; returns how many MB it took."""
    held, filled = [], 0
    with contextlib.suppress(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        while filled < megabytes:
            reference = ray.put(np.ones(8 << 20, dtype=np.uint8))
            held.append((reference, ray.get(reference)))  # what is in use cannot be spilled
            filled += 8
    time.sleep(seconds)
    return filled
