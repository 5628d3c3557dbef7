"""`ray start --head` and `ray job submit` of the scripts in `jobs/`, as a user would, with token authentication."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tiny
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent


@dataclass
class Head:
    address: str
    """Address of the dashboard."""
    cluster: str
    environment: dict[str, str]

    def submit(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """By the command of docs/training.md."""
        command = [str(SCRIPTS / "ray"), "job", "submit", "--address", self.address, "--working-dir", "."]
        command += ["--runtime-env", "conf/runtime_env.yaml", "--", "python", f"jobs/{script}.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(command, cwd=ROOT, env=self.environment, timeout=200, check=False, **pipes)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="sa-", dir="/tmp"))  # short: Ray puts sockets far below it
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment["PATH"] = f"{SCRIPTS}:{os.environ['PATH']}"  # as in an activated environment
    environment.pop("RAY_ADDRESS", None)
    port, dashboard, agent = free_port(), free_port(), free_port()
    command = [str(SCRIPTS / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", f"--temp-dir={folder}"]
    command += [f"--dashboard-agent-listen-port={agent}"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        wait_until(lambda: answers(dashboard, process), "the dashboard", 120.0)
        yield Head(address, f"127.0.0.1:{port}", environment)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def answers(port: int, process: subprocess.Popen) -> bool:
    assert process.poll() is None, "ray start failed"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def overrides(tmp_path: Path) -> list[str]:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Tell me about the {c} fox."}) + "\n" for c in tiny.COLOURS))
    return [
        f"run.dir={tmp_path / 'runs'}",
        "run.name=job",
        f"data.path={tasks}",
        f"target.model={tiny.tiny_target()}",
        "target.kv_cache_gb=0.05",
        "drafters=[{method: ngram}]",
        "data.n=4",
        "sampling.max_tokens=16",
    ]


def test_a_submitted_job_succeeds(head: Head, tmp_path: Path) -> None:
    done = head.submit("rollout", *overrides(tmp_path))
    output = done.stdout
    assert done.returncode == 0 and "succeeded" in output, output
    assert "run job: mode " in output and "run job: from another terminal, specactor status" in output
    assert head.cluster.rpartition("127.0.0.1")[2] in output  # in this line: the run joined the job's cluster
    assert len((tmp_path / "runs" / "job" / "trajectories.jsonl").read_text().splitlines()) == 4 * len(tiny.COLOURS)


def test_without_the_token_the_error_says_what_to_do(head: Head, tmp_path: Path) -> None:
    environment = {name: value for name, value in head.environment.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-m", "specactor_ray.cli.main", "status", "--address", head.cluster],
        cwd=ROOT,
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr and "Traceback" not in done.stderr
