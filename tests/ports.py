"""Ports for servers that tests start."""

from __future__ import annotations

import secrets
import socket

_FIRST, _END = 20_000, 32_768
"""Linux takes the ports of connections, and of servers that ask for any, from those above: one of these is still free
when a process that starts for seconds binds it."""


def free_port() -> int:
    while True:
        port = _FIRST + secrets.randbelow(_END - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
