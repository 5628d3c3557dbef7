"""`specactor serve` before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.fakes.forked_command import specactor


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0: other machines would reach the server, and it has no token"),
        (["--host", "no.such.host.invalid"], {"SPECACTOR_API_KEY": "a" * 20}, "--host no.such.host.invalid: "),
        (["target.model=nowhere"], {}, "nowhere"),
        (["--model-name", ""], {}, "--model-name is empty"),
    ],
    ids=["token", "host", "model", "name"],
)
def test_mistakes_end_with_code_2(options: list[str], environment: dict[str, str], said: str, tmp_path: Path) -> None:
    done = specactor(tmp_path, "serve", "--port", "0", *options, **environment)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "a" * 20 not in done.stderr


def test_a_taken_port_is_found_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = specactor(tmp_path, "serve", "--port", port)
    assert done.returncode == 2 and f"--port {port}: Address already in use" in done.stderr


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    done = specactor(tmp_path, "serve", "--help")
    assert done.returncode == 0 and "SPECACTOR_API_KEY" in done.stdout and not done.heavy
