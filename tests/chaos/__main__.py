"""`scripts/chaos`: a calm run, then the same under a seeded schedule of real faults; what comes out must be equal."""

from __future__ import annotations

import argparse
import contextlib
import functools
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specactor_ray.core.console import make_console, say
from specactor_ray.core.signals import sigterm_interrupts
from tests.chaos.machine import MARK, await_gone, end_run, release_disk, release_memory
from tests.chaos.record import TRIALS, Stage, by_kind

ROOT = Path(__file__).resolve().parents[2]
STAGE_S = {"streams": 120.0, "network": 900.0, "training": 2400.0}
"""Longest time of a stage; `streams` has `FAULT_S` more for each fault."""
FAULT_S = 120.0
OWN_FILES = {"ray", "runs", "disk", "stage.json", "stage.log", f"torchinductor_{getpass.getuser()}"}
"""What the stages themselves, or torch, make in the folder for temporary files; anything else was left over."""
_OFTEN = {"num_failures": -1, "req_failure_prob": 2, "resp_failure_prob": 2, "in_flight_failure_prob": 2}
_ONCE = {"num_failures": 2, "req_failure_prob": 20, "resp_failure_prob": 20, "in_flight_failure_prob": 20}
NETWORK = {
    "RAY_testing_rpc_failure": json.dumps(
        {
            "CoreWorkerService.grpc_client.PushTask": _OFTEN,
            "NodeManagerService.grpc_client.RequestWorkerLease": _ONCE,
            "NodeManagerService.grpc_client.PrepareBundleResources": _ONCE,
            "ray::rpc::ActorInfoGcsService.grpc_client.GetActorInfo": _ONCE,
            "ray::rpc::PlacementGroupInfoGcsService.grpc_client.GetPlacementGroup": _ONCE,
        }
    ),
    "RAY_testing_asio_delay_us": "CoreWorkerService.grpc_server.PushTask=0:50000",
}
"""Of 100 calls to actors two are lost on the way out, two on the way back, and two fail while they are carried out."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] in ("--virtual", "--replay") for argument in arguments):
        from tests.faults.campaign import main as run_virtual

        return run_virtual(arguments)
    options = parse(arguments)
    if options.stage:
        return run_stage(options)
    console = make_console(sys.stderr)
    names = ["streams"] if options.short else options.stages.split(",")
    count = options.faults if options.faults is not None else 13 if options.short else 60
    mark = f"{os.getpid()}-{time.time_ns():x}"
    base = Path(tempfile.mkdtemp(prefix="cx-", dir="/tmp"))  # Ray's sockets below it have long names
    stages: list[Stage] = []
    try:
        with sigterm_interrupts():
            for name in names:
                say(console, f"stage {name}")
                stages.append(run_child(name, options, count, mark, base, console))
    except KeyboardInterrupt:
        say(console, "interrupted: everything that was started is ended")
        return 130
    finally:
        end_run(mark)
        release_memory(mark)
        release_disk(base / "t" / "disk")
        shutil.rmtree(base, ignore_errors=True)
    show(stages, console)
    if options.json:
        Path(options.json).write_text(json.dumps(summary(stages, options.seed), indent=1), encoding="utf-8")
    return 0 if all(stage.passed for stage in stages) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    virtual = "Faults on virtual time, without Ray: --virtual N; its options: --virtual 1 --help."
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__, epilog=virtual)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: 0)")
    parser.add_argument("--faults", type=int, help="how many strike the streams (default: 60, with --short 13)")
    parser.add_argument("--short", action="store_true", help="only the streams, each kind of fault once")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--stages", default=",".join(STAGE_S), help=f"which to run (default: {','.join(STAGE_S)})")
    parser.add_argument(
        "--trials", default=",".join(TRIALS), help=f"of the stage `training` (default: {','.join(TRIALS)})"
    )
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs also of stages that passed")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, known in (("stages", STAGE_S), ("trials", TRIALS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if options.faults is not None and options.faults < 1:
        parser.error(f"--faults is {options.faults}; it must be 1 or more")
    return options


def run_child(name: str, options: argparse.Namespace, count: int, mark: str, base: Path, console: Console) -> Stage:
    """Run a stage in a process of its own, and look for what it leaves behind."""
    folder = base / name[0]
    folder.mkdir()
    result, begin = folder / "stage.json", time.monotonic()
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= NETWORK if name == "network" else {}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    command = [sys.executable, "-m", "tests.chaos", "--stage", name, "--folder", str(folder)]
    command += ["--seed", str(options.seed), "--faults", str(count), "--trials", options.trials]
    command += ["--short"] if options.short else []
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    limit_s = STAGE_S[name] + (FAULT_S * count if name == "streams" else 0.0)
    problem = ""
    try:
        code = process.wait(limit_s)
        problem = "" if code == 0 else f"the stage ended with exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"the stage did not end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            end_in_order(process)
    stage = Stage.read(result) if result.exists() else Stage(name)
    stage.seconds = round(time.monotonic() - begin, 1)
    if problem:
        stage.differ(problem)
    if name == "network":
        stage.figures["failed_rpcs"] = count_failed_rpcs(folder)
        if not stage.figures["failed_rpcs"]:
            stage.differ("no RPC failed: Ray's fault injection is not what it was")
    left = await_gone(mark, 30.0)
    stage.left += [f"process {pid}: {command}" for pid, command in left.items()]
    end_run(mark)
    seen = stage.figures.pop("shared_memory_seen", [])
    stage.left += [f"shared memory {one}" for one in seen if Path("/dev/shm", one).exists()]
    stage.left += [f"file {path.name}" for path in folder.iterdir() if path.name not in OWN_FILES]
    if options.keep_logs or not stage.passed:
        keep_logs(folder, console)
    return stage


def count_failed_rpcs(folder: Path) -> int:
    """How many RPCs Ray let fail on purpose, by its logs."""
    logs = folder.glob("ray/session_2*/logs/**/*.log")
    return sum(log.read_bytes().count(b"Inject RPC") for log in [*logs, folder / "stage.log"] if log.is_file())


def end_in_order(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60.0)


def keep_logs(folder: Path, console: Console) -> None:
    """Copy the logs of a stage that failed to where they outlive it."""
    where = Path(tempfile.mkdtemp(prefix="chaos-logs-", dir="/tmp"))
    with contextlib.suppress(OSError):
        shutil.copy(folder / "stage.log", where)
    for log in folder.glob("*/*.log"):
        shutil.copy(log, where)
    for logs in folder.glob("**/session_2*/logs"):
        shutil.copytree(logs, where / logs.parent.name, ignore=shutil.ignore_patterns("events", "*.sock"))
    say(console, f"the logs of the stage are in {where}")


def run_stage(options: argparse.Namespace) -> int:
    """Runs in the child."""
    import logging

    logging.basicConfig(
        filename=options.folder / "stage.log", level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from tests.chaos import streams
    from tests.chaos.faults import Schedule

    stages: dict[str, Any] = {"streams": streams.run_streams, "network": streams.run_network}
    if options.stage == "training":
        from tests.chaos import training

        stages["training"] = functools.partial(training.run_training, options.trials.split(","))
    console = make_console(os.fdopen(os.dup(2), "w", buffering=1))
    log = os.open(options.folder / "stage.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)  # Ray's messages on dead workers would tear the bar
    os.dup2(log, 2)
    begin = time.monotonic()
    with sigterm_interrupts():
        try:
            schedule = Schedule.draw(options.seed, options.faults, 0.75 if options.short else 0.25)
            stage = stages[options.stage](options.folder, os.environ[MARK], schedule, console)
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            logging.exception("the stage failed")
            stage = Stage(options.stage, differences=[f"{type(error).__name__}: {error}"])
    stage.seconds = round(time.monotonic() - begin, 1)
    stage.write(options.folder / "stage.json")
    return 0


def summary(stages: Sequence[Stage], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "passed": all(stage.passed for stage in stages),
        "faults": sum(len(stage.faults) for stage in stages),
        "stages": [
            {
                "name": stage.name,
                "passed": stage.passed,
                "seconds": stage.seconds,
                "compared": stage.compared,
                "differences": stage.differences,
                "left": stage.left,
                "figures": stage.figures,
                "notes": stage.notes,
                "by_kind": by_kind(stage.faults),
                "faults": [vars(fault) for fault in stage.faults],
            }
            for stage in stages
        ],
    }


def show(stages: Sequence[Stage], console: Console) -> None:
    table = Table(title="chaos", box=SIMPLE_HEAD)
    for heading in ("stage", "fault", "injected", "detected", "recovered", "detected after", "recovered after"):
        table.add_column(heading, justify="left" if heading in ("stage", "fault") else "right")
    for stage in stages:
        for kind, figures in by_kind(stage.faults).items():
            counts = [str(figures[name]) for name in ("injected", "detected", "recovered")]
            table.add_row(stage.name, kind, *counts, *(_times(figures[name]) for name in ("detected_s", "recovered_s")))
    console.print(table)
    for stage in stages:
        verdict = "equal to the calm run" if not stage.differences else f"{len(stage.differences)} differences"
        left = f"{len(stage.left)} things left over" if stage.left else "nothing left over"
        say(console, f"{stage.name}: {stage.compared} compared, {verdict}; {left}; {stage.seconds:.0f} s")
        say(console, "  " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in stage.figures.items()))
        for line in [*stage.notes, *stage.differences, *stage.left]:
            say(console, f"  {line}")


def _times(seconds: Sequence[float] | None) -> str:
    return "-" if seconds is None else f"{seconds[0]:.1f} s, at most {seconds[1]:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
