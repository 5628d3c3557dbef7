"""Addresses of Ray clusters, and the token of a private cluster, the one that a run starts for itself. No Ray.

One rule for all commands: the address that is given (`cluster.address`, `--address`), else RAY_ADDRESS; without either,
runs start a private cluster, and commands that look into a run take the cluster of this machine.
The holder of a cluster's token may run code on it, so a private cluster gets its own, which this user's other processes
find in its folder. With RAY_AUTH_MODE the user decides instead.
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
from specactor_ray.core.leftovers import living_folders, make_owned_folder, remove_abandoned

_PRIVATE, _TOKEN_FILE, _ADDRESS_FILE = "specactor-", "auth_token", "address"
"""Prefix of the folder of a private cluster, and its files."""
_LISTENER_TIMEOUT_S = 2.0
_FIX = "start one with `ray start --head`, or give the host:port of one that is up, or cluster.address=local for a run."


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster. Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def require_listener(address: str) -> str:
    """`host:port` of an address at which something listens; `auto` is RAY_ADDRESS, else the newest `ray start` here.
    The ClusterError, within seconds, names the address and its source: Ray itself waits minutes."""
    named, source = os.environ.get("RAY_ADDRESS") or "auto", ""
    if address == named == "auto":
        address, note = _noted()
        source = f" (as noted in {note})"
        if not address:
            problem = f"RAY_ADDRESS is not set, and no `ray start` is noted in {note}"
            raise ClusterError(f"cluster.address=auto: {problem}. Fix: {_FIX}")
    elif address in ("auto", named):
        address, source = named, " (RAY_ADDRESS)"
    if problem := why_no_address(address):
        raise ClusterError(problem + source)
    if reason := _why_silent(address):
        raise ClusterError(f"no Ray cluster answers at {address}{source}: {reason}. Fix: {_FIX}")
    return address


def clusters_here() -> list[str]:
    """Addresses of the clusters of this machine that may have a run of this user, without those that are gone."""
    found = dict.fromkeys([*private_clusters(), _noted()[0]])
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


def _noted() -> tuple[str, Path]:
    """The address of the newest `ray start` on this machine, and the file in which Ray keeps it, also after a kill.
    Empty if the file is not of this user or root: a cluster of another user is never joined."""
    note = Path(ray_folder(), "ray", "ray_current_cluster")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if note.lstat().st_uid in (os.getuid(), 0):
            return note.read_text(encoding="utf-8").strip(), note
    return "", note


def _why_silent(address: str) -> str:
    """Why nothing can be reached at `host:port`; empty if a server listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


# ---- private clusters ----


def private_folder() -> Path:
    """Make the folder of a cluster that this process starts, with a fresh token; remove those of killed processes."""
    os.makedirs(ray_folder(), exist_ok=True)
    remove_abandoned(_PRIVATE, ray_folder())
    folder = make_owned_folder(_PRIVATE, ray_folder())
    with open(os.open(folder / _TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return folder


def note_address(folder: Path, address: str) -> None:
    """Record the address of the cluster of `folder`, so that this user's other processes find it."""
    (folder / _ADDRESS_FILE).write_text(address, encoding="utf-8")


def private_clusters() -> dict[str, Path]:
    """Address → folder of the private clusters of this user's runs."""
    found = {}
    for folder in living_folders(_PRIVATE, ray_folder()):
        with contextlib.suppress(OSError):  # it is starting or ending
            found[(folder / _ADDRESS_FILE).read_text(encoding="utf-8")] = folder
    return found


def token_for(address: str) -> dict[str, str | None]:
    """The variables with which Ray sends the token of the cluster at `host:port`; empty without one."""
    folder = private_clusters().get(address)
    return {} if folder is None else token_in(folder)


def token_in(folder: Path) -> dict[str, str | None]:
    """The variables for the cluster of `folder`. Ray ignores its own without RAY_AUTH_MODE, and so does this."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / _TOKEN_FILE), "RAY_AUTH_TOKEN": None}
