"""Joining or starting a Ray cluster, with errors that come within seconds and name the fix.

Ray itself waits two minutes for a cluster that does not exist and then ends the process from C++. So the address is
probed first: whether the cluster is alive, and whether it accepts the token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import ray

from specactor_ray.cluster.discovery import TWO_FIXES, require_listener, resolve_address
from specactor_ray.cluster.module_path import worker_job_config
from specactor_ray.cluster.names import NAMESPACE
from specactor_ray.cluster.token import (
    PRIVATE_FOLDER,
    new_token,
    note_address,
    read_token,
    remove_with_token,
    shown,
    token_for,
    why_withheld,
)
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import make_owned_folder, remove_abandoned
from specactor_ray.core.signals import blocked, signals_deferred

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_LONGEST_TEMP_DIR = 40
"""Ray puts Unix sockets about 65 characters below its folder, and their paths may have at most 107."""


class Connection:
    """Connection of this process to a Ray cluster; a context manager.

    Attributes:
        address: `host:port` of the cluster, for `cluster.address` of another process.
        owned: Whether the cluster was started here and ends with the connection.
    """

    def __init__(self, address: str, owned: bool, held: contextlib.ExitStack | None = None) -> None:
        self.address, self.owned = address, owned
        self._held = held

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster; end it and remove its files if it was started here. Idempotent.

        If Ray was initialised before `connect`, it stays initialised.
        """
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
    started: list[Connection] = []
    try:
        # The handler is restored before the signal is unblocked; it may raise right then. Processes of the cluster
        # ignore SIGTERM, as Ray already arranges for Ctrl-C: schedulers signal a whole process group or control group,
        # and an immediate end of the cluster would also end actors that its owner needs for an orderly end, such as the
        # trainer that writes a checkpoint. Ray ends the processes by SIGKILL then, which takes some four seconds.
        with blocked(signal.SIGTERM), _own_sigterm_handler():
            started.append(_start_private_cluster(config))
    except BaseException:
        for connection in started:
            connection.close()
        raise
    return started[0]


def _join(config: ClusterConfig) -> Connection:
    address = resolve_address(config.address)
    variables = token_for(address, found_here=config.address == "auto" and not os.environ.get("RAY_ADDRESS"))
    wants_token = _probe(address, read_token(variables))
    with contextlib.ExitStack() as held:
        if wants_token:
            held.enter_context(shown(variables))
        held.callback(ray.shutdown)
        try:
            ray.init(address=address, **_quiet())
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(f"could not join the Ray cluster at {address}: {error}") from None
        return Connection(ray.get_runtime_context().gcs_address, owned=False, held=held.pop_all())


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Put the caller's handler of SIGTERM back in place of Ray's, which ends the process without an orderly end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        if end.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)  # arrived while Ray's own handler was in place
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _quiet() -> dict[str, Any]:
    quiet = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "configure_logging": True}
    return {**quiet, "job_config": worker_job_config()}


def _start_private_cluster(config: ClusterConfig) -> Connection:
    cpus = config.num_cpus if config.num_cpus is not None else len(os.sched_getaffinity(0))
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONGEST_TEMP_DIR - 20 else "/tmp"
    remove_abandoned(PRIVATE_FOLDER, base)
    with contextlib.ExitStack() as held:
        folder = make_owned_folder(PRIVATE_FOLDER, base)
        held.callback(remove_with_token, folder)
        held.enter_context(shown({**_ray_settings(), **new_token(folder)}))
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
            fix = "Fix: start again when the machine is less busy; Ray gives its processes 30 seconds."
            why = " ".join(str(error).split())
            raise ClusterError(f"a private Ray cluster with {cpus} CPUs could not be started: {why} {fix}") from None
        address = ray.get_runtime_context().gcs_address
        note_address(folder, address)
        return Connection(address, owned=True, held=held.pop_all())


def _ray_settings() -> dict[str, str]:
    """Workers of normal priority, and no metrics, unless the environment has other values.

    Ray runs workers at niceness 15: beside any other process they hardly run at all. It would serve metrics on three
    ports of all interfaces without a token; the two ports without a switch are disabled by an invalid port number.
    """
    settings = {"RAY_worker_niceness": "0", "RAY_enable_metrics_collection": "0"}
    settings |= {"AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
    return {name: value for name, value in settings.items() if name not in os.environ}


def _probe(address: str, token: str) -> bool:
    """Check that the cluster at `host:port` is alive and accepts the token; takes seconds, never minutes.

    The token is sent only to a server that answers as a Ray cluster and requires one.

    Returns:
        Whether it requires a token.
    """
    require_listener(address)
    answer = _ask_alive(address, "")
    wants_token = answer == _UNAUTHENTICATED
    if wants_token and token:
        answer = _ask_alive(address, token)
    if answer:
        raise ClusterError(_why_refused(address, answer, token))
    return wants_token


def _ask_alive(address: str, token: str) -> str:
    """gRPC code with which the cluster refuses to answer; empty when it answers.

    Raises:
        ClusterError: It runs another version of Ray.
    """
    import grpc  # type: ignore[import-untyped]
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


_UNAUTHENTICATED = "UNAUTHENTICATED"


def _why_refused(address: str, code: str, token: str) -> str:
    if code == _UNAUTHENTICATED:
        found = "the token of this process is not the cluster's" if token else "this process has no token for it"
        return (
            f"the Ray cluster at {address} wants an authentication token, and {found}. Fix: set RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN_PATH=<file with the token the cluster was started with> (or RAY_AUTH_TOKEN)."
            + ("" if token else why_withheld(address))
        )
    return f"something listens at {address}, but it does not answer as a Ray cluster ({code}). Fix: {TWO_FIXES}"
