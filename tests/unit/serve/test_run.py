"""The socket of the server, and its address."""

from __future__ import annotations

import socket

import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.serve.run import listen, listening_socket, url_of

HOST = "127.0.0.1"


class TestSocket:
    def test_a_port_is_bound_once_also_before_anything_listens(self) -> None:
        with listening_socket(HOST, 0) as first:
            port = first.getsockname()[1]
            with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
                listening_socket(HOST, port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))
            listen(first, 8)
            socket.create_connection((HOST, port)).close()
            with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
                listening_socket(HOST, port)

    def test_a_port_with_connections_that_linger_is_bound_again(self) -> None:
        with listening_socket(HOST, 0) as first:
            port = first.getsockname()[1]
            listen(first, 8)
            with socket.create_connection((HOST, port)):
                first.accept()[0].close()  # the side that closes first lingers
        with listening_socket(HOST, port) as second:
            listen(second, 8)

    def test_a_port_that_is_lost_before_it_listens_is_a_mistake_of_the_user(self) -> None:
        with socket.socket() as first, socket.socket() as second:
            for one in (first, second):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind((HOST, 0))
            second.bind(first.getsockname())
            listen(first, 8)
            with pytest.raises(InputError, match="Address already in use; choose another"):
                listen(second, 8)


def test_the_address_of_a_server_can_be_reached() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80" and url_of("::1", 80) == "http://[::1]:80"
    assert url_of("0.0.0.0", 80) == url_of("::", 80) == f"http://{socket.gethostname()}:80"
