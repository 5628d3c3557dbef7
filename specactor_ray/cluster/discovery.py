"""The Ray clusters that run on this machine: those of `ray start`, and the private ones of this user's runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from specactor_ray.cluster.token import private_clusters
from specactor_ray.errors import ClusterError

_NOTE = "ray_current_cluster"
"""File in Ray's temporary folder: the address of the newest `ray start` there. Private clusters leave none."""
TWO_FIXES = "start one with `ray start --head` (and give its address), or use cluster.address=local."


def started_clusters() -> list[str]:
    """Addresses of the clusters that this user or root has joined this machine to by `ray start`. Processes of other
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


def cluster_to_join() -> str:
    """The address that `auto` stands for where RAY_ADDRESS is not set: never a private cluster of another run.

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
    """The addresses of the clusters where a run of this user may be.

    Raises:
        ClusterError: There is none, or none that is up yet.
    """
    private = private_clusters()
    found = [*started_clusters(), *(address for address in private if address)]
    if not found and private:
        raise ClusterError("a private cluster is being started on this machine. Fix: ask again in some seconds.")
    if not found:
        raise ClusterError("no Ray cluster runs on this machine. Fix: give --address, as the run printed it.")
    return found
