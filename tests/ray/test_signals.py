"""SIGTERM while a run starts: an orderly end, and nothing left."""

from __future__ import annotations

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

import pytest
import ray

from specactor_ray.core.signals import interruption, sigterm_interrupts
from tests.tiny import tiny_target

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For the private cluster, whose sockets have long names."""
    folder = Path(tempfile.mkdtemp(prefix="sg", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("phase", ["starting Ray", "starting decoupled actors"])
def test_sigterm_during_a_start_is_answered_and_ends_in_order(tmp_path: Path, short_folder: Path, phase: str) -> None:
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
        [sys.executable, "-m", "specactor_ray", "rollout", *overrides],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert any(line.startswith(phase) for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 130, output
    assert "interrupted; stopping ..." in output and "SIGTERM: ended before" in output and "Traceback" not in output
    assert not list(short_folder.glob("specactor-*"))
    assert not list((tmp_path / "runs").rglob("*.*"))


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
        connect(ClusterConfig(num_cpus=1))
    except Terminated:
        print("terminated")
"""


def test_sigterm_while_ray_forks_is_neither_lost_nor_tears_a_lock(short_folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_folder)}
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
    with connect(ClusterConfig(address=sys.argv[1], num_cpus=1 if sys.argv[1] == "local" else None)):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except Terminated:
            time.sleep(5)  # an orderly end, longer than the 3 seconds that Ray's own handler permits
            print("ended")
"""


@pytest.mark.parametrize("address", ["local", "joined"])
def test_an_orderly_end_after_sigterm_has_its_time(address: str, short_folder: Path) -> None:
    if address == "joined":
        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
        address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", AFTER_A_START, address]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    finally:
        ray.shutdown()
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "interrupted; stopping ...\n")


def test_sigterm_while_ray_waits_is_told_from_ctrl_c() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    try:
        slow = ray.remote(lambda: time.sleep(60))
        alarm = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
        with sigterm_interrupts():
            alarm.start()
            with pytest.raises(KeyboardInterrupt) as caught:
                ray.get(slow.remote())
        assert interruption(caught.value) == "SIGTERM"
    finally:
        ray.shutdown()
