"""Starting the controller of a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specactor_ray.cluster.backend import ACTOR_OPTIONS
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.lookup import list_runs
from specactor_ray.cluster.names import CONTROLLER, actor_name, new_run_name
from specactor_ray.config.schema import Config
from specactor_ray.controller.controller import GONE_TIMEOUT_S, STOP_TIMEOUT_S, Controller
from specactor_ray.controller.members import ActorClasses
from specactor_ray.controller.reconcile import ReplacementLimits
from specactor_ray.core.errors import CallError, ConfigError, SpecActorError

_MOST_CALLS = 1000
"""Most calls that an asynchronous actor serves at a time."""


def start_actor(run: str, actor_id: str, cls: type, *arguments: Any) -> Any:
    """Make a named actor of a run, on this node and with this process's lifetime. Returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        **ACTOR_OPTIONS,
        "name": actor_name(run, actor_id),
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    if any(inspect.iscoroutinefunction(method) for method in vars(cls).values()):
        options["max_concurrency"] = _MOST_CALLS
    remote_class: Any = ray.remote(cls)
    return remote_class.options(**options).remote(*arguments)


def start_controller(
    config: Config,
    classes: ActorClasses | None = None,
    policy: ReplacementLimits | None = None,
    priors: Mapping[str, float] | None = None,
) -> tuple[Any, str]:
    """Make the controller of a new run, a named actor that ends with this process, and start the run. The arguments are
    those of `Controller`.

    Returns:
        `(handle, run)`: the controller and the name of the run.

    Raises:
        ClusterError, ConfigError, ModelLoadError, SpecActorError: As `Controller.start`; nothing is left running.
    """
    run = config.run.name or new_run_name()
    if run in list_runs():
        raise ConfigError("run.name", f"a run {run!r} is alive on this cluster.", "use another name, or end that run.")
    handle = start_actor(run, CONTROLLER, Controller, config, run, classes, policy, priors)
    attempts = (
        policy or ReplacementLimits()
    ).max_start_failures  # the controller ends a start long before, unless it hangs
    limit_s = attempts * (config.cluster.placement_timeout_s + config.cluster.start_timeout_s)
    try:
        Calls().ask(handle, "start", deadline_s=limit_s + STOP_TIMEOUT_S + GONE_TIMEOUT_S + 30.0)
    except CallError as error:
        ray.kill(handle)
        raise SpecActorError(f"run {run} did not start: {error}") from None
    except BaseException:  # also on an interruption: the controller's actors and placement groups end with it
        ray.kill(handle)
        raise
    return handle, run
