"""Choice of the Ray token that this process sends to a cluster.

The holder of a cluster's token may run code on it, and Ray sends it unencrypted. So a cluster that is started here gets
its own token, and the token saved in the user's home is sent only to clusters on this machine, of this user or root.
The user sets anything else by RAY_AUTH_MODE, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, which always take precedence.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from specactor_ray.core.leftovers import living_folders

PRIVATE_FOLDER = "specactor-"
"""Prefix of the folder of a cluster that was started here."""
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_FILE, _ADDRESS_FILE = "auth_token", "address"
TOKEN_FIX = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<file with the token the cluster was started with> "
    "(or RAY_AUTH_TOKEN)."
)
_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def chosen_by_user() -> bool:
    """Whether the environment has settings of tokens."""
    return any(name in os.environ for name in (_MODE, _TOKEN, _PATH))


def new_token(folder: Path) -> dict[str, str]:
    """The variables for a cluster that this process starts: with a fresh token in `folder`, unless the user chose."""
    if chosen_by_user():
        return _completed()
    path = folder / _TOKEN_FILE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return _from_file(path)


def note_address(folder: Path, address: str) -> None:
    """Record the address of the cluster of the token in `folder`, so that this user's other processes find it."""
    (folder / _ADDRESS_FILE).write_text(address, encoding="utf-8")


def token_for(address: str, found_here: bool = False) -> dict[str, str]:
    """Environment variables with which this process may send a token to `host:port`; empty without one or permission.

    Args:
        address: Address of a cluster or a dashboard.
        found_here: A process of this machine belongs to that cluster, wherever its head is.
    """
    if chosen_by_user():
        return _completed()
    host, _, port = address.rpartition(":")
    own, path = is_this_machine(host), saved_token()
    if own and not _is_trusted(port):
        return {}
    if own:
        path = next((at / _TOKEN_FILE for other, at in private_clusters().items() if other.endswith(f":{port}")), path)
    return _from_file(path) if (own or found_here) and path.is_file() else {}


def why_withheld(address: str) -> str:
    """Why `token_for` does not send the saved token to `host:port`; empty without a token, or if the user decides."""
    if chosen_by_user() or not saved_token().is_file():
        return ""
    host, _, port = address.rpartition(":")
    sends = "RAY_AUTH_MODE=token sends it all the same."
    if not is_this_machine(host):
        return f" {saved_token()} goes to clusters on this machine only; {sends}"
    if _is_trusted(port):
        return ""
    uids = ", ".join(map(str, sorted(_listeners(port)))) or "unknown"
    return f" {saved_token()} was not sent: the listener belongs to user id {uids}, not to this user or root; {sends}"


def private_clusters() -> dict[str, Path]:
    """Address → folder of the private clusters of this user's runs; clusters that are starting have no address yet."""
    found = {}
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        for folder in living_folders(PRIVATE_FOLDER, base):
            with contextlib.suppress(OSError):
                note = folder / _ADDRESS_FILE
                found[note.read_text(encoding="utf-8") if note.exists() else ""] = folder
    return found


def _is_trusted(port: str) -> bool:
    """Whether the process that listens on a port of this machine belongs to this user or root."""
    uids = _listeners(port)
    return bool(uids) and uids <= {os.getuid(), 0}


def _listeners(port: str) -> set[int]:
    """User ids of the sockets that listen on a port of this machine, at any address."""
    uids = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and port.isdecimal() and int(fields[1].rpartition(":")[2], 16) == int(port):
                    uids.add(int(fields[7]))
    return uids


def saved_token() -> Path:
    """File in which Ray keeps a user's token."""
    return Path.home() / ".ray" / "auth_token"


def read_token(variables: Mapping[str, str]) -> str:
    """The token that Ray sends with these variables in addition to the environment; empty when it sends none."""
    environment = {**os.environ, **variables}
    if environment.get(_MODE, "").lower() != "token":
        return ""
    token = environment.get(_TOKEN, "").strip()
    if token:
        return token
    try:
        return Path(environment.get(_PATH) or saved_token()).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@contextlib.contextmanager
def shown(variables: Mapping[str, str]) -> Iterator[None]:
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

        compiled: Any = _raylet  # untyped
        compiled.Config.initialize("")  # first: running threads of Ray must not look for a deleted token
        compiled.AuthenticationTokenLoader.instance().reset_cache()


def is_this_machine(host: str) -> bool:
    """Whether a host is certainly this machine: by one of its addresses, not by a name that other servers resolve."""
    host = host.strip("[]").lower()
    if host in ("localhost", socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return address.is_loopback or str(address) in own


def _completed() -> dict[str, str]:
    """The mode that is missing: a token without a mode is used."""
    return {} if _MODE in os.environ else {_MODE: "token"}


def _from_file(path: Path) -> dict[str, str]:
    return {_MODE: "token", _PATH: str(path)}
