"""SIGTERM while a run starts: an orderly end, and nothing left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from specactor_ray.core.signals import interruption, sigterm_interrupts
from tests.tiny import tiny_target
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster, to which this process is connected."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For the private cluster, whose sockets have long names."""
    folder = Path(tempfile.mkdtemp(prefix="sg", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def starts_verifier(driver: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("VerifierActor" in " ".join(p.cmdline()) for p in psutil.Process(driver).children(recursive=True))
    return False


def test_sigterm_while_actors_start_ends_in_order(tmp_path: Path, short_folder: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Count from 1 to 5.\n")
    overrides = [
        f"target.model={tiny_target()}",
        "target.kv_cache_gb=0.05",
        "mode=decoupled",
        "drafters=[{method: ngram, hosted: false}]",
        f"data.path={tmp_path / 'prompts.txt'}",
        f"run.dir={tmp_path / 'runs'}",
        "cluster.num_cpus=2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "specactor_ray.cli.main", "rollout", *overrides],
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: process.poll() is not None or starts_verifier(process.pid), "a verifier's process", 120.0)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 130, output
    assert "interrupted; stopping ..." in output and "SIGTERM: " in output and "Traceback" not in output
    assert not list(short_folder.glob("specactor-*"))
    left = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] if (tmp_path / "runs").exists() else []
    assert not left or any(path.name == "summary.json" for path in left)


IN_A_FORK = """
import os, signal, threading
from specactor_ray.cluster.connection import connect
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.signals import Terminated, sigterm_interrupts

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=threading.Event().wait, daemon=True).start()  # takes the signal, which the main thread blocks
os.register_at_fork(before=terminate)
with sigterm_interrupts():
    try:
        with connect(ClusterConfig(num_cpus=1)):
            print("started")
    except Terminated:
        print("terminated")
"""


def test_sigterm_while_ray_forks_is_neither_lost_nor_tears_a_lock(short_folder: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(short_folder)}
    command = [sys.executable, "-c", IN_A_FORK]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "terminated\n", "interrupted; stopping ...\n")
    assert not list(short_folder.glob("specactor-*"))


AFTER_A_START = """
import os, signal, sys, time
from specactor_ray.cluster.connection import connect
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.signals import Terminated, sigterm_interrupts

with sigterm_interrupts():
    with connect(ClusterConfig(address=sys.argv[1])):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except Terminated:
            time.sleep(4)  # an orderly end, longer than the 3 seconds that Ray's own handler permits
            print("ended")
"""


def test_an_orderly_end_after_sigterm_has_its_time(address: str) -> None:
    command = [sys.executable, "-c", AFTER_A_START, address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "interrupted; stopping ...\n")


def test_sigterm_while_ray_waits_is_told_from_ctrl_c(address: str) -> None:
    slow = ray.remote(lambda: time.sleep(60)).remote()
    alarm = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    with sigterm_interrupts():
        alarm.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            ray.get(slow)
    assert interruption(caught.value) == "SIGTERM"
    ray.cancel(slow, force=True)
