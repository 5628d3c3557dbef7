"""Who is shown a Ray token: clusters on this machine, and whom the user named."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from ray.core.generated import gcs_service_pb2

from specactor_ray.cluster import token as tokens
from specactor_ray.cluster.connection import connect
from specactor_ray.cluster.submission import submit
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import make_owned_folder
from specactor_ray.rollout.run_client import status_of_run

SECRET = "5eedfeed" * 8
OTHER_USER = 54321
NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a saved token, and an environment that says nothing."""
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
    """Asks everybody for a token, as a cluster with authentication does, and keeps what it is sent."""

    def __init__(self, refuse: bool = True) -> None:
        self.refuse = refuse
        self.seen: list[str] = []
        self.server = grpc.server(ThreadPoolExecutor(1), handlers=[self])
        self.port = self.server.add_insecure_port("0.0.0.0:0")
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.seen.append(dict(details.invocation_metadata).get("authorization", ""))

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.refuse:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
            return gcs_service_pb2.CheckAliveReply(ray_version="0.0").SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.server.stop(None)


# 0.0.0.0 reaches this machine, but is no address of it: it stands for a foreign host here.
FOREIGN = "0.0.0.0"


def test_a_saved_token_is_sent_elsewhere_only_by_the_users_choice(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{FOREIGN}:{listener.port}"
    with pytest.raises(ClusterError, match="clusters on this machine only; RAY_AUTH_MODE=token sends it all the same"):
        status_of_run(None, address)
    assert listener.seen == [""] and "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ClusterError, match="not the cluster's"):
        connect(ClusterConfig(address=address))
    assert listener.seen == ["", "", f"Bearer {SECRET}"]


def test_on_this_machine_a_token_is_sent_if_it_is_required(listener: Listener) -> None:
    for refuse, problem, seen in (
        (True, "not the cluster's", ["", f"Bearer {SECRET}"]),
        (False, r"runs Ray 0\.0", [""]),
    ):
        listener.refuse = refuse
        listener.seen.clear()
        with pytest.raises(ClusterError, match=problem):
            connect(ClusterConfig(address=f"127.0.0.1:{listener.port}"))
        assert listener.seen == seen


def test_a_dashboard_elsewhere_is_not_sent_a_saved_token() -> None:
    assert tokens.token_for(f"{FOREIGN}:8265") == {}
    with socket.create_server(("0.0.0.0", 0)) as server, ThreadPoolExecutor(1) as pool:
        assert tokens.read_token(tokens.token_for(f"127.0.0.1:{server.getsockname()[1]}")) == SECRET
        request = pool.submit(first_request, server)
        with pytest.raises(ClusterError):
            submit("train", [], f"http://{FOREIGN}:{server.getsockname()[1]}", None, False, None)  # type: ignore[arg-type]
        assert SECRET not in request.result()


def first_request(server: socket.socket) -> str:
    server.settimeout(30)
    connection, _ = server.accept()
    with connection:
        request = connection.recv(65536).decode()
        connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    return request


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        (socket.gethostname(), True),
        (FOREIGN, False),
        ("192.0.2.1", False),
        ("127.0.0.1.example.com", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_which_hosts_are_this_machine(host: str, expected: bool) -> None:
    assert tokens.is_this_machine(host) is expected


def test_what_the_user_chose_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert tokens.token_for("127.0.0.1:1") == {} == tokens.new_token(home)
    assert tokens.read_token({}) == ""
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    assert tokens.read_token(tokens.token_for(f"{FOREIGN}:1")) == "mine"


def test_a_private_cluster_has_a_token_of_its_own_that_other_processes_find(home: Path) -> None:
    folder = make_owned_folder(tokens.PRIVATE_FOLDER, home)
    variables = tokens.new_token(folder)
    path = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(tokens.read_token(variables)) == 64
    with socket.create_server(("0.0.0.0", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{ours.getsockname()[1]}"
        tokens.note_address(folder, address)
        assert tokens.private_clusters()[address] == folder
        assert tokens.token_for(address) == variables
        assert tokens.token_for(f"{FOREIGN}:{ours.getsockname()[1]}") == {}
        assert tokens.read_token(tokens.token_for(f"127.0.0.1:{other.getsockname()[1]}")) == SECRET
    assert tokens.token_for(address) == {}, "whoever takes the port next is not shown it"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_token_is_not_shown_to_a_listener_of_another_user(host: str) -> None:
    program = f"""
import os, socket
os.setuid({OTHER_USER})
server = socket.create_server(({host!r}, 0), family=socket.AF_INET6 if ":" in {host!r} else socket.AF_INET)
print(server.getsockname()[1], flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        assert tokens.token_for(address) == {}
        assert f"belongs to user id {OTHER_USER}, not to this user or root" in tokens.why_withheld(address)
        process.stdin.write("end\n")


def test_variables_are_put_back() -> None:
    with tokens.shown({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}):
        assert os.environ["RAY_AUTH_TOKEN"] == "x"
    assert not tokens.chosen_by_user()
