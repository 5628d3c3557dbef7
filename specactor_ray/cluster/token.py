"""Which Ray token this process shows to whom.

Whoever holds a cluster's token may run code on it, and Ray sends it in clear. So a cluster that is started here gets a
token of its own, and the one saved in the user's home goes to clusters on this machine alone. Anything else is for the
user to say, by RAY_AUTH_MODE, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, which always win.
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

from specactor_ray.leftovers import living_folders

PRIVATE_FOLDER = "specactor-"
"""How the folder of a cluster that was started here begins."""
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_FILE, _ADDRESS_FILE = "auth_token", "address"


def chosen_by_user() -> bool:
    """Whether the environment says something about tokens."""
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
    """Write down which cluster the token in `folder` is for, so that this user's other processes find it."""
    (folder / _ADDRESS_FILE).write_text(address, encoding="utf-8")


def token_for(address: str, found_here: bool = False) -> dict[str, str]:
    """The variables with which this process may show a token at `host:port`; none when it may not, or has none.

    Args:
        address: Of a cluster or a dashboard.
        found_here: A process of this machine belongs to that cluster, wherever its head is.
    """
    if chosen_by_user():
        return _completed()
    host, _, port = address.rpartition(":")
    here = is_this_machine(host)
    for base in {tempfile.gettempdir(), "/tmp"} if here else ():
        for folder in living_folders(PRIVATE_FOLDER, base):
            with contextlib.suppress(OSError):
                if (folder / _ADDRESS_FILE).read_text(encoding="utf-8").rpartition(":")[2] == port:
                    return _from_file(folder / _TOKEN_FILE) if (folder / _TOKEN_FILE).exists() else {}
    saved = saved_token()
    return _from_file(saved) if saved.is_file() and (here or found_here) else {}


def saved_token() -> Path:
    """Where Ray keeps a user's token."""
    return Path.home() / ".ray" / "auth_token"


def read_token(variables: Mapping[str, str]) -> str:
    """The token that Ray sends with these variables on top of the environment; empty when it sends none."""
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
    """While inside, Ray in this process, and processes that it starts, use these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    if variables:
        _make_ray_read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if variables:
            _make_ray_read_again()


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine for certain: by an address of its own, not by a name that others resolve."""
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
    """A token without a mode is a wish for it to be used."""
    return {} if _MODE in os.environ else {_MODE: "token"}


def _from_file(path: Path) -> dict[str, str]:
    return {_MODE: "token", _PATH: str(path)}


def _make_ray_read_again() -> None:
    """Ray reads its settings once, when it is imported. In this order: threads of it that still run must not look for
    a token that is gone."""
    from ray import _raylet

    compiled: Any = _raylet  # says nothing of its contents
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()
