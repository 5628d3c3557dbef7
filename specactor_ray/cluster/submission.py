"""Submitting a command of this package as a Ray job, following its log, and stopping it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from rich.console import Console

from specactor_ray.cluster.discovery import TOKEN_FIX, shown, token_for
from specactor_ray.config.load import yaml_problem
from specactor_ray.core.console import say
from specactor_ray.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, ClusterError, InputError, clipped, redacted

EXCLUDES = (
    *(".git", ".venv", "runs", "*.partial", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__"),
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".ssh", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".gnupg", ".ray", ".huggingface", ".cache"),
    *("auth_token", "credentials.json", "application_default_credentials.json", "kaggle.json"),
)
"""Files that are not uploaded with the package: files without use there, and places of secrets."""
WEIGHTS = ("*.pt", "*.pth", "*.safetensors", "*.gguf", "*.ckpt", "pytorch_model*.bin", "checkpoints", "checkpoint-*")
"""Files of models and checkpoints, which are not uploaded either."""
_MOST_BYTES, _ENTRY_BYTES = 100 << 20, 300
"""Largest upload that Ray's dashboard accepts, and what a file takes in it beside its content, at most."""
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_AGENT_TIMEOUT_S = 60.0
_STOP_WAIT_S = "120"
"""Seconds for a stopped job: Ray gives three, and a checkpoint may take longer."""
_SUCCEEDED, _STOPPED = "SUCCEEDED", "STOPPED"


def submit(
    command: str,
    arguments: Sequence[str],
    address: str | None,
    runtime_env: Path | None,
    follow: bool,
    console: Console,
) -> int:
    """Submit a command with its arguments to a running cluster.

    Args:
        command, arguments: `train`, `rollout`, `bench` or `train-drafter`; relative paths are of the uploaded folder.
        address: Address of the dashboard, such as `http://127.0.0.1:8265`; overrides all variables of Ray. Default:
            RAY_API_SERVER_ADDRESS, else port 8265 of the host of RAY_ADDRESS, or of this machine.
        runtime_env: YAML file with further settings of the job's environment.
        follow: Show the job's log until it ends; Ctrl-C then stops the job.

    Returns:
        Exit code: 0 for a job that succeeded (or was only submitted), 1 for one that failed, 130 for one stopped.
    """
    environment = read_runtime_env(runtime_env)
    address = address or _default_address()
    if not re.match(r"https?://[^\s/]", address):
        problem = f"--address: {clipped(address)} is not the address of a dashboard"
        raise ClusterError(f"{problem}; it must be http://HOST:PORT, such as http://127.0.0.1:8265")
    upload = upload_line(environment)
    entrypoint = shlex.join(["python", "-m", f"specactor_ray.jobs.{command.replace('-', '_')}", *arguments])
    # Ray's own variables override the address that it is given.
    with shown({**token_for(urlsplit(address).netloc), _ADDRESS: address}):
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray").setLevel(logging.ERROR)  # it logs every file that is not uploaded
        with _readable_errors(address):
            client = JobSubmissionClient(address)
            say(console, upload)
            job = _submit(client, entrypoint, environment)
        say(console, f"job {job} submitted: {entrypoint}")
        say(console, f"dashboard: {redacted(address)}; stop it with: {_ADDRESS}={redacted(address)} ray job stop {job}")
        if not follow:
            return 0
        _follow(client, job, console)
        details = client.get_job_info(job)
        status, reason = str(details.status.value), (details.message or "").partition("\n")[0]
        say(console, f"job {job}: {status}" if status in (_SUCCEEDED, _STOPPED) else f"job {job}: {status}: {reason}")
        return {_SUCCEEDED: 0, _STOPPED: EXIT_INTERRUPTED}.get(status, EXIT_FAILED)


def _default_address() -> str:
    address, cluster = os.environ.get(_ADDRESS), os.environ.get("RAY_ADDRESS", "")
    if address or cluster.startswith("http"):
        return address or cluster
    host = cluster.rpartition("://")[2].rpartition(":")[0]
    return f"http://{host or '127.0.0.1'}:8265"


def read_runtime_env(path: Path | None) -> dict[str, Any]:
    """The job's environment: this folder, without the files in `EXCLUDES` and `WEIGHTS`, and the settings of the file.
    A line such as `!data/ca.pem` among the file's `excludes` uploads that one nevertheless. InputError if the file is
    not usable."""
    given: Any = {}
    try:
        if path is not None:
            given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"--runtime-env: {path} cannot be read ({error.strerror}); name a YAML file") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"--runtime-env: {path} is not valid YAML ({yaml_problem(error)}); mend it") from None
    if not isinstance(given, Mapping):
        raise InputError(f"--runtime-env: {path} must hold `key: value` pairs, such as pip or env_vars")
    for key, kind in (("excludes", list), ("env_vars", dict)):
        if not isinstance(given.get(key) or kind(), kind):
            raise InputError(f"--runtime-env: {key} in {path} is no {'list' if kind is list else 'mapping'}")
    excludes = [*EXCLUDES, *WEIGHTS, *(given.get("excludes") or ())]
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_WAIT_S, **(given.get("env_vars") or {})}
    return {"working_dir": os.getcwd(), **given, "excludes": excludes, "env_vars": variables}


def upload_line(environment: Mapping[str, Any]) -> str:
    """What will be uploaded and what is left out, with sizes. InputError if Ray would refuse it for its size."""
    folder, excludes = Path(str(environment["working_dir"])), environment["excludes"]
    if not folder.is_dir():  # an archive, or an address of one
        return f"working_dir: {redacted(str(folder))}"
    sizes = _sizes(folder, excludes)
    weights = _sizes(folder, [one for one in excludes if one not in WEIGHTS])
    left_out = sum(weights.values()) - sum(sizes.values())
    by_entry = Counter[str]()
    for path, size in sizes.items():
        by_entry[path.parts[0]] += size
    largest = ", ".join(f"{name} {_mib(size)}" for name, size in by_entry.most_common(3))
    what = f"{len(sizes)} files of {folder} with {_mib(sum(sizes.values()))} (most: {largest or 'none'})"
    if left_out:
        what += f"; {len(weights) - len(sizes)} files of weights with {_mib(left_out)} are left out"
    if sum(sizes.values()) + _ENTRY_BYTES * len(sizes) > _MOST_BYTES:
        fix = f"`excludes: [{by_entry.most_common(1)[0][0]}]` in a file for --runtime-env, or lines in .rayignore"
        raise InputError(f"submit uploads {what}, and Ray accepts {_mib(_MOST_BYTES)}. Fix: {fix}")
    return f"uploading {what}"


def _sizes(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Bytes of each file that Ray packs, by its path in the folder; Ray does not compress them."""
    from ray._private.runtime_env import packaging

    logging.getLogger("ray").setLevel(logging.ERROR)  # it logs every file with excludes
    sizes = dict[Path, int]()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder)] = path.stat().st_size

    ignores = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    packaging._dir_travel(folder, [packaging._get_excludes(folder, list(excludes))], add, include_gitignore=ignores)
    return sizes


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _submit(client: Any, entrypoint: str, environment: dict[str, Any]) -> str:
    """Submit; retry while a newly started cluster has no agent to run the job."""
    deadline = time.monotonic() + _AGENT_TIMEOUT_S
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


@contextlib.contextmanager
def _readable_errors(address: str) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except ConnectionError:
        raise ClusterError(
            f"no Ray job server answers at {address}. Fix: start a cluster with its dashboard (`ray start --head`), or "
            "give --address http://HOST:8265."
        ) from None
    except (RayError, RuntimeError, ValueError) as error:
        text = str(error)
        if "401" in text or "403" in text or "nauthori" in text or "uthentication" in text:
            problem = f"the Ray cluster at {address} wants an authentication token"
            raise ClusterError(f"{problem}. Fix: {TOKEN_FIX}") from None
        raise ClusterError(f"the job was refused by {address}: {text}") from None


def _follow(client: Any, job: str, console: Console) -> None:
    """Copy the log to standard output until the job ends. SIGINT and SIGTERM stop the job, then the copying."""

    async def copy() -> None:
        async for part in client.tail_job_logs(job):
            sys.stdout.write(part)
            sys.stdout.flush()

    def stop(number: int, frame: Any) -> None:
        say(console, f"stopping job {job}; its log is followed until it has ended")
        client.stop_job(job)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(copy())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
