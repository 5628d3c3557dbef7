"""Which cluster a command uses, errors where none answers, and the tokens of private clusters."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specactor_ray.cluster import address as addresses
from specactor_ray.cluster import connection
from specactor_ray.cluster.connection import _shown
from specactor_ray.config.load import load_config
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError, ConfigError
from specactor_ray.rollout.operations import status_of_run

NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
NOTHING = "127.0.0.1:1"


def connect(config: ClusterConfig) -> None:
    with connection.connect(config):
        pass


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's folder for temporary files, and an environment without settings."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "x")  # so that it is restored in any case
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[str]:
    """Address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Address of a server that is no Ray cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                peer, _ = server.accept()
                peer.recv(1000)
                peer.sendall(answer)
                peer.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def note_start(folder: Path, address: str) -> Path:
    """What `ray start` leaves."""
    (folder / "ray").mkdir()
    note = folder / "ray" / "ray_current_cluster"
    note.write_text(address)
    return note


def private_cluster(folder: Path, address: str) -> Path:
    """What a run's own cluster leaves."""
    made = addresses.private_folder()
    assert made.parent == folder
    addresses.note_address(made, address)
    return made


def test_one_rule_for_all_commands(listener: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given, RAY_ADDRESS, and without both a cluster of its own for a run, and the one here for `status`."""
    with pytest.raises(ClusterError, match=r"no Ray cluster is here\. Fix: give --address"):
        status_of_run(None, "auto")
    assert load_config(None, []).cluster.address == "local"
    private_cluster(folder, listener)
    assert addresses.cluster_of_run() == listener and load_config(None, []).cluster.address == "local"
    monkeypatch.setenv("RAY_ADDRESS", NOTHING)
    config = load_config(None, [])
    assert config.cluster.address == NOTHING
    for ask in (lambda: connect(config.cluster), lambda: status_of_run(None, "auto")):
        with pytest.raises(ClusterError, match=rf"no Ray cluster answers at {NOTHING} \(RAY_ADDRESS\): "):
            ask()
    assert addresses.require_listener(listener) == listener
    assert load_config(None, [f"cluster.address={listener}"]).cluster.address == listener
    assert load_config(None, ["cluster.address=local"]).cluster.address == "local"


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigError, match=r"must be host:port, .* Fix: correct RAY_ADDRESS") as caught:
        load_config(None, [])
    assert caught.value.key == "cluster.address"


@pytest.mark.parametrize("named", ["", "auto"])
def test_auto_is_the_newest_ray_start_of_this_machine(
    named: str, listener: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ClusterError, match=r"cluster\.address=auto: .*no `ray start` is noted in .*Fix: start one"):
        connect(ClusterConfig(address="auto"))
    private_cluster(folder, listener)
    with pytest.raises(ClusterError, match="no `ray start` is noted"):  # another run's is private to it
        connect(ClusterConfig(address="auto"))
    note = note_start(folder, listener)
    assert addresses.require_listener("auto") == listener
    note.write_text(NOTHING)
    with pytest.raises(ClusterError, match=rf"no Ray cluster answers at {NOTHING} \(as noted in {note}\): "):
        connect(ClusterConfig(address="auto"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_what_another_user_offers_is_not_joined(listener: str, folder: Path) -> None:
    os.chown(note_start(folder, listener), 54321, 54321)
    with pytest.raises(ClusterError, match="no `ray start` is noted"):
        addresses.require_listener("auto")


def test_of_several_clusters_none_is_chosen_and_those_that_are_gone_do_not_count(listener: str, folder: Path) -> None:
    note_start(folder, NOTHING)
    private_cluster(folder, listener)
    assert addresses.clusters_here() == [listener] and addresses.cluster_of_run() == listener
    (folder / "ray" / "ray_current_cluster").write_text(other := listener.replace("127.0.0.1", "localhost"))
    with pytest.raises(
        ClusterError, match=rf"2 Ray clusters run on this machine: {listener}, {other}\. Fix: give --add"
    ):
        addresses.cluster_of_run()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"\0\0\0\4" + b"\0" * 5, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_cluster_that_ends_while_it_is_joined_and_another_server_are_given_up(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection._JOIN_ONCE, "RAY_py_gcs_connect_timeout_s", "1")
    words = r"could not join the Ray cluster at 127\.0\.0\.1:\d+: .*check that it still runs"
    with answering(answer) as address, pytest.raises(ClusterError, match=words):
        connect(ClusterConfig(address=address))


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/x")
    with pytest.raises(ClusterError, match=r"could not be started: .*/proc/x.* Fix: .*RAY_TMPDIR, if it is set"):
        connect(ClusterConfig(address="local"))


@pytest.mark.parametrize("address", ["somewhere", "host:port", "ray://host:10001", "http://127.0.0.1:8265", "h:99999"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ClusterError, match="must be host:port"):
        connect(ClusterConfig(address=address))


def test_a_private_cluster_has_a_token_of_its_own_that_other_processes_find(folder: Path) -> None:
    made = private_cluster(folder, "127.0.0.1:11004")
    variables = addresses.token_for("127.0.0.1:11004")
    path = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert variables["RAY_AUTH_MODE"] == "token" and path.parent == made and len(path.read_text()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert addresses.token_for("127.0.0.1:11005") == addresses.token_for("192.0.2.8:11004") == {}


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_with_a_mode_of_the_user_no_cluster_has_a_token_of_its_own(
    mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = private_cluster(folder, "127.0.0.1:11004")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert addresses.token_for("127.0.0.1:11004") == addresses.token_in(made) == {}


def test_a_token_without_a_mode_does_not_replace_that_of_a_private_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = private_cluster(folder, "127.0.0.1:11004")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with _shown(addresses.token_for("127.0.0.1:11004")):
        assert "RAY_AUTH_TOKEN" not in os.environ and Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent == made
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
