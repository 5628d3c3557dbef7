"""Joining or starting a Ray cluster, with errors that come within seconds and name the fix; and the runs on it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray import _raylet
from ray.exceptions import RayError
from ray.job_config import JobConfig

from specactor_ray.cluster.address import note_address, private_folder, require_listener, token_for, token_in
from specactor_ray.cluster.names import CONTROLLER, NAMESPACE, actor_name, run_and_actor
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError, SpecActorError
from specactor_ray.core.progress import start_phase
from specactor_ray.core.signals import blocked, signals_deferred

_JOIN_ONCE = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "10"}
"""Ray tries 20 times, 40 s each, to join a cluster that has ended or does not answer: here once, in 20 s."""


@contextlib.contextmanager
def connect(config: ClusterConfig) -> Iterator[str]:
    """Context in which this process is connected to the cluster that `config` names; yields its address, `host:port`.
    A cluster that was started here ends with it. If Ray was initialised before, that connection is used, and stays. A
    ClusterError, if it cannot be joined, names the address and the fix; SpecActorError, if Ray does not start."""
    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    held = contextlib.ExitStack()
    try:
        if config.address == "local":
            # Processes of the cluster ignore SIGTERM, as Ray already arranges for Ctrl-C: schedulers signal a whole
            # process group, and actors are needed for an orderly end, such as the trainer that writes a checkpoint.
            with signals_deferred(), _own_sigterm_handler(), blocked(signal.SIGTERM):
                _start_private_cluster(config, held)
        else:
            with _own_sigterm_handler():
                _join(config, held)
        yield ray.get_runtime_context().gcs_address
    finally:
        with signals_deferred():  # an interrupted shutdown would leave processes, or the token
            held.close()


@start_phase("joining the Ray cluster")
def _join(config: ClusterConfig, held: contextlib.ExitStack) -> None:
    address = require_listener(config.address)
    held.enter_context(_shown({**_JOIN_ONCE, **token_for(address)}))
    held.callback(ray.shutdown)
    try:
        ray.init(address=address, **_ray_settings())
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        fix = f"check that it still runs, with Ray {ray.__version__}. If it requires a token, set RAY_AUTH_MODE=token, "
        fix += "and RAY_AUTH_TOKEN_PATH=<its file> or RAY_AUTH_TOKEN (without both Ray reads ~/.ray/auth_token)."
        raise ClusterError(
            f"could not join the Ray cluster at {address}: {str(error).strip().rstrip('.')}. Fix: {fix}"
        ) from None


@start_phase("starting Ray")
def _start_private_cluster(config: ClusterConfig, held: contextlib.ExitStack) -> None:
    cpus = config.num_cpus or len(os.sched_getaffinity(0))
    kind: type[SpecActorError] = ClusterError
    try:
        folder = private_folder()
        kind = SpecActorError  # another start may succeed
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        held.enter_context(_shown({**_private_settings(), **token_in(folder)}))
        held.callback(ray.shutdown)
        # A subfolder, because Ray makes its own folder readable for all users.
        private = {"num_gpus": config.num_gpus, "include_dashboard": False, "_temp_dir": str(folder / "r")}
        ray.init(address="local", num_cpus=cpus, **private, **_ray_settings())
    except Exception as error:  # noqa: BLE001 - Ray raises bare exceptions, which differ in their message only
        fix = "Fix: start again when the machine is less busy (Ray gives its processes 30 seconds); RAY_TMPDIR, if "
        fix += "it is set, must be a folder that this process may write to, with a short path in ASCII."
        why = " ".join(str(error).split())
        raise kind(f"a private Ray cluster with {cpus} CPUs could not be started: {why} {fix}") from None
    note_address(folder, ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def _shown(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Context in which Ray in this process, and processes that it starts, use these variables (None: unset)."""
    before = {name: os.environ.get(name) for name in variables}
    compiled: Any = _raylet  # there is no public way to set a token after the import

    def use(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        compiled.Config.initialize("")  # first: running threads of Ray must not look for a deleted token
        compiled.AuthenticationTokenLoader.instance().reset_cache()

    use(variables)
    try:
        yield
    finally:
        use(before)


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM, if it is Python code. `ray.init` sets two: one in Python, which raises
    SystemExit wherever the main thread is (within a hook of `fork`, such as that of `logging`, the exception is lost
    and a lock stays held), and one in C++, which aborts the process three seconds later."""
    set_handler, own = signal.signal, signal.getsignal(signal.SIGTERM)
    if not callable(own) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal = lambda number, handler: own if number == signal.SIGTERM else set_handler(number, handler)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        set_handler(signal.SIGTERM, own)  # replaces the handler in C++


def _ray_settings() -> dict[str, Any]:
    """Arguments of `ray.init`. Workers search modules in the same order as this process, but Ray puts the current
    folder first; this is right inside a Ray job, whose working folder is the submitted code."""
    settings = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "configure_logging": True}
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return settings

    class SamePath(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # then Ray adds no folders of its own

    paths = [os.path.abspath(entry) for entry in reversed(sys.path)]  # each is put before the earlier ones
    return {**settings, "job_config": SamePath(_py_driver_sys_path=paths)}


def _private_settings() -> dict[str, str]:
    """Workers of normal priority (Ray's niceness of 15 starves them beside other processes), and no metrics, which Ray
    serves on all interfaces without a token; an invalid port number disables those that have no switch."""
    settings = {"RAY_worker_niceness": "0", "RAY_enable_metrics_collection": "0"}
    settings |= {"AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
    return {name: value for name, value in settings.items() if name not in os.environ}


# ---- runs ----


def list_runs() -> list[str]:
    """Names of the live runs on the connected cluster, in alphabetical order."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = (run_and_actor(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted(run for run, actor_id in found if actor_id == CONTROLLER)


def find_controller(run: str) -> Any:
    """Handle of the controller of `run`; a ClusterError lists the runs if there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(actor_name(run, CONTROLLER), namespace=NAMESPACE)
    known = f"alive here: {', '.join(alive)}" if (alive := list_runs()) else "no run is alive on this cluster"
    raise ClusterError(f"there is no run {run!r}; {known}.")
