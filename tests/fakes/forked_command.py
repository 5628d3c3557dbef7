"""`specactor` in processes forked from one that has imported the command line: one starts in milliseconds, not seconds.

Each has its own folder, arguments, environment and standard files, and an exit code, as any process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("ray", "torch", "vllm", "deepspeed", "transformers", "numba", "triton")


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str
    heavy: tuple[str, ...]
    """Which heavy packages it had imported in the end."""


def specactor(folder: Path, *arguments: str, **env: str) -> Done:
    """Run the command in a folder, as a user does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COLUMNS"))}
    with tempfile.TemporaryDirectory() as place:
        files = {name: str(Path(place) / name) for name in ("stdout", "stderr", "heavy")}
        order = {"folder": str(folder), "arguments": arguments, "environment": {**environment, **env}, **files}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        stdout, stderr, heavy = (Path(path).read_text() for path in files.values())
    return Done(code, stdout, stderr, tuple(heavy.split()))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends when its standard input does."""
    command = [sys.executable, "-c", "from tests.fakes.forked_command import serve; serve()"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def serve() -> None:
    """Fork a process for each line of standard input; answer with its exit code."""
    from specactor_ray.cli import main as cli
    from specactor_ray.runs import rollout as run  # noqa: F401 - what most commands import

    with contextlib.redirect_stdout(io.StringIO()):
        cli.app(["config", "--help-keys"], standalone_mode=False)
    gc.freeze()  # else a child visits, and so copies, all that it was born with when it collects garbage at its end
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            return _run(json.loads(line))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
    return None


def _run(order: dict) -> None:
    from specactor_ray.__main__ import main

    for number, path in enumerate(("/dev/null", order["stdout"], order["stderr"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    atexit.register(lambda: Path(order["heavy"]).write_text(" ".join(name for name in HEAVY if name in sys.modules)))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["specactor", *order["arguments"]]
    main()
