"""Ray clusters: those of `ray start` on this machine, private ones of this user's runs, whether one is alive, and the
token that this process sends to it.

The holder of a cluster's token may run code on it, and Ray sends it unencrypted. So a cluster that is started here gets
its own token, which this user's other processes find in its folder. Any other token is sent only if the user sets
RAY_AUTH_MODE, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, which always take precedence.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from specactor_ray.config.rules import why_no_address
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import living_folders

PRIVATE_FOLDER = "specactor-"
"""Prefix of the folder of a cluster that was started here."""
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_FILE, _ADDRESS_FILE = "auth_token", "address"
TOKEN_FIX = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<file with the token the cluster was started with> "
    "(or RAY_AUTH_TOKEN; without either Ray reads ~/.ray/auth_token)."
)
_NOTE = "ray_current_cluster"
"""File in Ray's temporary folder with the address of the newest `ray start` there. Private clusters write none."""
_LISTENER_TIMEOUT_S, _PROBE_TIMEOUT_S = 2.0, 5.0
_UNAUTHENTICATED = "UNAUTHENTICATED"
_TWO_FIXES = (
    "start one with `ray start --head`, or leave the address out: a run starts a private "
    "cluster then, and `status` and `scale` look for runs of this machine."
)


def started_clusters() -> list[str]:
    """Addresses of the clusters that this user or root has joined on this machine by `ray start`. Processes of other
    users are left out: they may only look the same."""
    found = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        line, uids = process.info["cmdline"] or [""], process.info["uids"]
        if os.path.basename(line[0]) != "raylet" or uids is None or uids.real not in (os.getuid(), 0):
            continue
        options = dict(argument.split("=", 1) for argument in line[1:] if "=" in argument)
        with contextlib.suppress(OSError, KeyError):
            if (Path(options["--temp_dir"]) / _NOTE).read_text(encoding="utf-8").strip() == options["--gcs-address"]:
                found.add(options["--gcs-address"])
    return sorted(found)


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster. Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def resolve_address(address: str) -> str:
    """`host:port` of `auto`, of the private cluster with this port on this machine, or the unchanged address.
    ClusterError without a cluster, or for an address of another form."""
    found = (os.environ.get("RAY_ADDRESS") or _cluster_to_join()) if address == "auto" else address
    if problem := why_no_address(found):
        raise ClusterError(problem)
    host, _, port = found.rpartition(":")
    if host in ("localhost", "127.0.0.1", "[::1]"):  # private clusters note another address of this machine
        found = next((one for one in private_clusters() if one.endswith(f":{port}")), found)
    return found


def _cluster_to_join() -> str:
    """The address of `auto` where RAY_ADDRESS is not set: never a private cluster of another run."""
    found = started_clusters()
    if len(found) == 1:
        return found[0]
    if found:
        several = f"{len(found)} Ray clusters run on this machine: {', '.join(found)}"
        raise ClusterError(f"cluster.address=auto: {several}. Fix: give the address of one of them.")
    private = [address for address in private_clusters() if address]
    beside = f" (that of another run, at {', '.join(private)}, is private to it)" if private else ""
    none = "no Ray cluster of `ray start` runs on this machine as this user or root, and RAY_ADDRESS is not set"
    raise ClusterError(f"cluster.address=auto: {none}{beside}. Fix: {_TWO_FIXES}")


def clusters_to_look_into() -> list[str]:
    """Addresses of the clusters that may have a run of this user; ClusterError if there is none that is up."""
    private = private_clusters()
    found = [*started_clusters(), *(address for address in private if address)]
    if not found and private:
        raise ClusterError("a private cluster is being started on this machine. Fix: ask again in some seconds.")
    if not found:
        raise ClusterError(
            "no Ray cluster runs on this machine. Fix: give --address, as the run printed it; a run that has just "
            "begun has a cluster within a minute."
        )
    return found


def require_listener(address: str) -> None:
    """Raise a ClusterError if nothing listens at an address, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ClusterError(f"no Ray cluster answers at {address} ({reason}). Fix: {_TWO_FIXES}") from None


def probe(address: str, token: str) -> bool:
    """Check within seconds that the cluster at `host:port` is alive. Returns whether it requires a token, which only a
    server is sent that answers as a Ray cluster and requires one. ClusterError if it is no Ray cluster, refuses the
    token, or runs another version of Ray."""
    require_listener(address)
    code = _refusal(address, "")
    wants_token = code == _UNAUTHENTICATED
    if wants_token and token:
        code = _refusal(address, token)
    if code == _UNAUTHENTICATED:
        found = "the token of this process is not the cluster's" if token else "this process has no token for it"
        raise ClusterError(f"the Ray cluster at {address} wants an authentication token, and {found}. Fix: {TOKEN_FIX}")
    if code:
        problem = f"something listens at {address}, but it does not answer as a Ray cluster ({code})"
        raise ClusterError(f"{problem}. Fix: {_TWO_FIXES}")
    return wants_token


def _refusal(address: str, token: str) -> str:
    """gRPC code with which the cluster refuses to answer; empty when it answers."""
    import grpc  # type: ignore[import-untyped]
    import ray
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        metadata = [("authorization", f"Bearer {token}")] if token else None
        try:
            request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
            reply = stub.CheckAlive(request, timeout=_PROBE_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    if reply.ray_version and reply.ray_version != ray.__version__:
        raise ClusterError(
            f"the cluster at {address} runs Ray {reply.ray_version}, this process Ray {ray.__version__}. "
            "Fix: install the same version on both sides."
        )
    return ""


# ---- tokens ----


def new_token(folder: Path) -> dict[str, str]:
    """The variables for a cluster that this process starts: with a fresh token in `folder`, unless the user chose."""
    if _is_chosen_by_user():
        return _completed()
    path = folder / _TOKEN_FILE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return {_MODE: "token", _PATH: str(path)}


def note_address(folder: Path, address: str) -> None:
    """Record the address of the cluster of the token in `folder`, so that this user's other processes find it."""
    (folder / _ADDRESS_FILE).write_text(address, encoding="utf-8")


def private_clusters() -> dict[str, Path]:
    """Address → folder of the private clusters of this user's runs; clusters that are starting have no address yet."""
    found = {}
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        for folder in living_folders(PRIVATE_FOLDER, base):
            with contextlib.suppress(OSError):
                note = folder / _ADDRESS_FILE
                found[note.read_text(encoding="utf-8") if note.exists() else ""] = folder
    return found


def token_for(address: str) -> dict[str, str]:
    """Environment variables with which this process sends a token to the cluster or dashboard at `host:port`; empty
    without one."""
    if _is_chosen_by_user():
        return _completed()
    folder = private_clusters().get(address)
    return {} if folder is None else {_MODE: "token", _PATH: str(folder / _TOKEN_FILE)}


def read_token(variables: Mapping[str, str]) -> str:
    """The token that Ray sends with these variables in addition to the environment; empty when it sends none.
    ClusterError if RAY_AUTH_TOKEN_PATH names no file that can be read."""
    environment = {**os.environ, **variables}
    if environment.get(_MODE, "").lower() != "token":
        return ""
    token = environment.get(_TOKEN, "").strip()
    if token:
        return token
    try:
        path = Path(environment.get(_PATH) or Path.home() / ".ray" / "auth_token")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if not environment.get(_PATH):
            return ""
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ClusterError(f"{_PATH} names {path}, which cannot be read ({reason}). Fix: {TOKEN_FIX}") from None


@contextlib.contextmanager
def shown(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which Ray in this process, and processes that it starts, use these variables."""
    before = {name: os.environ.get(name) for name in variables}
    _use(variables)
    try:
        yield
    finally:
        _use(before)


def _use(variables: Mapping[str, str | None]) -> None:
    """Set these variables of the environment (None: remove), and make Ray read them, which it does at its import."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if variables:
        from ray import _raylet

        compiled: Any = _raylet  # untyped
        compiled.Config.initialize("")  # first: running threads of Ray must not look for a deleted token
        compiled.AuthenticationTokenLoader.instance().reset_cache()


def _is_chosen_by_user() -> bool:
    return any(name in os.environ for name in (_MODE, _TOKEN, _PATH))


def _completed() -> dict[str, str]:
    """The mode that is missing: a token without a mode is used."""
    return {} if _MODE in os.environ else {_MODE: "token"}
