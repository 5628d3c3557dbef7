"""The stage that trains: a calm run, then runs that lose their driver, actors, Ray's head or their disk, and go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.core.progress import PhaseProgress
from specactor_ray.runs.training import read_metrics
from tests import tiny
from tests.chaos.faults import Schedule
from tests.chaos.machine import SharedMemoryWatch, SmallDisk, marked_processes
from tests.chaos.record import Fault, Stage

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
RUN_S = 300.0
"""Longest time of one run, start and end included."""
END_S = 240.0
"""Longest time until a driver that cannot go on has ended with an error. Ray itself waits a minute for its head."""


def overrides(folder: Path, name: str, tasks: Path) -> list[str]:
    return [
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.path={tasks}",
        f"target.model={tiny.tiny_target()}",
        "target.dtype=float32",
        "target.kv_cache_gb=0.05",
        "target.max_batch=64",
        "drafters=[{method: ngram, cores: 0.5}, {method: suffix, cores: 0.5}]",
        "cluster.num_cpus=2",
        "cluster.pin_cores=false",
        "cluster.health_interval_s=0.5",
        "reward.timeout_s=120",  # a busy machine must not leave a sample out
        "reward.answer_pattern='is ([0-9]+)[.]'",
        "reward.functions=[{name: exact_match}, {name: length, weight: -0.5}]",
        "data.n=4",
        "sampling.max_tokens=32",
        "sampling.seed=1",
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=8",
        "trainer.learning_rate=0.001",
        "checkpoint.every=2",
        "tracking.tensorboard=false",
        "resume=auto",
    ]


class Run:
    """One training run, over all processes that go on with it."""

    def __init__(self, folder: Path, name: str, tasks: Path) -> None:
        self.folder = folder / name
        self._arguments = overrides(folder, name, tasks)
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / f"{name}.log"

    def start(self) -> Run:
        command = [sys.executable, "-m", "specactor_ray.cli.main", "train", *self._arguments]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        return self

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records so far."""
        path = self.folder / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError):
            return read_metrics(path) if path.exists() else []
        return []

    def wait_for_step(self, step: int) -> None:
        """Raises RuntimeError when the run ends before, or does not get there in time."""
        end = time.monotonic() + RUN_S
        assert self.process is not None
        while len(self.metrics) < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"step {step} was not reached: {self.tail()}")
            time.sleep(0.05)

    def wait(self, timeout_s: float = RUN_S) -> int | None:
        """The exit code; None when it did not end in time."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            if self.wait(60.0) is None:
                self.process.kill()

    def tail(self) -> str:
        """The last words."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").split("\n")
        return " | ".join(line.strip() for line in lines[-6:] if line.strip())[-600:]


class Trials:
    """Each method is one fault, done to a run of its own."""

    def __init__(self, folder: Path, mark: str, rng: random.Random, tasks: Path, stage: Stage) -> None:
        self._folder, self._mark, self._rng, self._tasks, self._stage = folder, mark, rng, tasks, stage
        self._runs = folder / "runs"
        self.calm: list[Any] = []

    def run_calm(self) -> None:
        run = Run(self._runs, "calm", self._tasks)
        with contextlib.closing(_Ending(run)):
            code = run.start().wait()
        self.calm = [record["train"] for record in run.metrics]
        if code != 0 or len(self.calm) != STEPS:
            raise RuntimeError(f"the calm run ended with {code} after {len(self.calm)} steps: {run.tail()}")
        if len({record["grad_norm"] for record in self.calm}) < STEPS:
            self._stage.differ("calm run: some steps taught nothing")

    def kill_driver(self, fault: Fault) -> None:
        run = Run(self._runs, "driver", self._tasks)
        self._break_and_go_on(fault, run, lambda: run.process and run.process.kill())

    def kill_gcs(self, fault: Fault) -> None:
        run = Run(self._runs, "gcs", self._tasks)
        self._break_and_go_on(fault, run, lambda: self._kill("gcs_server", fault), expect_error=True)

    def kill_trainer(self, fault: Fault) -> None:
        run = Run(self._runs, "trainer", self._tasks)
        self._break_and_go_on(fault, run, lambda: self._kill("TrainerActor", fault), expect_error=True)

    def kill_controller(self, fault: Fault) -> None:
        run = Run(self._runs, "controller", self._tasks)
        self._break_and_go_on(fault, run, lambda: self._kill(":Controller", fault), expect_error=True)

    def kill_verifier(self, fault: Fault) -> None:
        self._survive(fault, "verifier", "VerifierActor")

    def stop_trainer(self, fault: Fault) -> None:
        self._survive(fault, "pause", "TrainerActor", stop_s=3.0)

    def full_disk(self, fault: Fault) -> None:
        disk = SmallDisk(self._folder / "disk")
        run = Run(disk.folder, "disk", self._tasks)
        run.output = self._folder / "runs" / "disk.log"
        fault.note = disk.how
        try:
            fill = lambda: disk.fill(marked_processes(self._mark))  # noqa: E731
            self._break_and_go_on(fault, run, fill, expect_error=True, heal=disk.free)
        finally:
            run.end()
            disk.close()

    def _kill(self, command: str, fault: Fault, signals: tuple[int, ...] = (signal.SIGKILL,)) -> list[int]:
        pids = [pid for pid, line in marked_processes(self._mark).items() if command in line.split(" ")[0]]
        if not pids:
            raise RuntimeError(f"no process {command}: {sorted(marked_processes(self._mark).values())}")
        for pid in pids:
            for number in signals:
                os.kill(pid, number)
        fault.target = f"{command} {pids}"
        return pids

    def _break_and_go_on(
        self,
        fault: Fault,
        run: Run,
        strike: Callable[[], Any],
        expect_error: bool = False,
        heal: Callable[[], Any] = lambda: None,
    ) -> None:
        """A fault that ends the run: with an error in bounded time, and `resume=auto` goes on."""
        with contextlib.closing(_Ending(run)):
            run.start().wait_for_step(self._rng.randint(2, 4))
            begin = time.monotonic()
            strike()
            code = run.wait(END_S)
            fault.detected_s = fault.lasted_s = round(time.monotonic() - begin, 2)
            if code is None:
                self._stage.differ(f"{fault.kind}: the driver had not ended after {END_S:.0f} s: {run.tail()}")
                run.end()
            elif expect_error:
                fault.note = f"{fault.note} exit code {code}: {run.tail()}".strip()
                if code <= 0:
                    self._stage.differ(f"{fault.kind}: exit code {code}, expected an error: {run.tail()}")
            heal()
            done = len(run.metrics)
            run.start().wait_for_step(min(done + 1, STEPS))
            fault.recovered_s = round(time.monotonic() - begin, 2)
            self._compare(fault, run, run.wait())

    def _survive(self, fault: Fault, name: str, command: str, stop_s: float = 0.0) -> None:
        """A fault that the run gets over by itself."""
        run = Run(self._runs, name, self._tasks)
        with contextlib.closing(_Ending(run)):
            run.start().wait_for_step(self._rng.randint(2, 3))
            begin, done = time.monotonic(), len(run.metrics)
            if stop_s:
                pids = self._kill(command, fault, (signal.SIGSTOP,))
                time.sleep(stop_s)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            else:
                self._kill(command, fault)
            fault.lasted_s = round(time.monotonic() - begin, 2)
            run.wait_for_step(done + 2)
            fault.recovered_s = round(time.monotonic() - begin, 2)
            self._compare(fault, run, run.wait())

    def _compare(self, fault: Fault, run: Run, code: int | None) -> None:
        if code != 0:
            self._stage.differ(f"{fault.kind}: the run ended with exit code {code}: {run.tail()}")
        learnt = [record["train"] for record in run.metrics]
        self._stage.compared += len(learnt)
        if len(learnt) != STEPS:
            self._stage.differ(f"{fault.kind}: {len(learnt)} records instead of {STEPS}")
        for step, (mine, calm) in enumerate(zip(learnt, self.calm, strict=False), start=1):
            if mine != calm:
                keys = [key for key in calm if mine.get(key) != calm[key]]
                self._stage.differ(f"{fault.kind}, step {step}: {[(key, mine.get(key), calm[key]) for key in keys]}")


class _Ending:
    """Ends a run whatever happens."""

    def __init__(self, run: Run) -> None:
        self.close = run.end


def run_training(kinds: Sequence[str], folder: Path, mark: str, schedule: Schedule, console: Console) -> Stage:
    """Stage `training`."""
    stage, rng = Stage("training"), random.Random(f"training {schedule.seed}")
    shared = SharedMemoryWatch(mark)
    tasks = folder / "runs" / "tasks.jsonl"
    tasks.parent.mkdir()
    rows = [{"prompt": f"Add {a} and {b}.", "answer": str(a + b)} for a in range(1, 13) for b in range(1, 13)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    begin = time.monotonic()
    trials = Trials(folder, mark, rng, tasks, stage)
    with PhaseProgress(console, "training", len(kinds) + 1) as progress:
        trials.run_calm()
        for number, kind in enumerate(kinds, start=1):
            progress.update(number, f"{kind}, {len(stage.differences)} differences")
            fault = Fault(kind, at_s=round(time.monotonic() - begin, 2))
            stage.faults.append(fault)
            try:
                getattr(trials, "_".join(kind.lower().split()))(fault)
            except RuntimeError as error:
                stage.differ(f"{kind}: {error}")
            shared.look()
        progress.update(len(kinds) + 1, f"{len(stage.differences)} differences")
    stage.figures = {"steps": STEPS, "reward": [round(record["reward_mean"], 3) for record in trials.calm]}
    stage.figures["shared_memory_seen"] = shared.left()
    return stage
