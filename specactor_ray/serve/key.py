"""Bearer token of the server: from the environment or a file, not from the command line, which others can read."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import read_foreign
from specactor_ray.serve.guard import is_loopback

KEY, KEY_PATH = "SPECACTOR_API_KEY", "SPECACTOR_API_KEY_PATH"
_SHORTEST, _MOST_BYTES = 16, 4096


def read_key(host: str, environment: MutableMapping[str, str] | None = None) -> str | None:
    """The required bearer token; None if there is none and only this machine can reach `host`.

    The token is removed from the environment, so that processes started later do not inherit it.

    Raises:
        InputError: The server would be open to other machines, or the token cannot be used.
    """
    environment = os.environ if environment is None else environment
    path, key = environment.get(KEY_PATH), environment.pop(KEY, "").strip()
    if not key and path:
        try:
            key = read_foreign(path, _MOST_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{KEY_PATH} names {path}, which cannot be read: {error}") from None
        if not key:
            raise InputError(f"{KEY_PATH} names {path}, which is empty")
    if not key:
        if is_loopback(host):
            return None
        raise InputError(
            f"--host {host}: other machines would reach the server, and it has no token. Fix: set {KEY}, or {KEY_PATH} "
            "to a file with it; --host 127.0.0.1 needs none"
        )
    if len(key) < _SHORTEST or not key.isascii() or any(one.isspace() or not one.isprintable() for one in key):
        raise InputError(f"the token of {KEY} or {KEY_PATH} must be {_SHORTEST} or more visible ASCII characters")
    return key
