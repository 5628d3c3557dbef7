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
from ray.exceptions import RayError
from ray.job_config import JobConfig

from specactor_ray.cluster.address import (
    PRIVATE_FOLDER,
    TOKEN_FIX,
    cluster_of_run,
    new_token,
    note_address,
    ray_folder,
    require_listener,
    token_for,
)
from specactor_ray.cluster.names import CONTROLLER, NAMESPACE, actor_name, run_and_actor
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError, InputError
from specactor_ray.core.leftovers import make_owned_folder, remove_abandoned
from specactor_ray.core.progress import start_phase
from specactor_ray.core.signals import blocked, signals_deferred

logger = logging.getLogger(__name__)
_JOIN_ONCE = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "10"}
"""Ray tries 20 times, 40 s each, to join a cluster that has ended or does not answer: here once, in 20 s."""


class Connection:
    """Connection of this process to a Ray cluster at `address`, `host:port`; a context manager. `owned`: the cluster
    was started here and ends with the connection."""

    def __init__(self, address: str, owned: bool, held: contextlib.ExitStack | None = None) -> None:
        self.address, self.owned = address, owned
        self._held = held

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster; end it and remove its files if it was started here. If Ray was initialised before
        `connect`, it stays initialised. Idempotent."""
        if self._held is not None:
            with signals_deferred():  # an interrupted shutdown would leave processes, or the token
                self._held.close()


def connect(config: ClusterConfig) -> Connection:
    """Join or start the cluster that `config` names.

    Raises:
        ClusterError: It does not exist, does not answer as a Ray cluster, requires a token that is missing, or could
            not be started; the message names the address and the fix.
    """
    if ray.is_initialized():
        return Connection(ray.get_runtime_context().gcs_address, owned=False)
    if config.address != "local":
        with _own_sigterm_handler():
            return _join(config)
    connection: Connection | None = None
    try:
        # Processes of the cluster ignore SIGTERM, as Ray already arranges for Ctrl-C: schedulers signal a whole process
        # group, and an immediate end of the cluster would also end actors that its owner needs for an orderly end, such
        # as the trainer that writes a checkpoint. Signals wait for the end of the start.
        with signals_deferred(), _own_sigterm_handler(), blocked(signal.SIGTERM):
            connection = _start_private_cluster(config)
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection


@start_phase("joining the Ray cluster")
def _join(config: ClusterConfig) -> Connection:
    address = require_listener(config.address)
    with contextlib.ExitStack() as held:
        held.enter_context(_shown({**_JOIN_ONCE, **token_for(address)}))
        held.callback(ray.shutdown)
        try:
            ray.init(address=address, **_quiet())
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            fix = f"check that it still runs, with Ray {ray.__version__}. If the cluster requires a token, {TOKEN_FIX}"
            raise ClusterError(f"could not join the Ray cluster at {address}: {error} Fix: {fix}") from None
        return Connection(ray.get_runtime_context().gcs_address, owned=False, held=held.pop_all())


@contextlib.contextmanager
def _shown(variables: Mapping[str, str]) -> Iterator[None]:
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

        compiled: Any = _raylet  # there is no public way to set a token after the import
        compiled.Config.initialize("")  # first: running threads of Ray must not look for a deleted token
        compiled.AuthenticationTokenLoader.instance().reset_cache()


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


def _quiet() -> dict[str, Any]:
    quiet = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "configure_logging": True}
    return {**quiet, "job_config": worker_job_config()}


def worker_job_config() -> Any:
    """Job settings for Ray with which its workers search modules in the same order as this process; by default Ray puts
    the current folder first. None inside a Ray job, whose working folder is the submitted code."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return None

    class SamePath(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # then Ray adds no folders of its own

    # Each entry is put before the earlier ones.
    return SamePath(_py_driver_sys_path=[os.path.abspath(entry) for entry in reversed(sys.path)])


@start_phase("starting Ray")
def _start_private_cluster(config: ClusterConfig) -> Connection:
    cpus = config.num_cpus if config.num_cpus is not None else len(os.sched_getaffinity(0))
    remove_abandoned(PRIVATE_FOLDER, ray_folder())
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(ray_folder(), exist_ok=True)
            folder = make_owned_folder(PRIVATE_FOLDER, ray_folder())
        except OSError as error:
            problem = f"{ray_folder()} cannot be written to ({error.strerror})"
            raise ClusterError(f"{problem}. Fix: set RAY_TMPDIR to a folder with a short path.") from None
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        held.enter_context(_shown({**_ray_settings(), **new_token(folder)}))
        held.callback(ray.shutdown)
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=config.num_gpus,
                include_dashboard=False,
                _temp_dir=str(folder / "r"),  # a subfolder: Ray makes its own folder readable for all users
                **_quiet(),
            )
        except Exception as error:  # noqa: BLE001 - Ray raises bare exceptions, which differ in their message only
            fix = "Fix: start again when the machine is less busy (Ray gives its processes 30 seconds); RAY_TMPDIR, if "
            fix += "it is set, must be a short path in ASCII."
            why = " ".join(str(error).split())
            raise ClusterError(f"a private Ray cluster with {cpus} CPUs could not be started: {why} {fix}") from None
        address = ray.get_runtime_context().gcs_address
        note_address(folder, address)
        return Connection(address, owned=True, held=held.pop_all())


def _ray_settings() -> dict[str, str]:
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


def join_run(run: str | None, address: str) -> tuple[Connection, str, Any]:
    """Join the cluster of a run (None: the only one) at an address (`auto`, `local`: that of `cluster_of_run`).
    Returns the connection, the name of the run, and the handle of its controller.

    Raises:
        ClusterError: There is no cluster, or no such run.
        InputError: No run is named, and there is none or more than one.
    """
    connection = connect(ClusterConfig(address=cluster_of_run() if address in ("auto", "local") else address))
    try:
        runs = [run] if run else list_runs()
        if not runs:
            raise InputError("no run is named, and no run is going on in this cluster")
        if len(runs) > 1:
            raise InputError(f"no run is named, and there are {', '.join(runs)}; name one")
        return connection, runs[0], find_controller(runs[0])
    except BaseException:
        connection.close()
        raise


def resources_of(address: str) -> str:
    """Description of a cluster's nodes, free resources and runs. Raises a ClusterError if it cannot be joined."""
    with connect(ClusterConfig(address=address)):
        nodes = sum(node["Alive"] for node in ray.nodes())
        total, free = ray.cluster_resources(), ray.available_resources()
        runs = ", ".join(list_runs()) or "none"
    shares = (f"{free.get(kind, 0.0):g} of {total[kind]:g} {kind}s free" for kind in ("CPU", "GPU") if total.get(kind))
    return f"{nodes} nodes; {'; '.join(shares) or 'no CPUs'}; runs: {runs}"
