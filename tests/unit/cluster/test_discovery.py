"""Addresses of clusters, and which clusters get a Ray token: private ones their own, others what the user set."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from ray.core.generated import gcs_service_pb2

from specactor_ray.cluster import discovery
from specactor_ray.cluster.connection import connect
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import make_owned_folder
from specactor_ray.rollout.operations import status_of_run

SECRET = "5eedfeed" * 8
NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a saved token, and an environment without settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in NAMES:
        monkeypatch.setenv(name, "x")  # so that it is restored in any case
        monkeypatch.delenv(name)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(SECRET)
    return tmp_path


class Listener(grpc.GenericRpcHandler):
    """Requires a token, as a cluster with authentication does, and keeps what it is sent."""

    def __init__(self) -> None:
        self.refuses = True
        self.seen: list[str] = []
        self.server = grpc.server(ThreadPoolExecutor(1), handlers=[self])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.seen.append(dict(details.invocation_metadata).get("authorization", ""))

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.refuses:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return gcs_service_pb2.CheckAliveReply(ray_version="0.0").SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.server.stop(None)


def test_a_saved_token_is_sent_by_the_users_choice_and_where_it_is_required(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match=r"this process has no token for it\. Fix: set RAY_AUTH_MODE=token"):
        status_of_run(None, listener.address)
    assert listener.seen == [""] and "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for refuses, problem, seen in ((True, "not the cluster's", ["", f"Bearer {SECRET}"]), (False, r"Ray 0\.0", [""])):
        listener.refuses = refuses
        listener.seen.clear()
        with pytest.raises(ClusterError, match=problem):
            connect(ClusterConfig(address=listener.address))
        assert listener.seen == seen


@pytest.mark.parametrize(
    ("name", "value", "token"),
    [("RAY_AUTH_MODE", "disabled", ""), ("RAY_AUTH_MODE", "token", SECRET), ("RAY_AUTH_TOKEN", "mine", "mine")],
)
def test_what_the_user_set_applies_to_every_cluster(
    name: str, value: str, token: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for variables in (discovery.token_for("192.0.2.1:1"), discovery.new_token(home)):
        assert discovery.read_token(variables) == token


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_named_file_of_a_token_that_cannot_be_read_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / name))
    with pytest.raises(ClusterError, match=rf"RAY_AUTH_TOKEN_PATH names {tmp_path / name}, which cannot be read \("):
        discovery.read_token({})


def test_a_private_cluster_has_a_token_of_its_own_that_other_processes_find(home: Path) -> None:
    folder = make_owned_folder(discovery.PRIVATE_FOLDER, home)
    variables = discovery.new_token(folder)
    path = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(discovery.read_token(variables)) == 64
    discovery.note_address(folder, "127.0.0.1:11004")
    assert discovery.private_clusters()["127.0.0.1:11004"] == folder
    assert discovery.token_for("127.0.0.1:11004") == variables
    discovery.note_address(folder, "192.0.2.7:11004")
    assert discovery.resolve_address("localhost:11004") == "192.0.2.7:11004"
    assert discovery.token_for(discovery.resolve_address("localhost:11004")) == variables
    assert discovery.token_for("192.0.2.8:11004") == discovery.token_for("localhost:11004") == {}
    assert discovery.resolve_address("192.0.2.8:11004") == "192.0.2.8:11004"
    assert discovery.token_for("127.0.0.1:11005") == {}


def test_variables_are_put_back() -> None:
    with discovery.shown({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}):
        assert os.environ["RAY_AUTH_TOKEN"] == "x"
    assert not {*NAMES} & {*os.environ}


def test_a_cluster_that_does_not_exist_is_named_with_both_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="does not answer as a Ray cluster"):
            connect(ClusterConfig(address=address))
    monkeypatch.setenv("RAY_ADDRESS", address)
    for where in (address, "auto"):
        with pytest.raises(ClusterError, match=rf"at {address} .*`ray start --head`, or leave the address out"):
            connect(ClusterConfig(address=where))


@pytest.mark.parametrize("address", ["somewhere", "host:port", "ray://host:10001", "http://127.0.0.1:8265", "h:99999"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ClusterError, match="must be host:port"):
        connect(ClusterConfig(address=address))
