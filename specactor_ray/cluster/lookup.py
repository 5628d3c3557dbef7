"""Search of live runs and their controllers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

from specactor_ray.cluster.connection import connect
from specactor_ray.cluster.discovery import clusters_to_look_into
from specactor_ray.cluster.names import NAMESPACE, actor_name, controller_name, run_of_controller
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError, InputError, NoRunError


def list_runs() -> list[str]:
    """Names of the live runs on the connected cluster, in alphabetical order."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    runs = (run_of_controller(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted(run for run in runs if run is not None)


def find_controller(run: str) -> Any:
    """Handle of the controller of `run`.

    Raises:
        ClusterError: There is no such run; the message lists the live ones.
    """
    try:
        return ray.get_actor(controller_name(run), namespace=NAMESPACE)
    except ValueError:
        alive = list_runs()
        known = f"alive here: {', '.join(alive)}" if alive else "no run is alive on this cluster"
        raise ClusterError(f"there is no run {run!r}; {known}.") from None


def find_actor(run: str, actor_id: str) -> Any:
    """Handle of another actor of a run.

    Raises:
        ClusterError: There is no such run, or it has no such actor.
    """
    find_controller(run)
    try:
        return ray.get_actor(actor_name(run, actor_id), namespace=NAMESPACE)
    except ValueError:
        raise ClusterError(f"run {run!r} has no {actor_id} for other processes: Rollout.listen starts it.") from None


def only_run() -> str:
    """The name of the only run on the connected cluster.

    Raises:
        InputError: There is none, or more than one.
    """
    runs = list_runs()
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise NoRunError("no run is named, and no run is going on in this cluster")
    raise InputError(f"no run is named, and there are {', '.join(runs)}; name one")


def address_of_run(run: str | None) -> str:
    """The cluster that `status` and `scale` use without an address: the connected one, else the only one on this
    machine with this run (None: with any run), private ones included.

    Raises:
        ClusterError: There is no cluster.
        InputError: None or more than one of several clusters has such a run; the message names them with their runs.
    """
    if os.environ.get("RAY_ADDRESS") or ray.is_initialized():
        return "auto"
    addresses = clusters_to_look_into()
    if len(addresses) == 1:
        return addresses[0]
    runs: dict[str, list[str]] = {}
    for address in addresses:
        with contextlib.suppress(ClusterError), connect(ClusterConfig(address=address)):
            runs[address] = list_runs()
    found = [address for address in runs if (run in runs[address] if run else runs[address])]
    if len(found) == 1:
        return found[0]
    there = "; ".join(f"{address}: {', '.join(runs[address]) or 'no run'}" for address in runs)
    which, fix = (f"run {run!r}", "--address") if run else ("a run", "--run, or --address")
    count = f"{len(found)} clusters" if found else "no cluster"
    raise (InputError if found else NoRunError)(f"{count} on this machine with {which} ({there}). Fix: give {fix}.")


def resources_of(address: str) -> str:
    """Description of a cluster's nodes, free resources and runs.

    Raises:
        ClusterError: It cannot be joined.
    """
    with connect(ClusterConfig(address=address)):
        nodes = sum(node["Alive"] for node in ray.nodes())
        total, free = ray.cluster_resources(), ray.available_resources()
        runs = ", ".join(list_runs()) or "none"
    shares = (f"{free.get(kind, 0.0):g} of {total[kind]:g} {kind}s free" for kind in ("CPU", "GPU") if total.get(kind))
    return f"{nodes} nodes; {'; '.join(shares) or 'no CPUs'}; runs: {runs}"
