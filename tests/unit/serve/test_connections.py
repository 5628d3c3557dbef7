"""Real sockets whose clients send or read too slowly, or not at all, beside clients that behave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from specactor_ray.serve import connections
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_queue import ScriptedQueue, make_service
from tests.waiting import wait_until

SHORT = {"head_s": 0.2, "body_s": 0.2, "reader_s": 0.2}
"""A busy machine may exceed these: what must succeed is sent in one piece, and again if the first of it was late."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
BODY = {"prompt": [5], "max_tokens": 3, "seed": 1}


@pytest.fixture
def served() -> Iterator[Callable[..., Any]]:
    """Starts a server; gives its URL and its port."""
    with contextlib.ExitStack() as stack:

        def start(engine: ScriptedQueue | None = None, token: str | None = None, **limits: Any) -> tuple[str, int]:
            service = make_service(engine or ScriptedQueue(), Limits(**limits))
            url = stack.enter_context(serving(service, token))
            return url, int(url.rpartition(":")[2])

        yield start


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def rest(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def answer_to(port: int, sent: bytes) -> bytes:
    """Everything that comes on a new connection; nothing if the client is late."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        return rest(connection)


def pooled(port: int) -> http.client.HTTPConnection:
    """A connection on which a request was answered. It sends head and body in one piece."""

    def connected() -> http.client.HTTPConnection | None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                return connection
        connection.close()
        return None

    connection: http.client.HTTPConnection = wait_until(connected, "a request in time")
    return connection


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"GET /health HTTP/1.1\r\nHost: loc", b"HTTP/1.1 408"), (HEAD + b"90\r\n\r\n{", b"HTTP/1.1 408")],
    ids=["nothing", "head", "body"],
)
def test_a_request_that_does_not_arrive_ends_its_connection(served: Any, sent: bytes, answer: bytes) -> None:
    _, port = served(**SHORT)
    wait_until(lambda: answer_to(port, sent)[:12] == answer, "the refusal")
    pooled(port).close()


def test_one_byte_at_a_time_is_not_progress(served: Any) -> None:
    _, port = served(**SHORT)
    for start in (b"GET /health HTTP/1.1\r\nA: ", HEAD + b"1000000\r\n\r\n"):
        with connect(port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(start)
            while True:  # until the connection has been closed
                connection.sendall(b"a")
                connection.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1000):
                        break


def test_a_head_without_end_is_refused(served: Any) -> None:
    _, port = served()
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            for part in (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ", *[b"a" * 10_000] * 100):
                connection.sendall(part)
        assert rest(connection)[:12] in (b"", b"HTTP/1.1 400")


def test_a_client_that_reads_nothing_is_aborted(served: Any) -> None:
    engine = ScriptedQueue(part=5000)
    engine.script = lambda _prompt, _sampling: [20] * 400_000
    _, port = served(engine, reader_s=0.2)
    body = json.dumps({"prompt": [5], "max_tokens": 400_000, "stream": True, "return_token_ids": True}).encode()
    with connect(port) as connection:
        connection.sendall(HEAD + b"%d\r\n\r\n" % len(body) + body)
        wait_until(lambda: bool(engine.submitted), "the request")
        wait_until(lambda: not engine.open, "its end")


def test_waiting_streams_and_pooled_connections_are_left_alone(served: Any) -> None:
    engine = ScriptedQueue()
    engine.held = True
    _, port = served(engine, **SHORT)
    with contextlib.closing(pooled(port)) as connection:
        body, headers = {**BODY, "stream": True}, {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        for _ in range(3):  # longer than any of the limits
            assert answer_to(port, b"") == b""
        engine.held = False
        assert b"[DONE]" in answer.read()
        for _ in range(2):
            assert answer_to(port, b"") == b""
            connection.request("POST", "/v1/completions", json.dumps(BODY).encode(), headers)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()


def test_idle_connections_shut_nothing_off(served: Any) -> None:
    url, port = served(max_connections=4, token="a-token-of-some-length")
    with contextlib.ExitStack() as stack:
        for at in range(200):
            connection = stack.enter_context(connect(port))
            if at % 2:
                connection.sendall(b"GET /health HTTP/1.1\r\n")
        headers = {"Authorization": "Bearer a-token-of-some-length"}
        for path in ("/health", "/v1/models", "/health"):
            assert httpx.get(f"{url}{path}", headers=headers, timeout=120).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=headers, timeout=120).is_success


def test_probes_are_answered_when_the_server_is_full(served: Any) -> None:
    engine = ScriptedQueue()
    engine.held = True
    url, port = served(engine, max_connections=2)
    body = json.dumps(BODY).encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(port)) for _ in range(2)]
        for client in clients:
            client.sendall(HEAD + b"%d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(engine.open) == 2, "two requests")
        assert all(httpx.get(f"{url}/{path}", timeout=120).is_success for path in ("health", "ping"))
        refused = httpx.post(f"{url}/v1/completions", json=BODY, timeout=120)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        engine.held = False
        assert all(client.recv(15) == b"HTTP/1.1 200 OK" for client in clients)


class TestRefusedBodies:
    @pytest.mark.parametrize("token", [None, "a-token-of-some-length"])
    def test_clients_read_the_refusal(self, served: Any, token: str | None) -> None:
        url, port = served(max_body_bytes=1 << 20, token=token)
        status, body = 401 if token else 413, b" " * (3 << 20)
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == status and json.loads(answer.read())["error"]["code"] == status
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200, "the connection goes on"
        connection.close()
        with pytest.raises(urllib.error.HTTPError) as caught:  # it asks to close the connection
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers))
        assert caught.value.code == status
        in_chunks = httpx.post(f"{url}/v1/completions", content=iter([body]), headers=headers, timeout=120)
        assert in_chunks.status_code == status

    def test_no_body_is_read_for_ever(self, served: Any) -> None:
        _, port = served(max_body_bytes=1 << 16)
        with connect(port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(HEAD + b"%d\r\n\r\n" % (1 << 40))
            for _ in range(10_000):
                connection.sendall(b" " * (1 << 16))
            pytest.fail("it is read to the time limit")


def test_the_number_of_connections_stays_below_that_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"soft": 1024, "hard": 2048}
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _kind: (files["soft"], files["hard"]))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _kind, both: files.update(soft=both[0]))
    assert connections.most_connections(Limits(max_connections=4096)) == 2048 - 512 and files["soft"] == 2048
    assert connections.most_connections(Limits(max_connections=100)) == 164
