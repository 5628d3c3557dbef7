"""Discovery of Ray clusters: those of `ray start` on this machine, the private ones of this user's runs, and whether
a cluster is alive and accepts a token."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import psutil

from specactor_ray.cluster.token import TOKEN_FIX, private_clusters, why_withheld
from specactor_ray.config.rules import why_no_address
from specactor_ray.core.errors import ClusterError

_NOTE = "ray_current_cluster"
"""File in Ray's temporary folder with the address of the newest `ray start` there. Private clusters write none."""
_LISTENER_TIMEOUT_S, _PROBE_TIMEOUT_S = 2.0, 5.0
_UNAUTHENTICATED = "UNAUTHENTICATED"
_TWO_FIXES = (
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
    found = (os.environ.get("RAY_ADDRESS") or _cluster_to_join()) if address == "auto" else address
    if problem := why_no_address(found):
        raise ClusterError(problem)
    return found


def _cluster_to_join() -> str:
    """The address of `auto` where RAY_ADDRESS is not set: never a private cluster of another run."""
    found = started_clusters()
    if len(found) == 1:
        return found[0]
    if found:
        several = f"{len(found)} Ray clusters run on this machine: {', '.join(found)}"
        raise ClusterError(f"cluster.address=auto: {several}. Fix: give the address of one of them.")
    private = [address for address in private_clusters() if address]
    beside = f" (that of another run, at {', '.join(private)}, is private to it)" if private else ""
    none = "no Ray cluster of `ray start` runs on this machine as this user or root, and RAY_ADDRESS is not set"
    raise ClusterError(f"cluster.address=auto: {none}{beside}. Fix: {_TWO_FIXES}")


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


def require_listener(address: str) -> None:
    """Raise a ClusterError if nothing listens at an address, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ClusterError(f"no Ray cluster answers at {address} ({reason}). Fix: {_TWO_FIXES}") from None


def probe(address: str, token: str) -> bool:
    """Check that the cluster at `host:port` is alive and accepts the token; takes seconds, never minutes.

    The token is sent only to a server that answers as a Ray cluster and requires one.

    Returns:
        Whether it requires a token.

    Raises:
        ClusterError: It is not a Ray cluster, refuses the token, or runs another version of Ray.
    """
    require_listener(address)
    code = _refusal(address, "")
    wants_token = code == _UNAUTHENTICATED
    if wants_token and token:
        code = _refusal(address, token)
    if code == _UNAUTHENTICATED:
        found = "the token of this process is not the cluster's" if token else "this process has no token for it"
        withheld = "" if token else why_withheld(address)
        raise ClusterError(
            f"the Ray cluster at {address} wants an authentication token, and {found}. Fix: {TOKEN_FIX}{withheld}"
        )
    if code:
        problem = f"something listens at {address}, but it does not answer as a Ray cluster ({code})"
        raise ClusterError(f"{problem}. Fix: {_TWO_FIXES}")
    return wants_token


def _refusal(address: str, token: str) -> str:
    """gRPC code with which the cluster refuses to answer; empty when it answers."""
    import grpc  # type: ignore[import-untyped]
    import ray
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
