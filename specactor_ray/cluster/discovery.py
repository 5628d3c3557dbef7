"""Discovery of Ray clusters on this machine: those of `ray start`, and the private ones of this user's runs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import psutil

from specactor_ray.cluster.token import private_clusters
from specactor_ray.config.rules import why_no_address
from specactor_ray.core.errors import ClusterError

_NOTE = "ray_current_cluster"
"""File in Ray's temporary folder with the address of the newest `ray start` there. Private clusters write none."""
_LISTENER_TIMEOUT_S = 2.0
TWO_FIXES = (
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
    """`host:port` of `auto`, or the unchanged address.

    Raises:
        ClusterError: There is no cluster for `auto`, or the address has another form.
    """
    found = (os.environ.get("RAY_ADDRESS") or cluster_to_join()) if address == "auto" else address
    if problem := why_no_address(found):
        raise ClusterError(problem)
    return found


def require_listener(address: str) -> None:
    """Refuse the address, `host:port`, of a cluster where nothing listens.

    Raises:
        ClusterError: See above.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ClusterError(f"no Ray cluster answers at {address} ({reason}). Fix: {TWO_FIXES}") from None


def cluster_to_join() -> str:
    """The address of `auto` where RAY_ADDRESS is not set: never a private cluster of another run.

    Raises:
        ClusterError: There is none, or more than one.
    """
    found = started_clusters()
    if len(found) == 1:
        return found[0]
    if found:
        several = f"{len(found)} Ray clusters run on this machine: {', '.join(found)}"
        raise ClusterError(f"cluster.address=auto: {several}. Fix: give the address of one of them.")
    private = [address for address in private_clusters() if address]
    beside = f" (that of another run, at {', '.join(private)}, is private to it)" if private else ""
    none = "no Ray cluster of `ray start` runs on this machine as this user or root, and RAY_ADDRESS is not set"
    raise ClusterError(f"cluster.address=auto: {none}{beside}. Fix: {TWO_FIXES}")


def clusters_to_look_into() -> list[str]:
    """Addresses of the clusters that may have a run of this user.

    Raises:
        ClusterError: There is none, or none that is up yet.
    """
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
