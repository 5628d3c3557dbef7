"""Finding the controllers of the runs that are alive on the cluster this process is connected to."""

from __future__ import annotations

from typing import Any

import ray

from specactor_ray.cluster.names import NAMESPACE, controller_name, run_of_controller
from specactor_ray.errors import ClusterError


def list_runs() -> list[str]:
    """Names of the runs that are alive, in alphabetical order."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    runs = (run_of_controller(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted(run for run in runs if run is not None)


def find_controller(run: str) -> Any:
    """Handle of the controller of `run`.

    Raises:
        ClusterError: There is no such run; the message lists those that are alive.
    """
    try:
        return ray.get_actor(controller_name(run), namespace=NAMESPACE)
    except ValueError:
        alive = list_runs()
        known = f"alive here: {', '.join(alive)}" if alive else "no run is alive on this cluster"
        raise ClusterError(f"there is no run {run!r}; {known}.") from None
