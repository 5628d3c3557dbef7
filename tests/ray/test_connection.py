"""Two clusters one after the other, another process that finds one, and which modules workers import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, psutil, stat, subprocess, sys, ray
from specactor_ray.cluster.connection import connect
from specactor_ray.cluster.address import clusters_here
from specactor_ray.cli.main import put_current_folder_last
from specactor_ray.config.schema import ClusterConfig

@ray.remote
def modules():
    import graphlib, mine, specactor_ray
    return mine.__file__, os.path.exists("planted"), specactor_ray.__file__, os.getpriority(os.PRIO_PROCESS, 0)

FINDS_IT = '''
import sys
from specactor_ray.rollout.operations import status_of_run
status_of_run(None, sys.argv[1])
'''

JOINS_IT = '''
from specactor_ray.cluster.connection import connect
from specactor_ray.config.schema import ClusterConfig
with connect(ClusterConfig(address="auto")) as connection:
    print("joined", connection)
'''

LEAVES_A_FOLDER = '''
import os, signal, sys
from specactor_ray.core.leftovers import make_owned_folder
make_owned_folder("specactor-", sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
'''

def folders():
    return [name for name in os.listdir(os.environ["RAY_TMPDIR"]) if name.startswith("specactor-")]

put_current_folder_last()
subprocess.run([sys.executable, "-c", LEAVES_A_FOLDER, os.environ["RAY_TMPDIR"]], cwd="bin")
assert len(folders()) == 1, "what a killed process left"
tokens = []
for _ in range(2):
    with connect(ClusterConfig(num_cpus=1)) as address:
        tokens.append(open(os.environ["RAY_AUTH_TOKEN_PATH"]).read())
        assert ray.cluster_resources()["CPU"] == 1
        with connect(ClusterConfig(address="auto")) as inner:  # the one this process has, left alone at the end
            assert inner == address
        assert ray.is_initialized()
        (folder,) = folders()
        assert stat.S_IMODE(os.stat(os.path.join(os.environ["RAY_TMPDIR"], folder)).st_mode) == 0o700
        found, planted, package, niceness = ray.get(modules.remote())
        assert niceness == os.getpriority(os.PRIO_PROCESS, 0), "workers run at the priority of the driver"
        assert found == os.path.join(os.getcwd(), "mine.py"), found
        assert not planted
        assert package == sys.modules["specactor_ray"].__file__
        if len(tokens) == 2:
            continue
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        command = [sys.executable, "-c", FINDS_IT, address]
        other = subprocess.run(command, env=clean, capture_output=True, cwd="bin")
        assert b"no run is going on" in other.stderr, other.stderr
        assert address in clusters_here()
        other = subprocess.run([sys.executable, "-c", JOINS_IT], env=clean, capture_output=True, cwd="bin")
        assert b"no `ray start` is noted" in other.stderr, other.stderr  # it is private
        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        sockets = [one for one in psutil.net_connections("tcp4") if one.pid in ours and one.status == "LISTEN"]
        assert sockets and not [one for one in sockets if one.laddr.ip == "0.0.0.0"], "Ray serves metrics"
    assert not ray.is_initialized() and not [name for name in os.environ if name.startswith("RAY_AUTH")]
assert len(set(tokens)) == 2 and not folders()
"""


def test_private_clusters_have_own_tokens_tidy_up_and_run_no_planted_modules() -> None:
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name:  # Ray's sockets need a short path
        folder = Path(name)
        for module in ("graphlib", "ray", "numpy"):  # graphlib: of the standard library, and imported by nobody here
            (folder / f"{module}.py").write_text("open('planted', 'w')\n")
        (folder / "mine.py").write_text("")
        (folder / "bin").mkdir()
        program = folder / "bin" / "program.py"
        program.write_text(PROGRAM)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"RAY_TMPDIR": name, "HOME": f"{name}/home", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, str(program)], cwd=folder, capture_output=True, text=True, timeout=240, env=environment
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert not (folder / "planted").exists() and not (folder / "home" / ".ray").exists()
