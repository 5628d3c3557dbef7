"""The socket of the server, its address, and its end while requests are open."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
from typing import Any

import httpx
import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.serve import run
from specactor_ray.serve.run import listening_socket, server_of, url_of
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_queue import ScriptedQueue, make_service, on

HOST = "127.0.0.1"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "n": 3}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ("/generate", {"text": "a"}),
    ("/generate", {"text": "a", "stream": True}),
]


def test_a_port_is_taken_by_a_server_and_not_by_connections_that_linger() -> None:
    with listening_socket(HOST, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: "):
            listening_socket(HOST, port)
        with socket.create_connection((HOST, port)):
            first.accept()[0].close()  # the side that closes first lingers
    listening_socket(HOST, port).close()


@pytest.mark.parametrize("host", ["a..b", ".x", "a" * 70, "no.such.host.invalid"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(InputError, match=f"--host {host}: "):
        listening_socket(host, 0)


def test_the_address_of_a_server_can_be_reached() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80" and url_of("::1", 80) == "http://[::1]:80"
    assert url_of("0.0.0.0", 80) == url_of("::", 80) == f"http://{socket.gethostname()}:80"


def test_a_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    server = server_of(make_service(ScriptedQueue()))
    with sigterm_interrupts():
        server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and capfd.readouterr().err == "interrupted; stopping ...\n"


def test_requests_that_are_cut_off_are_answered_in_their_form(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_CUT_OFF_S", 60)
    engine = ScriptedQueue()
    engine.held = True
    service = make_service(engine, Limits(drain_s=0.0))
    lines: list[str] = []
    server, listener = server_of(service, report=lines.append), listening_socket(HOST, 0)
    url = f"http://{HOST}:{listener.getsockname()[1]}"

    async def work() -> list[httpx.Response]:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            asked = [client.post(path, json=body) for path, body in REQUESTS]
            answers = asyncio.gather(*asked)
            while len(engine.open) < 8:
                await asyncio.sleep(0)
            server.should_exit = True
            await serving
            return await answers

    with caplog.at_level(logging.WARNING):
        answers = asyncio.run(work())
    assert lines == ["waiting up to 0 s for 6 requests; Ctrl-C cuts them off"]
    assert server.cut_off == 6
    assert not engine.open
    problem = "503 the server ends; the request was cut off"
    assert sorted(caplog.messages) == sorted(f"{path}: {problem}" for path, _ in REQUESTS)
    for (_, sent), answer in zip(REQUESTS, answers, strict=True):
        is_stream = "stream" in sent
        assert answer.status_code == (200 if is_stream else 503)
        text = answer.text
        if is_stream:
            *_, text, last, end = text.split("\n\n")
            assert last == "data: [DONE]" and not end
        body = json.loads(text.removeprefix("data: "))
        assert "the server ends" in body["error"]["message"]
        assert body["success"] is False


def test_the_traffic_is_a_line_every_hundred_ticks_with_requests() -> None:
    service, lines = make_service(ScriptedQueue()), list[str]()
    server, rollout = server_of(service, report=lines.append), service.rollout

    async def tick(*counters: int) -> None:
        for counter in counters:
            await server.on_tick(counter)

    asyncio.run(tick(99, 199))
    rollout.committed_tokens = 30
    counted = RolloutMetrics(row_steps=20, committed_tokens=30, drafted_tokens=8, accepted_tokens=2)
    rollout.metrics = lambda: counted  # type: ignore[method-assign]
    asyncio.run(tick(298))
    assert lines == []
    asyncio.run(tick(299, 399))
    (line,) = lines
    figures = r"[\d.]+ tokens/s; 1.50 tokens a request and step, 25% of draft tokens right"
    assert re.fullmatch(f"0 running, 0 waiting; {figures}", line)


def test_a_failed_request_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path, body in (("/v1/completions", {"prompt": "a", "n": 0}), ("/no%0Apath", {}), *REQUESTS):
            await client.post(path, json=body)

    on(make_service(ScriptedQueue()), work)
    expected = ["/v1/completions: 400 n is 0; it must be a whole number from 1 to", "/no\\npath: 404 Not Found"]
    assert [message.startswith(start) for message, start in zip(caplog.messages, expected, strict=True)] == [True] * 2
