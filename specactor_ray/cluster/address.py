"""Addresses of Ray clusters, and the token of a private cluster, the one that a run starts for itself. No Ray.

One rule for all commands: the address that is given (`cluster.address`, `--address`), else RAY_ADDRESS; without either,
runs start a private cluster, and commands that look into a run take the cluster of this machine.
The holder of a cluster's token may run code on it, so a private cluster gets its own, which this user's other processes
find in its folder. RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH take precedence, as set by the user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path

from specactor_ray.config.rules import why_no_address
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import living_folders

PRIVATE_FOLDER = "specactor-"
"""Prefix of the folder of a private cluster."""
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_FILE, _ADDRESS_FILE = "auth_token", "address"
_LISTENER_TIMEOUT_S = 2.0
_HTTP2_CLIENT, _HTTP2_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + b"\0" * 5, b"\4"
"""First bytes of a client, with an empty frame of settings; and the type of the server's first frame (RFC 9113)."""
_FIX = "start one with `ray start --head`, or give the host:port of one that is up, or cluster.address=local for a run."
TOKEN_FIX = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<file with the token the cluster was started with> "
    "(or RAY_AUTH_TOKEN; without either Ray reads ~/.ray/auth_token)."
)


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster. Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def require_listener(address: str) -> str:
    """`host:port` of an address at which something listens; `auto` is RAY_ADDRESS, else the newest `ray start` here.
    The ClusterError, within seconds, names the address and its source: Ray itself waits minutes."""
    named, source = os.environ.get("RAY_ADDRESS"), ""
    if address == "auto" and named in (None, "", "auto"):
        note = _note_of_ray()
        address, source = _noted(note), f" (as noted in {note})"
        if not address:
            problem = f"RAY_ADDRESS is not set, and no `ray start` is noted in {note}"
            raise ClusterError(f"cluster.address=auto: {problem}. Fix: {_FIX}")
    elif named and address in ("auto", named):
        address, source = named, " (RAY_ADDRESS)"
    if problem := why_no_address(address):
        raise ClusterError(problem + source)
    if reason := _why_silent(address):
        raise ClusterError(f"no Ray cluster answers at {address}{source}: {reason}. Fix: {_FIX}")
    return address


def clusters_here() -> list[str]:
    """Addresses of the clusters of this machine that may have a run of this user, without those that are gone."""
    found = dict.fromkeys([*private_clusters(), _noted(_note_of_ray())])
    return [address for address in found if address and not _why_silent(address)]


def cluster_of_run() -> str:
    """Where to look for a run if no address is given: the connected cluster, RAY_ADDRESS, or the only cluster here. A
    ClusterError names the others."""
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "auto", "local") or is_connected():
        return "auto"
    found = clusters_here()
    if len(found) == 1:
        return found[0]
    fix = "give --address, as the run printed it; a run that has just begun has a cluster within a minute."
    count = f"{len(found)} Ray clusters run on this machine: {', '.join(found)}" if found else "no Ray cluster is here"
    raise ClusterError(f"{count}. Fix: {fix}")


def ray_folder() -> str:
    """The folder of Ray's temporary files: its own choice, since its sockets need a short path in ASCII."""
    return os.environ.get("RAY_TMPDIR") or "/tmp"


def _note_of_ray() -> Path:
    """The file in which Ray keeps the address of the newest `ray start` on this machine, also after a kill."""
    return Path(ray_folder(), "ray", "ray_current_cluster")


def _noted(note: Path) -> str:
    """The address in a file of this user or root; empty without one. A cluster of another user is never joined."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if note.lstat().st_uid in (os.getuid(), 0):
            return note.read_text(encoding="utf-8").strip()
    return ""


def _why_silent(address: str) -> str:
    """Why no Ray cluster can be reached at `host:port`; empty if a gRPC server answers there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_TIMEOUT_S) as peer:
            peer.sendall(_HTTP2_CLIENT)
            is_grpc = "RAY_USE_TLS" in os.environ or peer.recv(9)[3:4] == _HTTP2_SETTINGS
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "" if is_grpc else "another server listens there, such as Ray's dashboard"


# ---- private clusters ----


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
    """Address → folder of the private clusters of this user's runs."""
    found = {}
    for folder in living_folders(PRIVATE_FOLDER, ray_folder()):
        with contextlib.suppress(OSError):  # it is starting or ending
            found[(folder / _ADDRESS_FILE).read_text(encoding="utf-8")] = folder
    return found


def token_for(address: str) -> dict[str, str]:
    """The variables with which Ray sends the token of the cluster at `host:port`; empty without one."""
    if _is_chosen_by_user():
        return _completed()
    folder = private_clusters().get(address)
    return {} if folder is None else {_MODE: "token", _PATH: str(folder / _TOKEN_FILE)}


def _is_chosen_by_user() -> bool:
    return any(name in os.environ for name in (_MODE, _TOKEN, _PATH))


def _completed() -> dict[str, str]:
    """The mode that is missing: a token without a mode is used."""
    return {} if _MODE in os.environ else {_MODE: "token"}
